"""The diagonal Fisher of models too large for taps: squares of whole batches' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..devices import full
from ..errors import ArgumentError
from ..likelihood import Likelihood
from ..params import trainable, unwrapped
from ..pieces import in_pieces
from ..precision import Diagonal
from ..ranks import Ranks, ranks_of
from .batches import Forward, read
from .replicas import alike
from .scores import Scoring, accumulators, backward, differentiated, require_finite_scores

_AT_ONCE = 2**22  # entries


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
    activation checkpointing of either kind and on sharded models. An entry's relative error is about √(2/m) for m
    squares: give many small batches, or several `draws` of each. `diagonal_fisher` is exact where it can be had.

    On several processes, call it on all of them. The data-parallel ranks of `fully_shard` and DistributedDataParallel
    each give batches of their own, tensor-parallel ranks the same ones; all get the one estimate for all the data, with
    entries distributed as the parameters are. What `fully_shard` shards, it squares summed over the ranks, which must
    have as many batches each.

    The standard errors take the sum over a batch for normal, whose square has variance 2/3 of its mean square; for
    batches of a few examples they are rough.
    """
    if targets not in ("sampled", "observed"):
        raise ArgumentError(f"targets must be 'sampled' or 'observed' for batch sums, got {targets!r}.")
    if not isinstance(draws, int) or draws < 1:
        raise ArgumentError(f"an estimate needs at least one draw, got draws={draws!r}.")
    with ranks_of(model) as ranks:
        model = unwrapped(model)
        named = trainable(model)
        scoring = Scoring(model, likelihood, targets, seed, forward, ranks)
        coins = torch.Generator().manual_seed(ranks.seed(seed))
        total = accumulators(named)
        fourth = {name: entries.sum(dtype=torch.float64) for name, entries in total.items()}
        squares = 0
        with ranks.together(), alike(model, ranks):
            for batch in ranks.in_step(read(batches, model, empty=ranks.apart)):
                for draw in range(draws):
                    scored, losses = scoring.counted(batch) if draw == 0 else scoring.drawn_again(batch)
                    if targets == "observed":
                        signs = 2 * torch.randint(0, 2, (scored.size,), generator=coins) - 1
                        losses = losses * signs.to(losses)
                    with backward(losses):
                        grads = _gradients(losses.sum(), named, batch.index, ranks)
                    _add_squares_(total, fourth, grads, draws / ranks.averaged**2)
                    squares += 1
                require_finite_scores(total, batch.index, scoring.doubts)
                if ranks.averaged > 1 or ranks.tensor:
                    scoring.doubts.settle()  # before a forward pass that would wait for this rank
            source = replace(scoring.source(), targets=f"{targets}, batch sums")
            squares = sum(ranks.shares(squares)) if ranks.apart else squares
            ranks.add_(*total.values(), *fourth.values())
        fisher = Diagonal(total, (source,))
    # Var(g²) = 2 (E g²)² = ⅔ E g⁴ for a normal g.
    variances = {name: 2 / 3 * float(full(each)) for name, each in fourth.items()}
    norms = {name: float(full(_squared(entries))) for name, entries in total.items()}
    return Estimate(
        fisher,
        {name: _relative(variances[name], norms[name]) for name in named},
        _relative(sum(variances.values()), sum(norms.values())),
        squares,
    )


def _gradients(loss: Tensor, named: Mapping[str, nn.Parameter], index: int, ranks: Ranks) -> dict[str, Tensor]:
    """The loss's gradients: averaged over ranks that go in step, this rank's own where they go apart."""
    if ranks.apart:
        # Past the hooks of DistributedDataParallel: after a forward pass without a backward, they would average.
        return dict(zip(named, differentiated(loss, list(named.values()), index, retain=False), strict=True))
    for parameter in named.values():
        parameter.grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.to_dense() for name, p in named.items() if p.grad is not None}
    for parameter in named.values():
        parameter.grad = None
    return found


@torch.no_grad()
def _add_squares_(
    total: Mapping[str, Tensor], fourth: Mapping[str, Tensor], grads: dict[str, Tensor], divisor: float
) -> None:
    for name in list(grads):
        # Sequence-parallel gradients are sums yet to be made. Arithmetic on DTensors makes them; shards would not do.
        square = grads.pop(name).to(total[name].dtype).square()
        total[name].add_(square, alpha=1 / divisor)
        fourth[name].add_(_squared(square), alpha=divisor**-2)


def _squared(tensor: Tensor) -> Tensor:
    """The sum of squares in float64, with no copy of a large tensor in it."""
    if in_pieces(tensor):
        return tensor.double().square().sum()
    found = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for chunk in torch.split(tensor.reshape(-1), _AT_ONCE):
        wide = chunk.double()
        found += torch.dot(wide, wide)
    return found


def _relative(variance: float, norm: float) -> float:
    return (variance / norm) ** 0.5 if norm else 0.0
