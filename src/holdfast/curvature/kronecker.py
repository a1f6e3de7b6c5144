"""The Kronecker-factored Fisher: for each layer, what its inputs do together and what its outputs' gradients do."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, HoldfastWarning
from ..likelihood import Likelihood
from ..params import Only, trainable, unwrapped
from ..precision import Diagonal, Kronecker, Precision, Source
from ..precision.factors import diagonal
from ..precision.layers import Layer
from ..precision.terms import Term
from .batches import Forward
from .engine import MEMORY, Engine
from .factors import Factors
from .replicas import alike, replicas_of
from .scores import Scoring, Targets, accumulators

# A factor over more directions than this is kept as its diagonal: as a matrix it would take over 256 MiB.
WIDEST = 8192


def kronecker_fisher(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    targets: Targets | None = None,
    seed: int = 0,
    forward: Forward | None = None,
    only: Only = None,
    memory: int = MEMORY,
    widest: int = WIDEST,
    exact_trace: bool = False,
) -> Precision:
    """The Fisher information as G ⊗ A for each linear and convolutional layer, and a diagonal for all the rest.

    A = mean of a aᵀ over a layer's inputs, with a 1 for the bias; G = sum of g gᵀ over the gradients of its outputs.
    Every position of a sequence, every place of a convolution's kernel and every use of a shared layer counts as an
    input of its own ("expand": Eschenhagen et al., 2023). That is right where each has a loss of its own, as tokens do,
    and never leaves a layer free; where positions are averaged before the loss it can be several times too small.
    Positions of a sequence that no gradient reaches, such as padding, do not count.
    `exact_trace=True` scales each layer to the trace of its exact Fisher, at the cost of a diagonal Fisher more.

    A layer is what multiplies by a whole parameter, whatever module does it. Its bias joins if it is added in the same
    operation, one number to each output (a transposed convolution's is not). A side with more than `widest` directions
    (a vocabulary) is kept as its diagonal. The other arguments are those of `diagonal_fisher`, and so is the cost:
    about one training pass, and two matrix products per layer.
    """
    if not isinstance(widest, int) or isinstance(widest, bool) or widest < 1:
        raise ArgumentError(f"widest is the number of directions up to which a factor is a matrix, got {widest!r}.")
    with replicas_of(model) as ranks:
        model = unwrapped(model)
        named = trainable(model, only)
        engine = Engine(Scoring(model, likelihood, targets, seed, forward, ranks), named, memory, beside=True)
        total, tokens = accumulators(named), likelihood.unit == "token"
        factors = Factors(named, total, engine.limit, widest, exact_trace=exact_trace, tokens=tokens)
        with alike(model, ranks):
            source = engine.collect(batches, factors)
    return _assembled(factors, named, source)


def _assembled(factors: Factors, named: Mapping[str, Tensor], source: Source) -> Precision:
    layers: dict[Layer, tuple[Term, ...]] = {}
    order = list(named)
    for layer, sums in sorted(factors.layers.items(), key=lambda each: order.index(each[0].weight)):
        outputs, inputs = sums.factors()
        if factors.exact_trace:
            exact = sum(factors.total[name].sum() for name in layer.shapes)
            trace = (diagonal(outputs).sum(1) * diagonal(inputs).sum(1)).sum()
            outputs = outputs * torch.where(trace > 0, exact / trace, 1)
        layers[layer] = (Term(outputs, inputs, source.size),)
    _say_wide(layers)
    folded = {name for layer in layers for name in layer.shapes}
    entries = {name: factors.total[name] for name in named if name not in folded}
    if not layers:
        warnings.warn(
            f"no layer could be factored, so this is the diagonal Fisher. {_reasons(factors.why)}",
            HoldfastWarning,
            stacklevel=3,
        )
        return Diagonal(entries, (source,))
    kronecker = Kronecker(layers, (source,))
    return kronecker + Diagonal(entries, (source,)) if entries else kronecker


def _reasons(why: Mapping[str, str]) -> str:
    first = [f"`{name}`: {reason}" for name, reason in list(why.items())[:3]]
    return "; ".join(first) + "."


def _say_wide(layers: Mapping[Layer, tuple[Term, ...]]) -> None:
    wide = [
        f"`{layer.weight}` ({size:,} {side})"
        for layer, terms in layers.items()
        for side, factor, size in (
            ("outputs", terms[0].outputs, layer.outputs), ("inputs", terms[0].inputs, layer.inputs),
        )
        if factor.ndim == 2
    ]  # fmt: skip
    if wide:
        warnings.warn(
            f"too wide for a matrix, and so kept as its diagonal on that side: {', '.join(wide)}. A larger `widest` "
            "keeps it whole, at the square of its width in memory.",
            HoldfastWarning,
            stacklevel=4,
        )
