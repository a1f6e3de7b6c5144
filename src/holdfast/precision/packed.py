"""Λδ of a whole model over one flat vector, in which each layer's part is the matrix that its products take.

A pull comes with every step of training, and a model has hundreds of parameters: small operations on each of them,
one after another, would cost more than the products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import in_one_pass
from .base import Precision, added, in_full_precision
from .kronecker import Kronecker
from .layers import Layer
from .sum import Sum
from .terms import Term

# Up to so many entries, parameters of one shape are copied into one tensor and treated as one: each by itself would
# take longer to start than to do.
_SMALL = 2**14


class Stack(NamedTuple):
    """Where tensors of one shape lie in a flat one, evenly spaced: what `as_strided` takes for all of them at once."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def at(self, index: int) -> Stack:
        """One of them, as a stack of one."""
        return Stack((1, *self.shape[1:]), self.strides, self.start + index * self.strides[0])


class Group(NamedTuple):
    """Parameters of one shape, and what they are pulled to: one tensor of the means for small ones, or each its own."""

    names: tuple[str, ...]
    stack: Stack
    means: Tensor | list[Tensor]


@dataclass(frozen=True, eq=False)
class Packed:
    """Kronecker products of some layers plus a diagonal, around a mean, over one flat vector."""

    size: int
    padded: bool  # whether matrices have columns that belong to no parameter
    like: Tensor  # of the device and dtype that all is in
    groups: list[Group]
    layers: dict[Stack, list[tuple[Term, ...]]]  # of the matrices
    more: list[tuple[Stack, Tensor]]  # the diagonal's entries in the layers
    rest: list[tuple[Stack, Tensor]]  # and elsewhere

    def takes(self, params: Iterable[Tensor]) -> bool:
        """Whether parameters are plain tensors on its device, and of no wider dtype."""
        return all(
            kind in (nn.Parameter, Tensor)
            and device == self.like.device
            and torch.promote_types(dtype, self.like.dtype) == self.like.dtype
            for kind, device, dtype in {(type(each), each.device, each.dtype) for each in params}
        )

    @torch.no_grad()
    def pull(self, params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Λδ and ½ δᵀΛδ for δ = params − mean. The parts of Λδ share memory."""
        # Columns that belong to no parameter meet zeros in A, and 0 · nan is nan.
        delta = self.like.new_zeros(self.size) if self.padded else self.like.new_empty(self.size)
        product = torch.empty_like(delta)
        for names, stack, means in self.groups:
            place = delta.as_strided(*stack)
            if isinstance(means, Tensor):
                torch.sub(torch.stack([params[name] for name in names]), means, out=place)
            else:
                for name, mean, out in zip(names, means, place.unbind(), strict=True):
                    torch.sub(params[name], mean, out=out)
        with in_full_precision(delta):
            for stack, layers in self.layers.items():
                matrices, products = (flat.as_strided(*stack).unbind() for flat in (delta, product))
                for matrix, terms, out in zip(matrices, layers, products, strict=True):
                    _sandwich(matrix, terms, out)
        for stack, entries in self.more:
            product.as_strided(*stack).addcmul_(delta.as_strided(*stack), entries)
        for stack, entries in self.rest:
            torch.mul(delta.as_strided(*stack), entries, out=product.as_strided(*stack))
        pulls: dict[str, Tensor] = {}
        for names, stack, means in self.groups:
            found = product.as_strided(*stack)
            # Small ones in one piece: then they are added to the gradients in one call.
            pulls.update(zip(names, (found.contiguous() if isinstance(means, Tensor) else found).unbind(), strict=True))
        return pulls, 0.5 * _dot(delta, product)


def packed(precision: Precision, mean: Mapping[str, Tensor]) -> Packed | None:
    """The precision as one; None where it is more than Kronecker products and diagonals, or not plain or not alike."""
    terms = precision.terms if isinstance(precision, Sum) else (precision,)
    products = [term for term in terms if isinstance(term, Kronecker)]
    diagonals = [term.entrywise() for term in terms if not isinstance(term, Kronecker)]
    entries = added(*(each for each in diagonals if each is not None))
    # Two Kronecker terms of one sum see a weight as different matrices: there is no one place for it.
    if len(products) != 1 or None in diagonals:
        return None
    tensors = [*precision.tensors.values(), *(mean[name] for name in precision.shapes)]
    if not in_one_pass(tensors) or tensors[0].dtype not in (torch.float32, torch.float64):
        return None
    groups: list[Group] = []
    layers, size, padded = {}, 0, False
    for (kind, width), members in _alike(products[0]).items():
        matrix = torch.Size([kind.groups, kind.outputs, width])
        views = _views(kind, matrix)
        if views is None:
            return None
        step = matrix.numel()
        for role, (shape, strides, start) in views.items():
            names = tuple(getattr(layer, role) for layer in members)
            groups.append(_group(names, Stack((len(names), *shape), (step, *strides), size + start), mean))
        place = Stack((len(members), *matrix), (step, width * kind.outputs, width, 1), size)
        layers[place] = list(members.values())
        size += len(members) * step
        padded |= width > kind.inputs
    more = [each for group in groups for each in _entries(group, entries)]
    free: dict[torch.Size, list[str]] = {}
    for name in (name for name in entries if name not in products[0].shapes):
        free.setdefault(entries[name].shape, []).append(name)
    rest = []
    for shape, others in free.items():
        one = torch.empty(len(others), *shape, device="meta")
        groups.append(_group(tuple(others), Stack(one.shape, one.stride(), size), mean))
        rest += _entries(groups[-1], entries)
        size += one.numel()
    return Packed(size, padded, tensors[0], groups, layers, more, rest)


def _group(names: tuple[str, ...], stack: Stack, mean: Mapping[str, Tensor]) -> Group:
    means = [mean[name] for name in names]
    return Group(names, stack, torch.stack(means) if means[0].numel() <= _SMALL else means)


def _entries(group: Group, entries: Mapping[str, Tensor]) -> list[tuple[Stack, Tensor]]:
    """The part of a diagonal that is a group's: at once where it is small, and all of it is there."""
    if isinstance(group.means, Tensor) and all(name in entries for name in group.names):
        return [(group.stack, torch.stack([entries[name] for name in group.names]))]
    return [
        (group.stack.at(index), entries[name].unsqueeze(0)) for index, name in enumerate(group.names) if name in entries
    ]


def _alike(kronecker: Kronecker) -> dict[tuple[Layer, int], dict[Layer, tuple[Term, ...]]]:
    """The layers, those together whose matrices are alike but for the names, with the width of the matrices."""
    found: dict[tuple[Layer, int], dict[Layer, tuple[Term, ...]]] = {}
    for layer, terms in kronecker.aligned.items():
        kind = replace(layer, weight="weight", bias=None if layer.bias is None else "bias")
        found.setdefault((kind, terms[0].inputs.shape[-1]), {})[layer] = terms
    return found


def _views(kind: Layer, matrix: torch.Size) -> dict[str, Stack] | None:
    """Where a layer's parameters are in its matrix; None where the weight is no view of it (turned, and in groups)."""
    flat = torch.empty(matrix, device="meta")
    views = kind.tensors(flat[..., : kind.inputs])
    if any(view._base is not flat for view in views.values()):
        return None
    return {role: Stack(view.shape, view.stride(), int(view.storage_offset())) for role, view in views.items()}


def _sandwich(matrix: Tensor, terms: tuple[Term, ...], out: Tensor) -> None:
    """Σₜ Gₜ M Aₜ."""
    for index, term in enumerate(terms):
        inner = torch.bmm(matrix, term.inputs) if term.inputs.ndim == 3 else matrix * term.inputs.unsqueeze(-2)
        if term.outputs.ndim == 3:
            out.baddbmm_(term.outputs, inner, beta=int(index > 0))
        elif index == 0:
            torch.mul(term.outputs.unsqueeze(-1), inner, out=out)
        else:
            out.addcmul_(term.outputs.unsqueeze(-1), inner)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """aᵀb in pieces: BLAS counts in 32 bits, and a CPU's adds so many float32 one after another that digits go."""
    piece = 2**26 if a.is_cuda else 2**18
    if len(a) <= piece:
        return torch.dot(a, b)
    pieces = zip(torch.split(a, piece), torch.split(b, piece), strict=True)
    return torch.stack([torch.dot(*pair) for pair in pieces]).sum()
