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
from .linear import Taps, verified
from .scores import Scoring, Targets, accumulation, accumulators, backward, require_finite_scores


def diagonal_fisher(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    targets: Targets | None = None,
    seed: int = 0,
    forward: Forward | None = None,
) -> Diagonal:
    """The diagonal of the Fisher information: F = Σₙ E_y[(∇ −log p(y | xₙ))²], exact per example.

    `targets` says whose labels y are: "expected", the average over the model's own distribution (the exact Fisher; as
    many backward passes as classes, and the default up to 16); "sampled", drawn from it with `seed`; "observed", the
    data's (the empirical Fisher, which fades as the model grows confident). Batches are `(inputs, targets)` or dicts
    with 'labels'; `forward(model, batch)` adapts unusual calls. One pass; the model is left as it was.
    """
    model = unwrapped(model)
    named = trainable(model)
    total = accumulators(named)
    scoring = Scoring(model, likelihood, targets, seed, forward)
    taps = Taps(model, named)
    checked = set()
    with untouched(model):
        for batch in read(batches, model):
            with taps.listening():
                output = scoring.output(batch)
            batch, losses = scoring.counted(output, batch)
            tapped = taps.exact(losses, batch)
            case = (batch.form, frozenset(name for tap in tapped for name in tap.names))
            if tapped and case not in checked:
                agreed = verified(tapped, losses, batch, scoring, named)
                checked |= {case} if len(agreed) == len(tapped) else set()
                tapped = agreed
            with backward(losses):
                for column in range(len(losses) if tapped else 0):
                    more = column < len(losses) - 1
                    grads = torch.autograd.grad(losses[column].sum(), [tap.edge for tap in tapped], retain_graph=more)
                    for tap, grad in zip(tapped, grads, strict=True):
                        tap.add_squares_(total, grad)
            del output, losses

            served = {name for tap in tapped for name in tap.names}
            rest = {name: parameter for name, parameter in named.items() if name not in served}
            for n in range(batch.size if rest else 0):
                for scores in scoring.of_example(batch.example(n), list(rest.values())):
                    # Squared per example, then summed: (Σ g)² is zero at the optimum and shrinks with the batch.
                    for name, score in zip(rest, scores, strict=True):
                        total[name] += score.to(total[name].dtype).square()
            require_finite_scores(total, batch)
    return Diagonal(total, (scoring.source(),))


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
    total = torch.zeros(size, size, dtype=accumulation(like), device=like.device)
    scoring = Scoring(model, likelihood, targets, seed, forward)
    with untouched(model):
        for batch in read(batches, model):
            batch, losses = scoring.counted(scoring.output(batch), batch)
            del losses
            for n in range(batch.size):
                columns = scoring.of_example(batch.example(n), list(named.values()))
                rows = torch.stack([torch.cat([score.flatten() for score in scores]) for scores in columns])
                rows = rows.to(total)  # (columns, P)
                with backward(total):
                    total.addmm_(rows.T, rows)
            require_finite_scores({"Λ": total}, batch)
    return Dense(shapes(named), (total + total.T) / 2, (scoring.source(),))
