"""Which parameter of a model is served by what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..likelihood import Likelihood
from ..params import trainable, unwrapped
from ..untouched import untouched
from .batches import Forward, read
from .engine import MEMORY, Engine
from .scores import Scoring, Targets


@dataclass(frozen=True)
class Coverage:
    """For each trainable parameter: the operations it is tapped at, why it goes the general way, or that it is unused.

    The general way is as exact, and slower: it runs the whole model for a few examples at a time.
    """

    tapped: Mapping[str, tuple[str, ...]]
    general: Mapping[str, str]
    unused: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def fraction(self) -> float:
        """The part of all entries that is tapped, or needs nothing."""
        return 1 - sum(self.sizes[name] for name in self.general) / max(1, sum(self.sizes.values()))

    def __str__(self) -> str:
        width = max(len(name) for name in self.sizes)
        said = {name: f"tapped at {', '.join(each)}" for name, each in self.tapped.items()}
        said |= {name: f"the general way: {why}" for name, why in self.general.items()}
        said |= dict.fromkeys(self.unused, "no output depends on it")
        lines = [f"{name:{width}}  {self.sizes[name]:>12,}  {said[name]}" for name in self.sizes]
        return "\n".join([*lines, f"{100 * self.fraction:.1f} % of {sum(self.sizes.values()):,} entries by taps"])


def coverage(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    targets: Targets | None = None,
    forward: Forward | None = None,
) -> Coverage:
    """How `diagonal_fisher` would serve each parameter, told by the first batch.

    >>> import torch, holdfast
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> print(coverage(model, [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0]))], holdfast.categorical))
    0.weight            12  tapped at Addmm
    0.bias               4  tapped at Addmm
    2.weight             8  tapped at Addmm
    2.bias               2  tapped at Addmm
    100.0 % of 26 entries by taps
    """
    model = unwrapped(model)
    named = trainable(model)
    engine = Engine(Scoring(model, likelihood, targets, 0, forward), named, MEMORY, taps=True)
    with untouched(model):
        plan = engine.prepared(next(read(batches, model))).plan
    tapped = {
        name: tuple(dict.fromkeys(site.operation.rstrip("0123456789").removesuffix("Backward") for site in sites))
        for name, sites in plan.sites.items()
    }
    return Coverage(tapped, dict(plan.general), plan.unused, {name: p.numel() for name, p in named.items()})
