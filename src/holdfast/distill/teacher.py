"""The old function: the model itself at the weights it had, or another model that is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ArgumentError, InertError, MismatchError
from ..params import all_parameters, buffers, matched, require_shapes, shapes, some, unwrapped
from ..posterior import Memory, Posterior, as_posterior
from ..untouched import evaluating

Forward = Callable[[nn.Module, Any], Any]


class Teacher(Protocol):
    """What the old model would answer."""

    def __call__(self, model: nn.Module, forward: Forward, inputs: Any) -> Any:
        """Its output on inputs, without a graph; `model` is the one that learns."""


class Recalled:
    """The model at the mean of a posterior, with the buffers that were kept: no second network.

    What is outside the posterior must be as it was. So nothing there may be trained; what is frozen is watched.
    """

    def __init__(self, memory: Posterior | Memory, model: nn.Module) -> None:
        posterior = as_posterior(memory)
        params = matched(model, shapes(posterior.mean), ties=posterior.ties)
        inside = {id(parameter) for parameter in params.values()}
        outside = {name: p for name, p in all_parameters(model).items() if id(p) not in inside}
        trained = [name for name, parameter in outside.items() if parameter.requires_grad]
        if trained:
            raise MismatchError(
                f"the posterior does not have {some(trained)}, which trains: the old function cannot be had from its "
                "mean. Freeze it, or give teacher=, a copy of the old model (copy.deepcopy) or any other."
            )
        if any(type(parameter.data) is not Tensor for parameter in params.values()):
            raise ArgumentError("a sharded model is not run at other weights: give teacher=, a frozen copy of it.")
        narrow = [name for name, p in params.items() if _rounds(posterior.mean[name], p)]
        if narrow:
            raise MismatchError(
                f"the mean of `{narrow[0]}` was rounded to {posterior.mean[narrow[0]].dtype}, and is not the old "
                "function any more: give teacher=, a frozen copy, or the posterior as it was made."
            )
        self._ties = posterior.ties
        # Where the model is: nothing is copied to a device at every step.
        self._mean = {name: posterior.mean[name].to(p.device, p.dtype) for name, p in params.items()}
        kept, found = memory.buffers if isinstance(memory, Memory) else {}, buffers(model)
        require_shapes(shapes(kept), shapes(found), what="the memory's buffers", than="the model")
        then = {id(buffer): kept[name] for name, buffer in found.items() if name in kept}
        self._buffers = {
            name: then.get(id(buffer), buffer).detach().to(buffer, copy=True) for name, buffer in model.named_buffers()
        }
        self._frozen = [(name, parameter, parameter._version) for name, parameter in outside.items()]

    def __call__(self, model: nn.Module, forward: Forward, inputs: Any) -> Any:
        for name, parameter, version in self._frozen:
            if parameter._version != version or parameter.requires_grad:
                raise MismatchError(f"`{name}` is outside the posterior and has changed: give teacher=, a frozen copy.")
        params = matched(model, shapes(self._mean), ties=self._ties)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        values = {names[id(p)]: self._mean[name].to(p.device, p.dtype) for name, p in params.items()}
        now = dict(model.named_buffers())
        values |= {name: buffer.to(now[name].device) for name, buffer in self._buffers.items()}
        with torch.no_grad(), evaluating(model):
            return functional_call(_Called(model, forward), {f"model.{k}": v for k, v in values.items()}, (inputs,))


class _Called(nn.Module):
    """A model under a way to call it, as one module."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self._forward = model, forward
        self.training = model.training

    def forward(self, inputs: Any) -> Any:
        return self._forward(self.model, inputs)


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
        with torch.no_grad(), evaluating(self._teacher):
            return forward(self._teacher, inputs)


def recalled(memory: Posterior | Memory, model: nn.Module) -> Teacher:
    """The old function from what was kept of it: the model at the posterior's mean, in evaluation mode."""
    return Recalled(memory, model)


def _rounds(mean: Tensor, parameter: Tensor) -> bool:
    """Whether a mean is kept in fewer digits than the parameter has."""
    return torch.finfo(mean.dtype).eps > torch.finfo(parameter.dtype).eps
