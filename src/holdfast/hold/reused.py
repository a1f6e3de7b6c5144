"""A pull that is computed at every kth step alone, where it costs more than the step itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..penalty import Quadratic, add_scaled_
from ..posterior import Posterior


@dataclass
class Reused:
    """A quadratic whose pull is computed anew at every `every`-th step, and used again in between.

    What the steps since then have changed, Λ(θ − θ_then), is what is left out of it.
    """

    quadratic: Quadratic
    every: int
    _kept: dict[frozenset[int], tuple[int, dict[str, Tensor], Tensor]] = field(default_factory=dict)
    _resumed: dict[frozenset[str], tuple[int, dict[str, Tensor], Tensor]] = field(default_factory=dict)

    @property
    def posterior(self) -> Posterior:
        return self.quadratic.posterior

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
        calls, pull, value = self._kept.get(mine) or self._gone_on({n: p for n, p in params.items() if id(p) in mine})
        if calls % self.every == 0:
            whole, value = self.quadratic.pull(params)
            pull = {name: whole[name] for name in whole if id(params[name]) in mine}
        self._kept[mine] = (calls + 1, pull, value)
        add_scaled_(params, pull, scale, only)
        return value

    def state_dict(self) -> dict[str, Any]:
        """The pulls in use and how old they are; none where the next step computes them anew, or of sharded ones."""
        used = [each for each in self._kept.values() if each[0] % self.every and not _sharded(each[1])]
        pulls = [{"calls": calls, "pull": dict(pull), "value": value} for calls, pull, value in used]
        return {"pulls": pulls} if pulls else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the pulls that were in use."""
        self._kept.clear()
        self._resumed = {
            frozenset(each["pull"]): (int(each["calls"]), dict(each["pull"]), each["value"]) for each in state["pulls"]
        }

    def _gone_on(self, params: Mapping[str, nn.Parameter]) -> tuple[int, dict[str, Tensor], Tensor]:
        """What was in use for these parameters when a state was saved; nothing where there is none."""
        calls, pull, value = self._resumed.pop(frozenset(params), (0, {}, torch.zeros(())))
        return calls, {name: each.to(params[name].device) for name, each in pull.items()}, value


def _sharded(pull: Mapping[str, Tensor]) -> bool:
    return any(hasattr(each, "to_local") for each in pull.values())
