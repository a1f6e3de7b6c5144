"""Fisher information: squares (or outer products) of per-example scores, summed over the data, in nats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..likelihood import Likelihood
from ..params import shapes, trainable, unwrapped
from ..precision import Dense, Diagonal
from ..precision.base import require_dense
from ..untouched import untouched
from .batches import Forward, read, run
from .linear import Taps, verified
from .scores import Scoring, Targets, accumulation, accumulators, example_scores, require_finite_scores


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
    scoring = Scoring(likelihood, targets, seed)
    taps = Taps(model, named)
    checked = set()
    with untouched(model):
        for batch in read(batches, model):
            with taps.listening():
                output = run(model, batch, forward)
            batch, losses = scoring.counted(output, batch)
            tapped = taps.exact(losses, batch)
            if tapped and batch.form not in checked:
                agreed = verified(tapped, losses, batch, model, scoring, forward, named)
                checked |= {batch.form} if len(agreed) == len(tapped) else set()
                tapped = agreed
            for column in range(len(losses) if tapped else 0):
                edges = [tap.edge for tap in tapped]
                more = column < len(losses) - 1
                for tap, grad in zip(
                    tapped, torch.autograd.grad(losses[column].sum(), edges, retain_graph=more), strict=True
                ):
                    tap.add_squares_(total, grad)
            del output, losses

            rest = sorted(set(named) - {name for tap in tapped for name in tap.names}, key=list(named).index)
            for n in range(batch.size if rest else 0):
                for scores in example_scores(model, batch.example(n), scoring, forward, [named[r] for r in rest]):
                    # Squared per example, then summed: (Σ g)² is zero at the optimum and shrinks with the batch.
                    for name, score in zip(rest, scores, strict=True):
                        total[name] += score.to(total[name].dtype).square()
            require_finite_scores(total, batch)
    return Diagonal(total, (scoring.source(model),))


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
    require_dense(sum(parameter.numel() for parameter in named.values()))
    scoring = Scoring(likelihood, targets, seed)
    total: Tensor | None = None
    with untouched(model):
        for batch in read(batches, model):
            batch, losses = scoring.counted(run(model, batch, forward), batch)
            del losses
            for n in range(batch.size):
                columns = example_scores(model, batch.example(n), scoring, forward, list(named.values()))
                rows = torch.stack([torch.cat([score.flatten() for score in scores]) for scores in columns])
                rows = rows.to(accumulation(rows))  # (columns, P)
                total = rows.T @ rows if total is None else total.addmm_(rows.T, rows)
            require_finite_scores({name: total for name in ("the parameters",) if total is not None}, batch)
    matrix = total if total is not None else torch.empty(0, 0)
    matrix = (matrix + matrix.T) / 2
    return Dense(shapes(named), matrix, (scoring.source(model),))
