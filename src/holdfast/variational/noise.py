"""The numbers that weights are moved by: drawn once for each name, and given again with the other sign."""

from __future__ import annotations

import torch
from torch import Tensor

from ..precision.base import standard_normal


class Noise:
    """Standard normal numbers by name; of an antithetic pair, the second has the first's, negated.

    A pair cancels what a loss has of odd order in the noise, which is most of it.
    """

    def __init__(self, generator: torch.Generator | None = None, opposite: Noise | None = None) -> None:
        self._generator = generator
        self._opposite = {} if opposite is None else opposite.drawn
        self.drawn: dict[str, Tensor] = {}

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """A number for each entry of a tensor: the same whenever it is asked for under this name."""
        known = self.drawn.get(name)
        if known is None or known.shape != tensor.shape:
            other = self._opposite.get(name)
            if other is not None and other.shape == tensor.shape:
                known = -other
            else:  # what only one of the two runs came by
                known = standard_normal(tensor.detach(), self._generator)
            self.drawn[name] = known
        return known
