"""MAS: how much the output's length depends on each weight, without labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..errors import InertError
from ..likelihood import Likelihood
from ..likelihood.base import as_tensor
from ..params import Only, trainable, unwrapped
from ..precision import Diagonal
from .batches import Forward
from .engine import MEMORY, Engine
from .magnitudes import Magnitudes
from .replicas import alike, replicas_of
from .scores import Scoring, accumulators


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    only: Only = None,
    memory: int = MEMORY,
    taps: bool = True,
) -> Diagonal:
    """Memory-aware synapses (Aljundi 2018): Λ = 2 Σₙ |∂‖f(xₙ)‖² / ∂θ|, absolute per example and then summed.

    No labels are used, but batches are read as a Fisher's are: `(inputs, targets)` or dicts, or inputs alone as
    `(inputs,)`. Of a pair the last is taken for the labels, and left out. f is all that the model gives for an example:
    of logits over positions `forward(model, batch)` can give a part. `memory` and `taps` are those of
    `diagonal_fisher`; one pass in evaluation mode, and the model is left as it was.

    These are not nats: a sensitivity is no curvature of a loss, and outputs twice as long have four times as much. The
    scale is the published one: mean loss + λ Σ Ω δ², with Ω the mean over examples, is what a hold to λ · Λ minimizes
    on as many new examples as these. So λ is to be chosen, and ½ δᵀΛδ is no forecast of a loss.
    """
    with replicas_of(model) as ranks:
        model = unwrapped(model)
        named = trainable(model, only)
        engine = Engine(Scoring(model, _SquaredLength(), "expected", 0, forward, ranks), named, memory, taps=taps)
        total = accumulators(named)
        with alike(model, ranks):
            source = engine.collect(batches, Magnitudes(named, total, engine.limit))
    if not any(bool(entries.any()) for entries in total.values()):
        raise InertError(
            "no weight changes the length of an output, so the precision would be zero: outputs that are zero have no "
            "sensitivity. Is the last layer at zero, or are the last units dead? Give forward= that returns the layer "
            "before."
        )
    entries = {name: each.mul_(2) for name, each in total.items()}
    return Diagonal(entries, (replace(source, targets="MAS, not in nats"),))


@dataclass(frozen=True)
class _SquaredLength(Likelihood):
    """‖f(x)‖² where a negative log-likelihood would be. Its gradient is that of the one pseudo-loss (2f) · f."""

    @property
    def name(self) -> str:
        return "sensitivity"

    def nll(self, output: Any, target: Any) -> Tensor:
        return as_tensor(output, self.name).square().reshape(len(output), -1).sum(1)

    def root(self, output: Tensor) -> Tensor:
        return 2 * output.unsqueeze(0)

    def default_targets(self, output: Any) -> str:
        return "expected"
