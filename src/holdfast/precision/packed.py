"""Λδ of a whole model over one flat vector, in which each layer's part is the matrix that its products take.

A pull comes with every step of training, and a model has hundreds of parameters: small operations on each of them,
one after another, would cost more than the products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
# So many entries of layers go through one product: what it writes is memory more.
_AT_ONCE = 2**26


class Stack(NamedTuple):
    """Where tensors of one shape lie in a flat one, evenly spaced: what `as_strided` takes for all of them at once."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def at(self, index: int, count: int = 1) -> Stack:
        """Some of them, from one on."""
        return Stack((count, *self.shape[1:]), self.strides, self.start + index * self.strides[0])


class Group(NamedTuple):
    """Parameters of one shape, and what they are pulled to: one tensor of the means for small ones, or each its own."""

    names: tuple[str, ...]
    stack: Stack
    means: Tensor | list[Tensor]


class Round(NamedTuple):
    """One term of each of a few layers: all of their inputs in one tensor, their outputs one by one."""

    inputs: Tensor  # A: (layers, groups, inputs, inputs), or the diagonals
    outputs: list[Tensor]  # G: (groups, outputs, outputs), or its diagonal


@dataclass(frozen=True, eq=False)
class Packed:
    """Kronecker products of some layers plus a diagonal, around a mean, over one flat vector."""

    size: int
    pads: list[Stack]  # the columns of matrices that belong to no parameter
    like: Tensor  # of the device and dtype that all is in
    groups: list[Group]
    layers: list[tuple[Stack, list[Round]]]  # of the matrices
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
        delta, product = self.like.new_empty(self.size), self.like.new_empty(self.size)
        for stack in self.pads:
            delta.as_strided(*stack).zero_()  # they meet zeros in A, and 0 · nan is nan
        for names, stack, means in self.groups:
            place = delta.as_strided(*stack)
            if isinstance(means, Tensor):
                torch.sub(torch.stack([params[name] for name in names]), means, out=place)
            else:
                for name, mean, out in zip(names, means, place.unbind(), strict=True):
                    torch.sub(params[name], mean, out=out)
        with in_full_precision(delta):
            for stack, rounds in self.layers:
                matrices, products = delta.as_strided(*stack), product.as_strided(*stack)
                for index, (inputs, outputs) in enumerate(rounds):
                    _sandwich(matrices, inputs, outputs, products, add=index > 0)
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
    layers: list[tuple[Stack, list[Round]]] = []
    pads, size = [], 0
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
        layers += _rounds(place, list(members.values()))
        if width > kind.inputs:
            pads.append(Stack((*place.shape[:-1], width - kind.inputs), place.strides, size + kind.inputs))
        size += len(members) * step
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
    return Packed(size, pads, tensors[0], groups, layers, more, rest)


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
        found.setdefault((layer.unnamed(), terms[0].inputs.shape[-1]), {})[layer] = terms
    return found


def _rounds(place: Stack, members: list[tuple[Term, ...]]) -> list[tuple[Stack, list[Round]]]:
    """The terms of layers alike: of as many at once as have their inputs in one tensor, else of one by one."""
    most = max(1, _AT_ONCE // place.strides[0])
    alike = len({len(terms) for terms in members}) == 1
    found = []
    for start in range(0, len(members), most):
        part = members[start : start + most]
        wholes = [_whole([term.inputs for term in terms]) for terms in zip(*part, strict=True)] if alike else [None]
        if any(whole is None for whole in wholes):
            for index, terms in enumerate(part, start):
                found.append((place.at(index), [Round(term.inputs.unsqueeze(0), [term.outputs]) for term in terms]))
        else:
            outputs = [[term.outputs for term in terms] for terms in zip(*part, strict=True)]
            rounds = [Round(whole, each) for whole, each in zip(wholes, outputs, strict=True) if whole is not None]
            found.append((place.at(start, len(part)), rounds))
    return found


def _whole(slices: list[Tensor]) -> Tensor | None:
    """The tensor that slices are all of, one behind the other; None if there is none."""
    first, *others = slices
    step = first.numel()
    start = first.storage_offset()
    together = all(
        each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and each.shape == first.shape
        and each.is_contiguous()
        and each.storage_offset() == start + index * step
        for index, each in enumerate(others, 1)
    )
    whole = (len(slices), *first.shape), (step, *first.stride()), start
    return first.as_strided(*whole) if together and first.is_contiguous() else None


def _views(kind: Layer, matrix: torch.Size) -> dict[str, Stack] | None:
    """Where a layer's parameters are in its matrix; None where the weight is no view of it (turned, and in groups)."""
    flat = torch.empty(matrix, device="meta")
    views = kind.tensors(flat[..., : kind.inputs])
    if any(view._base is not flat for view in views.values()):
        return None
    return {role: Stack(view.shape, view.stride(), int(view.storage_offset())) for role, view in views.items()}


def _sandwich(matrices: Tensor, inputs: Tensor, outputs: list[Tensor], products: Tensor, *, add: bool) -> None:
    """G M A for each matrix."""
    if inputs.ndim == 4:  # small layers, one by one, would leave most of a GPU idle
        right = torch.bmm(matrices.flatten(0, 1), inputs.flatten(0, 1)).view(matrices.shape)
    else:
        right = matrices * inputs.unsqueeze(-2)
    for one, factor, out in zip(right.unbind(), outputs, products.unbind(), strict=True):
        if factor.ndim == 3:
            out.baddbmm_(factor, one, beta=int(add))
        elif add:
            out.addcmul_(factor.unsqueeze(-1), one)
        else:
            torch.mul(factor.unsqueeze(-1), one, out=out)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """aᵀb in pieces: BLAS counts in 32 bits, and a CPU's adds so many float32 one after another that digits go."""
    piece = 2**26 if a.is_cuda else 2**18
    if len(a) <= piece:
        return torch.dot(a, b)
    pieces = zip(torch.split(a, piece), torch.split(b, piece), strict=True)
    return torch.stack([torch.dot(*pair) for pair in pieces]).sum()
