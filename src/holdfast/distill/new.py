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
        self._hook = model.register_forward_pre_hook(_Look(self, model), with_kwargs=True, prepend=True)  # as called
        finalize(self, self._hook.remove)  # with whoever asked for it: the hold that it is a term of

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the model is called with."""
        given = [value for each in (*args, *kwargs.values()) for value in _values(each)]
        tensors = [each for each in given if isinstance(each, Tensor)]
        self._seen = tensors[0].detach() if tensors else None

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


class _Look:
    """A hook on one model, for one source of inputs. A copy of the model, or the model read from a file, has no part in
    that: the hook that it carries does nothing."""

    def __init__(self, source: NewInputs | None = None, model: nn.Module | None = None) -> None:
        self._source = None if source is None else ref(source)
        self._model = None if model is None else ref(model)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source = None if self._source is None else self._source()
        replica = getattr(module, "_is_replica", False)  # DataParallel's, of the model on another GPU
        mine = self._model is not None and (self._model() is module or replica)
        if source is not None and mine and module.training and torch.is_grad_enabled():
            source.see(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Look:
        return _Look()

    def __reduce__(self) -> tuple[type[_Look], tuple[()]]:
        return _Look, ()


def _values(given: Any) -> Collection[Any]:
    return given.values() if isinstance(given, Mapping) else (given,)


def new_inputs(model: nn.Module, *, num_data: float, unit: str = "example") -> NewInputs:
    """Distill on the inputs that come with the new data, for `num_data` old examples: nothing need have been kept."""
    return NewInputs(model, num_data, unit)
