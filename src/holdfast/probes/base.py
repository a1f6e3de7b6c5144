"""What every kind of probe can do."""

from __future__ import annotations

import abc
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import MismatchError

MOST = 1e15  # examples that anything may stand for: more is a file that lies
_SPAN = 3.0  # how many times wider one range of inputs may be than another's: standardized MNIST is 3.2 times [0, 1]


class Probes(abc.ABC):
    """A distribution over inputs that stands for those of old data. Frozen; `+` keeps both sides, each by its weight.

    `layer` names the module whose output they are drawn for, nothing for the model's inputs; `blank` is then an input,
    all zeros, that carries the shape the model takes.
    """

    num_data: float
    unit: str
    layer: str
    blank: Tensor | None

    @property
    @abc.abstractmethod
    def shape(self) -> torch.Size:
        """Of one input."""

    @property
    @abc.abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All it holds, by name."""

    @property
    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a file says of it besides its tensors: enough to make it again."""

    @abc.abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Inputs, (count, *shape), on the device of both the probes and the generator."""

    @abc.abstractmethod
    def plus(self, other: Self) -> Self:
        """Those of both, where they are of one kind, however their values differ."""

    @abc.abstractmethod
    def thinned(self, factor: float) -> Self:
        """The same, standing for so many times as much data."""

    @abc.abstractmethod
    def require_alike(self, other: Self) -> None:
        """Raise where the inputs look as if they had been preprocessed in another way."""

    @abc.abstractmethod
    def to(self, device: torch.device | str) -> Probes:
        """The same on another device."""

    def __add__(self, other: Probes) -> Probes:
        if not isinstance(other, Probes) or type(other) is not type(self):
            raise MismatchError(
                f"{type(self).__name__} and {type(other).__name__} cannot be joined: give both as terms."
            )
        for what in ("shape", "layer", "unit"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise MismatchError(
                    f"these probes differ in their {what}, {_said(mine)} and {_said(theirs)}: they are not of one "
                    "model, or not of one preprocessing."
                )
        self.require_alike(other)
        return self.plus(other)


def drawn_rows(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Rows drawn by their weights, (count,). By a running sum: any number of rows, and nothing that a GPU waits for."""
    reached = weights.double().cumsum(0)
    heights = torch.rand(count, generator=generator, device=weights.device, dtype=torch.float64) * reached[-1]
    return torch.searchsorted(reached, heights, right=True).clamp(max=len(weights) - 1)


def require_one_range(ranges: list[tuple[float, float]]) -> None:
    """Raise where inputs look like those of two preprocessings: apart, far wider, or below zero where others end."""
    widths = [high - low for low, high in ranges]
    apart = max(low for low, _ in ranges) > min(high for _, high in ranges)
    signs = {low < -0.1 * max(high - low, 1e-12) for low, high in ranges}
    if apart or len(signs) > 1 or max(widths) > _SPAN * max(min(widths), 1e-12):
        said = ", ".join(f"{low:.3g} to {high:.3g}" for low, high in ranges)
        raise MismatchError(
            f"these probes are of inputs with ranges {said}: was one of them preprocessed in another way? Make both "
            "from inputs as the model takes them; if they are right as they are, first.plus(second) joins them."
        )


def require_one_amount(mine: float, theirs: float) -> None:
    """Raise where the same inputs stand for two amounts of data: once for either, or for both, is not to be told."""
    if mine != theirs:
        raise MismatchError(
            f"these probes are of the same inputs, which stand for {mine:g} of the old data in one and for {theirs:g} "
            "in the other: one was decayed since, or each stands for data of its own. Keep one of the two, or make "
            "them anew with num_data= for both."
        )


def _said(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else repr(value)
