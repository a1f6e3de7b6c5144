"""Run a model at other weights than its own: nothing is copied into it, and nothing has to be put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from .errors import MismatchError
from .params import some, told_apart

Found = TypeVar("Found")


def run_at(
    model: nn.Module,
    params: Mapping[str, Tensor],
    call: Callable[[nn.Module], Found],
    buffers: Mapping[str, Tensor] | None = None,
) -> Found:
    """What `call(model)` gives with other tensors in place of the parameters named, tied ones under all their names.

    Gradients flow to the tensors given. `buffers` are under the names that the model itself has for them.

    >>> import torch
    >>> line = nn.Linear(1, 1, bias=False)
    >>> run_at(line, {"weight": torch.tensor([[3.0]])}, lambda model: model(torch.ones(1)))
    tensor([3.])
    """
    known = told_apart(model)
    unknown = [name for name in params if name not in known]
    if unknown:
        raise MismatchError(f"the model has no {some(unknown)}.")
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {f"model.{own[id(known[name])]}": value for name, value in params.items()}
    values |= {f"model.{name}": value for name, value in (buffers or {}).items()}
    found: Found = functional_call(_Called(model, call), values, ())
    return found


class _Called(nn.Module):
    """A model under a way to call it, as one module."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self._call = model, call
        self.training = model.training

    def forward(self) -> Any:
        return self._call(self.model)
