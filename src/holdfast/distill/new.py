"""The new data's own inputs (learning without forgetting: Li & Hoiem 2016)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn

from ..errors import DataError, require_number


class NewInputs:
    """The inputs that the model was last trained on: the first tensor that it was called with, in training mode.

    They stand for `num_data` old examples, whose own inputs they are not: what the old model says of them is not
    what it said of those.
    """

    layer = ""
    blank = None

    def __init__(self, model: nn.Module, num_data: float, unit: str) -> None:
        self.num_data = require_number(num_data, "num_data, how many old examples there were,", positive=True)
        self.unit = unit
        self._seen: Tensor | None = None
        mine = ref(self)

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            source = mine()
            if source is not None and module.training and torch.is_grad_enabled():
                given = [value for each in (*args, *kwargs.values()) for value in _values(each)]
                tensors = [each for each in given if isinstance(each, Tensor)]
                source._seen = tensors[0].detach() if tensors else None

        self._hook = model.register_forward_pre_hook(look, with_kwargs=True, prepend=True)  # as it was called
        finalize(self, self._hook.remove)  # with whoever asked for it: the hold that it is a term of

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """The last batch, whole."""
        if self._seen is None:
            raise DataError(
                "the model was not called in training mode since this hold began, so there are no new inputs to "
                "distill on. Is it called under another name (a wrapper, a compiled copy)? Then give that one."
            )
        return self._seen

    def to(self, device: torch.device | str) -> NewInputs:
        """Itself: batches are where the model is."""
        return self

    def remove(self) -> None:
        """Stop looking at the model's inputs."""
        self._hook.remove()


def _values(given: Any) -> Collection[Any]:
    return given.values() if isinstance(given, Mapping) else (given,)


def new_inputs(model: nn.Module, *, num_data: float, unit: str = "example") -> NewInputs:
    """Distill on the inputs that come with the new data, for `num_data` old examples: nothing need have been kept."""
    return NewInputs(model, num_data, unit)
