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
    own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = {id(known[name]): value for name, value in params.items()}
    given |= {id(own[name]): value for name, value in (buffers or {}).items()}
    called = _Called(model, call)
    values = {place: given[tensor] for tensor, every in places(called).items() if tensor in given for place in every}
    found: Found = functional_call(called, values, (), tie_weights=False)
    return found


def places(module: nn.Module) -> dict[int, list[str]]:
    """Where each parameter and buffer is, by its id: more than one place for those that are tied.

    A module that stands in another twice has its own once. `functional_call` would tie by names, swap such a module's
    tensors twice, and leave the ones given where the module's own were.
    """
    found: dict[int, list[str]] = {}
    for prefix, each in module.named_modules():
        for key, tensor in (*each._parameters.items(), *each._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), []).append(f"{prefix}.{key}" if prefix else key)
    return found


class _Called(nn.Module):
    """A model under a way to call it, as one module."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self._call = model, call
        self.training = model.training

    def forward(self) -> Any:
        return self._call(self.model)
