"""Any other negative log-likelihood, as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import DataError
from .base import Likelihood, found


@dataclass(frozen=True)
class Custom(Likelihood):
    """A function (output, target) -> (batch,) in nats. Observed labels only: nothing is known of the others."""

    function: Callable[[Any, Any], Tensor]
    label: str
    counted_in: str

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

    def default_targets(self, output: Any) -> str:
        return "observed"


def custom(nll: Callable[[Any, Any], Tensor], *, name: str = "custom", unit: str = "example") -> Custom:
    """A per-example negative log-likelihood of your own, (output, target) -> (batch,) in nats."""
    return Custom(nll, name, unit)
