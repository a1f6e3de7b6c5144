"""The output of a module inside a model: to see it, and to put another in its place."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DataError
from ..untouched import evaluating

Forward = Callable[[nn.Module, Any], Any]


def module_at(model: nn.Module, layer: str) -> nn.Module:
    """The module under a name, or an error that offers the nearest ones."""
    modules = {name: module for name, module in model.named_modules() if name}
    if layer not in modules:
        near = difflib.get_close_matches(layer, modules, n=3, cutoff=0.3) or list(modules)[:5]
        raise ArgumentError(f"the model has no module `{layer}`. It has {', '.join(near)}.")
    found: nn.Module = modules[layer]
    return found


def captured(model: nn.Module, layer: str, batch: Any, inputs: Tensor, forward: Forward | None) -> Tensor:
    """What a module put out when the model was run on a batch, in evaluation mode."""
    found: list[Any] = []
    hook = module_at(model, layer).register_forward_hook(lambda module, args, output: found.append(output))
    try:
        with torch.no_grad(), evaluating(model):
            forward(model, batch) if forward is not None else model(inputs)
    finally:
        hook.remove()
    if len(found) != 1 or not isinstance(found[0], Tensor) or len(found[0]) != len(inputs):
        raise DataError(
            f"`{layer}` ran {len(found)} times in one pass, or its output is no tensor with the examples first. Choose "
            "a module that runs once and puts out one tensor."
        )
    output: Tensor = found[0]
    return output


@contextmanager
def replaced(model: nn.Module, layer: str, output: Tensor) -> Iterator[None]:
    """Inside, the module puts out `output`, whatever came in; what lies below it runs in vain."""
    hook = module_at(model, layer).register_forward_hook(lambda module, args, found: output.to(found))
    try:
        yield
    finally:
        hook.remove()
