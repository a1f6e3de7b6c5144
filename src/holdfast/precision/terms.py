"""A Kronecker product of one layer, and one product made of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .factors import diagonal, inner, summed
from .layers import Layer


@dataclass(frozen=True)
class Term:
    """G ⊗ A of one layer: G summed over the data, A its mean. A side too wide for a matrix has its diagonal alone."""

    outputs: Tensor  # G: (groups, outputs, outputs) or (groups, outputs)
    inputs: Tensor  # A: (groups, inputs, inputs) or (groups, inputs)
    num_data: float  # what A's mean is over, to weigh it against others


def averaged(terms: tuple[Term, ...]) -> Term:
    count = sum(term.num_data for term in terms)
    weights = [term.num_data / count if count else 1 / len(terms) for term in terms]
    inputs = summed([weight * term.inputs for weight, term in zip(weights, terms, strict=True)])
    return Term(summed([term.outputs for term in terms]), inputs, count)


def padded_inputs(layers: Mapping[Layer, tuple[Term, ...]], multiple: int) -> dict[Layer, tuple[Term, ...]]:
    """Every A padded with zeros to a multiple of so many; those of layers alike are slices of one tensor."""
    found = {layer: list(terms) for layer, terms in layers.items()}
    alike: dict[Any, list[tuple[Layer, int]]] = {}
    for layer, terms in layers.items():
        for index, term in enumerate(terms):
            if missing := -term.inputs.shape[-1] % multiple:
                key = (layer.unnamed(), index, missing, term.inputs.shape, term.inputs.dtype, term.inputs.device)
                alike.setdefault(key, []).append((layer, index))
    for (_, _, missing, shape, *_), places in alike.items():
        padded = [size + missing for size in shape[1:]]
        whole = layers[places[0][0]][places[0][1]].inputs.new_zeros(len(places), shape[0], *padded)
        for one, (layer, index) in zip(whole, places, strict=True):
            term = layers[layer][index]
            one[tuple(slice(size) for size in shape)].copy_(term.inputs)
            found[layer][index] = replace(term, inputs=one)
    return {layer: tuple(terms) for layer, terms in found.items()}


def nearest_product(terms: tuple[Term, ...]) -> Term:
    """The leading singular pair of Σₜ vec(Gₜ) vec(Aₜ)ᵀ, found among the terms' own factors."""
    count = sum(term.num_data for term in terms)
    outputs, inputs = ([getattr(term, side).double() for term in terms] for side in ("outputs", "inputs"))
    # G = Σ xₜGₜ and A = Σ yₜAₜ; with Grams K and L: x ∝ L y, y ∝ K x, a power iteration in as many numbers as terms.
    grams = [torch.stack([torch.stack([inner(a, b) for b in side]) for a in side]) for side in (outputs, inputs)]
    x = torch.ones(len(terms), outputs[0].shape[0], dtype=torch.float64, device=outputs[0].device)  # (terms, groups)
    for _ in range(200):
        y = torch.einsum("stg,tg->sg", grams[0], x)
        y = y / torch.einsum("sg,stg,tg->g", y, grams[1], y).clamp(min=1e-300).sqrt()
        x = torch.einsum("stg,tg->sg", grams[1], y)
    g, a = (
        summed([w.view(-1, *[1] * (f.ndim - 1)) * f for w, f in zip(weights, side, strict=True)])
        for weights, side in ((x, outputs), (y, inputs))
    )
    # The same scale as elsewhere: A has the trace of a mean.
    mean = averaged(terms).inputs
    share = diagonal(mean).double().sum(1) / diagonal(a).sum(1).clamp(min=1e-300)
    g, a = (f * w.view(-1, *[1] * (f.ndim - 1)) for f, w in ((g, 1 / share.clamp(min=1e-300)), (a, share)))
    return Term(g.to(terms[0].outputs), a.to(terms[0].inputs), count)


def diagonal_in(factor: Tensor, vectors: Tensor | None) -> Tensor:
    """The diagonal of a factor in a basis: (groups, size), in float64."""
    factor = factor.double()
    if vectors is None:
        return diagonal(factor)
    if factor.ndim == 2:
        return torch.einsum("gs,gsk->gk", factor, vectors.square())
    return ((factor @ vectors) * vectors).sum(-2).clamp(min=0)
