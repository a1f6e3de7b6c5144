"""Who is asked: the model itself at the weights it had, or another model that is given."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from ..errors import InertError
from ..params import unwrapped
from ..pieces import resharded
from ..posterior.recalled import Forward
from ..untouched import evaluating


class Teacher(Protocol):
    """What the old model would answer."""

    def __call__(self, model: nn.Module, forward: Forward, inputs: Any) -> Any:
        """Its output on inputs, without a graph; `model` is the one that learns."""


class Given:
    """A model of its own."""

    def __init__(self, teacher: nn.Module, model: nn.Module) -> None:
        teacher = unwrapped(teacher)
        if teacher is model:
            raise InertError("the teacher is the model that learns: their answers never differ. Give a copy of it.")
        shared = {id(p) for p in teacher.parameters() if p.requires_grad} & {id(p) for p in model.parameters()}
        if shared:
            raise InertError("the teacher shares weights that train with the model: give a copy (copy.deepcopy).")
        self._teacher = teacher

    def __call__(self, model: nn.Module, forward: Forward, inputs: Any) -> Any:
        try:
            with torch.no_grad(), evaluating(self._teacher):
                return forward(self._teacher, inputs)
        finally:
            resharded(self._teacher)
