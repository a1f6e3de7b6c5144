"""What a field began with, to tell whether its deviations were trained beside its means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..errors import InertError
from ..identity import fingerprint


@dataclass(frozen=True)
class Began:
    """Short names for the means and for the logarithms of the deviations at the first batch that was trained on."""

    means: str
    logs: str

    @staticmethod
    def at(means: Mapping[str, Tensor], logs: Mapping[str, Tensor]) -> Began:
        """Where they are now."""
        return Began(fingerprint(means), fingerprint(logs))

    def require_trained(self, means: Mapping[str, Tensor], logs: Mapping[str, Tensor]) -> None:
        """Raise where means have moved and no deviation has: a precision that nobody learned."""
        now = Began.at(means, logs)
        if now.logs == self.logs and now.means != self.means:
            raise InertError(
                "the means were trained and none of the deviations was: the precision is what it began with. Give "
                "the optimizer q.parameters() of q = mean_field(...), and not the model's, with steps that are not "
                "lost in rounding."
            )
