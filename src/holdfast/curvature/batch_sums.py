"""The diagonal Fisher of models too large for taps: squares of whole batches' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..likelihood import Likelihood
from ..params import trainable, unwrapped
from ..precision import Diagonal
from ..untouched import untouched
from .batches import Forward, read
from .scores import Scoring, accumulators, backward, require_finite_scores


@dataclass(frozen=True)
class Estimate:
    """An estimated Fisher, and how far from the exact one to expect it: ‖F̂ − F‖ / ‖F̂‖, by parameter and over all."""

    fisher: Diagonal
    relative_errors: Mapping[str, float]
    relative_error: float
    squares: int  # how many gradients were squared

    def __repr__(self) -> str:
        return f"Estimate({self.fisher!r}, {self.squares} squares, relative error {self.relative_error:.2g})"


def batch_sum_fisher(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    targets: Literal["sampled", "observed"] = "sampled",
    draws: int = 1,
    seed: int = 0,
    forward: Forward | None = None,
) -> Estimate:
    """An unbiased estimate of the diagonal Fisher from gradients of whole batches: E[(Σₙ sₙ ∇nllₙ)²] = Σₙ E[(∇nllₙ)²].

    Scores under labels drawn from the model have mean zero, so that the cross terms of a square average out (sₙ = 1);
    under the data's labels, random signs sₙ do the same. It takes `.backward()` and `.grad` alone, and so works under
    activation checkpointing of either kind. An entry's relative error is about √(2/m) for m squares: give many small
    batches, or several `draws` of each. `diagonal_fisher` is exact where it can be had.

    The standard errors take the sum over a batch for normal, whose square has variance 2/3 of its mean square; for
    batches of a few examples they are rough.
    """
    if targets not in ("sampled", "observed"):
        raise ArgumentError(f"targets must be 'sampled' or 'observed' for batch sums, got {targets!r}.")
    if not isinstance(draws, int) or draws < 1:
        raise ArgumentError(f"an estimate needs at least one draw, got draws={draws!r}.")
    model = unwrapped(model)
    named = trainable(model)
    total = accumulators(named)
    scoring = Scoring(model, likelihood, targets, seed, forward)
    coins = torch.Generator().manual_seed(seed)
    fourth = {name: torch.zeros((), dtype=torch.float64, device=p.device) for name, p in named.items()}
    squares = 0
    with untouched(model):
        for batch in read(batches, model):
            for draw in range(draws):
                scored, losses = scoring.counted(batch) if draw == 0 else scoring.drawn_again(batch)
                if targets == "observed":
                    signs = 2 * torch.randint(0, 2, (scored.size,), generator=coins) - 1
                    losses = losses * signs.to(losses)
                for parameter in named.values():
                    parameter.grad = None
                with backward(losses):
                    losses.sum().backward()  # type: ignore[no-untyped-call]
                _add_squares_(total, fourth, named, draws)
                squares += 1
            require_finite_scores(total, batch.index, scoring.doubts)
        source = replace(scoring.source(), targets=f"{targets}, batch sums")
    # Var(g²) = 2 (E g²)² = ⅔ E g⁴ for a normal g.
    variances = {name: 2 / 3 * float(each) for name, each in fourth.items()}
    norms = {name: float(entries.double().square().sum()) for name, entries in total.items()}
    return Estimate(
        Diagonal(total, (source,)),
        {name: _relative(variances[name], norms[name]) for name in named},
        _relative(sum(variances.values()), sum(norms.values())),
        squares,
    )


@torch.no_grad()
def _add_squares_(
    total: Mapping[str, Tensor], fourth: Mapping[str, Tensor], named: Mapping[str, Tensor], draws: int
) -> None:
    for name, parameter in named.items():
        if parameter.grad is not None:
            square = parameter.grad.to_dense().to(total[name].dtype).square() / draws
            total[name].add_(square)
            fourth[name].add_(square.double().square().sum())
            parameter.grad = None


def _relative(variance: float, norm: float) -> float:
    return (variance / norm) ** 0.5 if norm else 0.0
