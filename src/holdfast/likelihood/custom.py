"""Any other negative log-likelihood, as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import ArgumentError, DataError
from .base import Likelihood, found


@dataclass(frozen=True)
class Custom(Likelihood):
    """A function (output, target) -> (batch,) in nats. Observed labels only: nothing is known of the others."""

    function: Callable[[Any, Any], Tensor]
    label: str
    counted_in: str
    counter: Callable[[Any], float] | None

    @property
    def unit(self) -> str:
        return self.counted_in

    @property
    def name(self) -> str:
        return self.label

    def nll(self, output: Any, target: Any) -> Tensor:
        each = self.function(output, target)
        if not isinstance(each, Tensor) or each.ndim != 1:
            raise DataError(
                f"{self.label} must return one negative log-likelihood per example, of shape (batch,); got "
                f"{found(each)}. With a loss of torch, pass reduction='none' and sum over what belongs to one example."
            )
        return each

    def count(self, size: int, target: Any) -> float:
        return float(size) if self.counter is None else float(self.counter(target))

    def default_targets(self, output: Any) -> str:
        return "observed"


def custom(
    nll: Callable[[Any, Any], Tensor],
    *,
    name: str = "custom",
    unit: str = "example",
    count: Callable[[Any], float] | None = None,
) -> Custom:
    """A per-example negative log-likelihood of your own, (output, target) -> (batch,) in nats.

    If its unit is not the example, `count(target)` says how many units a batch has.
    """
    if not callable(nll):
        raise ArgumentError(f"custom takes a function (output, target) -> (batch,), got {type(nll).__name__}.")
    if unit != "example" and count is None:
        raise ArgumentError(f"the unit {unit!r} is not the example: give count, a function of a batch's targets.")
    return Custom(nll, name, unit, count)
