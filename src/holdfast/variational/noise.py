"""The numbers that weights are shaken by: drawn, and given again with the other sign."""

from __future__ import annotations

import torch
from torch import Tensor

from ..precision.base import standard_normal


class Noise:
    """Standard normal numbers in the order they are asked for; of an antithetic pair, the second are the first negated.

    A pair cancels what a loss has of odd order in the noise, which is most of it.
    """

    def __init__(self, generator: torch.Generator | None = None, *, opposite: Noise | None = None) -> None:
        self._generator = generator
        self._opposite = None if opposite is None else iter(list(opposite.drawn))
        self.drawn: list[Tensor] = []

    def like(self, tensor: Tensor) -> Tensor:
        """A number for each entry of a tensor."""
        if self._opposite is not None:
            return -next(self._opposite)
        self.drawn.append(standard_normal(tensor.detach(), self._generator))
        return self.drawn[-1]
