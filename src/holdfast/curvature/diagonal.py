"""Fisher information: squares (or outer products) of per-example scores, summed over the data, in nats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..likelihood import Likelihood
from ..params import Only, trainable, unwrapped
from ..precision import Diagonal
from .batches import Forward
from .engine import MEMORY, Engine
from .replicas import alike, replicas_of
from .scores import Scoring, Targets, accumulators
from .squares import Squares


def diagonal_fisher(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    targets: Targets | None = None,
    seed: int = 0,
    forward: Forward | None = None,
    only: Only = None,
    memory: int = MEMORY,
    taps: bool = True,
) -> Diagonal:
    """The diagonal of the Fisher information: F = Σₙ E_y[(∇ −log p(y | xₙ))²], exact per example.

    `targets` says whose labels y are: "expected", the average over the model's own distribution (the exact Fisher; a
    backward pass for each class but one, and the default up to 16); "sampled", drawn from it with `seed`; "observed",
    the data's (the empirical Fisher, which fades as the model grows confident). Batches are `(inputs, targets)` or
    dicts with 'labels'; `forward(model, batch)` adapts unusual calls. One pass; the model is left as it was. `only`
    takes it of a part of the parameters, by patterns over their names ("head.*").

    With labels sampled or observed it costs about one training pass, and with expected ones a backward pass for each
    class but one: gradients are tapped where operations use the parameters, and what cannot be tapped goes some
    examples at a time (`coverage` tells which). `memory` is how many bytes the gradients of single examples may take
    at once; `taps=False` takes every parameter the general way.

    Of a model in DistributedDataParallel, call it on all ranks, each with batches of its own: all get the Fisher of all
    the data. Sampled labels are other ones on each rank.
    """
    with replicas_of(model) as ranks:
        model = unwrapped(model)
        named = trainable(model, only)
        engine = Engine(Scoring(model, likelihood, targets, seed, forward, ranks), named, memory, taps=taps)
        total = accumulators(named)
        with alike(model, ranks):
            source = engine.collect(batches, Squares(named, total, engine.limit))
    return Diagonal(total, (source,))
