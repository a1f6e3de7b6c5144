"""What an optimizer has gathered of parameters: momentum and the like, in the coordinates that it stepped in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError
from ..pieces import number


class Moments:
    """The state with which optimizers began to step in other coordinates, to which they are put back after it."""

    def __init__(self) -> None:
        self._began: dict[tuple[Optimizer, nn.Parameter], dict[str, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._began)

    def note(self, optimizer: Optimizer, params: Mapping[str, nn.Parameter], *, ours: bool) -> None:
        """Before a step: raise, the first time, where an optimizer has moments of another basis. `ours` are of this."""
        for name, parameter in params.items():
            if (optimizer, parameter) not in self._began:
                state = {} if ours else optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.ndim and number(value.min()) != number(value.max()):
                        raise ArgumentError(
                            f"rotate=True steps in eigenvectors, and {type(optimizer).__name__} has `{key}` of "
                            f"`{name}` from steps in other coordinates. Make a fresh optimizer; or go on from a "
                            "checkpoint of such a hold, its optimizer's state and its own: handle.load_state_dict(...)."
                        )
                # One number throughout, as some optimizers set theirs up, is no direction.
                self._began[optimizer, parameter] = {
                    key: number(value.min()) if isinstance(value, Tensor) else value for key, value in state.items()
                }

    def restore(self) -> None:
        """Put back what there was, which most often is nothing. States that were saved keep what they have."""
        for (optimizer, parameter), began in self._began.items():
            now = optimizer.state.pop(parameter, {})
            if began:
                optimizer.state[parameter] = {
                    key: torch.full_like(now[key], value) if isinstance(now[key], Tensor) else value
                    for key, value in began.items()
                    if key in now  # not emptied meanwhile
                }
        self._began.clear()
