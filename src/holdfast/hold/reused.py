"""A pull that is computed at every kth step alone, where it costs more than the step itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..penalty import Quadratic, add_scaled_


@dataclass
class Reused:
    """A quadratic whose pull is computed anew at every `every`-th step, and used again in between.

    What the steps since then have changed, Λ(θ − θ_then), is what is left out of it.
    """

    quadratic: Quadratic
    every: int
    _kept: dict[frozenset[int], tuple[int, dict[str, Tensor], Tensor]] = field(default_factory=dict)

    @property
    def num_data(self) -> float:
        return self.quadratic.num_data

    @property
    def unit(self) -> str:
        return self.quadratic.unit

    def held(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return self.quadratic.held(model)

    def value(self, model: nn.Module) -> Tensor:
        return self.quadratic.value(model)

    @torch.no_grad()
    def add_gradient_(self, model: nn.Module, scale: float | Tensor, only: Collection[int]) -> Tensor:
        params = self.held(model)
        if not params:
            return torch.zeros(())
        mine = frozenset(only)
        # Where other parameters are free than before, pulls kept for the others are of another time.
        self._kept = {ids: each for ids, each in self._kept.items() if ids == mine or not ids & mine}
        calls, pull, value = self._kept.get(mine, (0, {}, torch.zeros(())))
        if calls % self.every == 0:
            pull, value = self.quadratic.pull(params)
        self._kept[mine] = (calls + 1, pull, value)
        add_scaled_(params, pull, scale, only)
        return value
