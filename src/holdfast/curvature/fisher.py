"""Fisher information: squares (or outer products) of per-example scores, summed over the data, in nats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..likelihood import Likelihood
from ..params import shapes, trainable, unwrapped
from ..precision import Dense, Diagonal
from ..precision.base import require_dense
from ..untouched import untouched
from .batches import Forward, read
from .engine import MEMORY, Engine
from .forms import wide
from .scores import Scoring, Targets, accumulators, backward, require_finite_scores
from .squares import Squares


def diagonal_fisher(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    targets: Targets | None = None,
    seed: int = 0,
    forward: Forward | None = None,
    memory: int = MEMORY,
    taps: bool = True,
) -> Diagonal:
    """The diagonal of the Fisher information: F = Σₙ E_y[(∇ −log p(y | xₙ))²], exact per example.

    `targets` says whose labels y are: "expected", the average over the model's own distribution (the exact Fisher; a
    backward pass for each class but one, and the default up to 16); "sampled", drawn from it with `seed`; "observed",
    the data's (the empirical Fisher, which fades as the model grows confident). Batches are `(inputs, targets)` or
    dicts with 'labels'; `forward(model, batch)` adapts unusual calls. One pass; the model is left as it was.

    It costs about one training pass: gradients are tapped where operations use the parameters, and what cannot be
    tapped goes some examples at a time (`coverage` tells which). `memory` is how many bytes the gradients of single
    examples may take at once; `taps=False` takes every parameter the general way.
    """
    model = unwrapped(model)
    named = trainable(model)
    engine = Engine(Scoring(model, likelihood, targets, seed, forward), named, memory, taps=taps)
    total = accumulators(named)
    with untouched(model):
        source = engine.collect(batches, Squares(named, total, engine.limit))
    return Diagonal(total, (source,))


def dense_fisher(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    targets: Targets | None = None,
    seed: int = 0,
    forward: Forward | None = None,
) -> Dense:
    """The whole Fisher information, F = Σₙ E_y[∇nll ∇nllᵀ], for models (or unfrozen parts) of a few thousand entries.

    The arguments are those of `diagonal_fisher`. One example at a time: right for any model.
    """
    model = unwrapped(model)
    named = trainable(model)
    size = sum(parameter.numel() for parameter in named.values())
    require_dense(size)
    like = next(iter(named.values()))
    total = torch.zeros(size, size, dtype=wide(like), device=like.device)
    scoring = Scoring(model, likelihood, targets, seed, forward)
    with untouched(model):
        for batch in read(batches, model):
            batch, losses = scoring.counted(batch)
            del losses
            for n in range(batch.size):
                columns = scoring.of_example(batch.example(n), list(named.values()))
                rows = torch.stack([torch.cat([score.flatten() for score in scores]) for scores in columns])
                rows = rows.to(total)  # (columns, P)
                with backward(total):
                    total.addmm_(rows.T, rows)
            require_finite_scores({"Λ": total}, batch.index, scoring.doubts)
    return Dense(shapes(named), (total + total.T) / 2, (scoring.source(),))
