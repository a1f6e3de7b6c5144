"""Λδ of a whole model over one flat vector, in which each layer's part is the matrix that its products take.

A pull comes with every step of training, and a model has hundreds of parameters: small operations on each of them,
one after another, would cost more than the products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import in_one_pass
from .base import Precision, in_full_precision
from .kronecker import Kronecker
from .layers import Layer
from .sum import Sum
from .terms import Term


class Stack(NamedTuple):
    """Where tensors of one shape lie in a flat one, evenly spaced: what `as_strided` takes for all of them at once."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


class Entries(NamedTuple):
    """A parameter's part of a diagonal."""

    name: str
    values: Tensor
    alone: bool  # nothing before it has a product for the parameter


@dataclass(frozen=True, eq=False)
class Packed:
    """Kronecker products of some layers plus diagonals, over one flat vector."""

    size: int
    padded: bool  # whether matrices have columns that belong to no parameter
    like: Tensor  # of the device and dtype that all is in
    params: dict[tuple[str, ...], Stack]
    layers: dict[Stack, list[tuple[Term, ...]]]  # of the matrices
    diagonals: tuple[Entries, ...]

    def takes(self, params: Iterable[Tensor]) -> bool:
        """Whether parameters are plain tensors on its device, and of no wider dtype."""
        return all(
            kind in (nn.Parameter, Tensor)
            and device == self.like.device
            and torch.promote_types(dtype, self.like.dtype) == self.like.dtype
            for kind, device, dtype in {(type(each), each.device, each.dtype) for each in params}
        )

    @torch.no_grad()
    def pull(self, params: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Λδ and ½ δᵀΛδ for δ = params − mean. The parts of Λδ are views of one tensor."""
        # Columns that belong to no parameter meet zeros in A, and 0 · nan is nan.
        delta = self.like.new_zeros(self.size) if self.padded else self.like.new_empty(self.size)
        product = torch.empty_like(delta)
        deltas, pulls = dict(self._named(delta)), dict(self._named(product))
        for name, part in deltas.items():
            torch.sub(params[name], mean[name], out=part)
        with in_full_precision(delta):
            for stack, layers in self.layers.items():
                matrices, products = (flat.as_strided(*stack).unbind() for flat in (delta, product))
                for matrix, terms, out in zip(matrices, layers, products, strict=True):
                    _sandwich(matrix, terms, out)
        for name, values, alone in self.diagonals:
            if alone:
                torch.mul(deltas[name], values, out=pulls[name])
            else:
                pulls[name].addcmul_(deltas[name], values)
        return pulls, 0.5 * _dot(delta, product)

    def _named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        for names, stack in self.params.items():
            yield from zip(names, flat.as_strided(*stack).unbind(), strict=True)


def packed(precision: Precision, mean: Mapping[str, Tensor]) -> Packed | None:
    """The precision as one; None where it is more than Kronecker products and diagonals, or not plain or not alike."""
    terms = precision.terms if isinstance(precision, Sum) else (precision,)
    products = [term for term in terms if isinstance(term, Kronecker)]
    diagonals = [term.entrywise() for term in terms if not isinstance(term, Kronecker)]
    # Two Kronecker terms of one sum see a weight as different matrices: there is no one place for it.
    if len(products) != 1 or None in diagonals:
        return None
    tensors = [*precision.tensors.values(), *(mean[name] for name in precision.shapes)]
    if not in_one_pass(tensors) or tensors[0].dtype not in (torch.float32, torch.float64):
        return None
    params: dict[tuple[str, ...], Stack] = {}
    layers, size, padded = {}, 0, False
    for (kind, width), members in _alike(products[0]).items():
        matrix = torch.Size([kind.groups, kind.outputs, width])
        views = _views(kind, matrix)
        if views is None:
            return None
        step = matrix.numel()
        for role, (shape, strides, start) in views.items():
            names = tuple(getattr(layer, role) for layer in members)
            params[names] = Stack((len(names), *shape), (step, *strides), size + start)
        place = Stack((len(members), *matrix), (step, width * kind.outputs, width, 1), size)
        layers[place] = list(members.values())
        size += len(members) * step
        padded |= width > kind.inputs
    entries: list[Entries] = []
    rest: dict[torch.Size, list[str]] = {}
    known = {name for names in params for name in names}
    for name, values in (each for diagonal in diagonals if diagonal is not None for each in diagonal.items()):
        entries.append(Entries(name, values, name not in known))
        if name not in known:
            known.add(name)
            rest.setdefault(values.shape, []).append(name)
    for shape, others in rest.items():
        one = torch.empty(len(others), *shape, device="meta")
        params[tuple(others)] = Stack(one.shape, one.stride(), size)
        size += one.numel()
    return Packed(size, padded, tensors[0], params, layers, tuple(entries))


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
