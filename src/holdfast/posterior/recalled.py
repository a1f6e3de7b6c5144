"""The old function: the model itself, run at the weights and with the buffers that were kept of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..devices import full, part
from ..elsewhere import run_at
from ..errors import ArgumentError, HoldfastWarning, MismatchError
from ..identity import fingerprints
from ..params import all_parameters, buffers, matched, require_shapes, shapes, some, unwrapped
from ..pieces import in_pieces, placed, resharded
from ..untouched import evaluating
from .gaussian import Posterior
from .memory import STATISTICS, Memory, as_posterior

Forward = Callable[[nn.Module, Any], Any]


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
                "mean. If it is new, and as it was made, take it in: memory.expanded(model). Else freeze it, or give "
                "teacher=, a copy of the old model (copy.deepcopy) or any other."
            )
        strange = [name for name, p in params.items() if type(p.data) is not Tensor and not in_pieces(p.data)]
        if strange:
            raise ArgumentError(f"a model with {some(strange)} is not run at other weights: give teacher=, a copy.")
        narrow = [name for name, p in params.items() if _rounds(posterior.mean[name], p)]
        if narrow:
            raise MismatchError(
                f"the mean of `{narrow[0]}` was rounded to {posterior.mean[narrow[0]].dtype}, and is not the old "
                "function any more: give teacher=, a frozen copy, or the posterior as it was made."
            )
        self._frozen = fingerprints(outside)
        then_frozen = memory.frozen if isinstance(memory, Memory) else {}
        other = [name for name, mark in then_frozen.items() if self._frozen.get(name, mark) != mark]
        if other:
            raise MismatchError(
                f"{some(other)}, outside the posterior, has other values than when the memory was made: the old "
                "function cannot be had from it. Give teacher=, a copy of the old model."
            )
        self._watched = {name: (parameter, parameter._version) for name, parameter in outside.items()}
        self._ties = posterior.ties
        # Where the model is: nothing is copied to a device at every step. A lookup with max_norm writes to its table.
        writes = any(getattr(module, "max_norm", None) is not None for module in model.modules())
        self._mean = {name: placed(posterior.mean[name], p) for name, p in params.items()}
        if writes:
            self._mean = {name: value.clone() for name, value in self._mean.items()}
        kept, found = memory.buffers if isinstance(memory, Memory) else {}, buffers(model)
        require_shapes(shapes(kept), shapes(found), what="the memory's buffers", than="the model")
        lost = [name for name, buffer in found.items() if name not in kept and buffer.is_floating_point()]
        if lost and any(not torch.equal(full(p.detach()), full(self._mean[name])) for name, p in params.items()):
            raise MismatchError(
                f"no {some(lost)} was kept, and the model has moved since: how it ran then is not known. Keep "
                "buffers with the posterior: Memory.of(posterior, model), while the model is as it was."
            )
        self.assumed = unkept(memory, found)  # to be what they are now, while the weights are what they were
        then = {id(buffer): kept[name] for name, buffer in found.items() if name in kept}
        self._buffers = {
            name: then.get(id(buffer), buffer).detach().to(buffer, copy=True) for name, buffer in model.named_buffers()
        }

    def say_assumed(self, stacklevel: int) -> None:
        """Warn where statistics are taken to be what they are now."""
        if self.assumed:
            warnings.warn(
                f"no {some(self.assumed)} was kept: the old model is taken to have run with what is there now, which "
                "is right as long as the model was not called in training mode since. Keep them with the posterior: "
                "Memory.of(posterior, model).", HoldfastWarning, stacklevel=stacklevel,
            )  # fmt: skip

    def __call__(self, model: nn.Module, forward: Forward, inputs: Any) -> Any:
        resharded(model)
        params = matched(model, shapes(self._mean), ties=self._ties)
        self._require_unchanged(model, {id(parameter) for parameter in params.values()})
        values = {name: self._mean[name].to(p.device, p.dtype) for name, p in params.items()}
        now = dict(model.named_buffers())
        buffers = {name: buffer.to(now[name].device) for name, buffer in self._buffers.items()}
        with torch.no_grad(), evaluating(model):
            if any(in_pieces(p) for p in params.values()):
                return self._in_place(model, lambda: forward(model, inputs))
            return run_at(model, values, lambda run: forward(run, inputs), buffers)

    def _in_place(self, model: nn.Module, call: Callable[[], Any]) -> Any:
        """A model in pieces is run as it is, with the old pieces in the place of its own."""
        now = {id(buffer): buffer.clone() for buffer in model.buffers()}
        then = {name: p.detach().clone() for name, p in matched(model, shapes(self._mean), ties=self._ties).items()}
        try:
            self._put(model, self._mean)
            for name, buffer in model.named_buffers():
                buffer.copy_(self._buffers[name])
            return call()
        finally:
            resharded(model)
            self._put(model, then)
            for buffer in model.buffers():
                buffer.copy_(now[id(buffer)])

    def _put(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        for name, parameter in matched(model, shapes(self._mean), ties=self._ties).items():
            part(parameter.data).copy_(part(values[name]))

    def _require_unchanged(self, model: nn.Module, inside: set[int]) -> None:
        now = {name: p for name, p in all_parameters(model).items() if id(p) not in inside}
        touched = {
            name: parameter
            for name, parameter in now.items()
            if name not in self._watched
            or parameter is not self._watched[name][0]
            or parameter._version != self._watched[name][1]
        }
        changed = [name for name, mark in fingerprints(touched).items() if self._frozen.get(name) != mark]
        changed += [name for name, parameter in now.items() if parameter.requires_grad and name not in changed]
        changed += [name for name in self._watched if name not in now]
        if changed:
            raise MismatchError(f"{some(changed)}, outside the posterior, has changed: give teacher=, a frozen copy.")
        self._watched |= {name: (parameter, parameter._version) for name, parameter in touched.items()}


def recalled(model: nn.Module, memory: Posterior | Memory, *, forward: Forward | None = None) -> Callable[[Any], Any]:
    """The old function, for a loop of one's own: the model at the posterior's mean, in evaluation mode, no graph.

    old = holdfast.recalled(model, memory)
    loss = loss + num_old / num_new * holdfast.distillation_loss(old(x), model(x), holdfast.categorical)
    """
    inner = unwrapped(model)
    teacher = Recalled(memory, inner)
    teacher.say_assumed(stacklevel=3)
    return asking(teacher, inner, forward)


def asking(teacher: Recalled, model: nn.Module, forward: Forward | None = None) -> Callable[[Any], Any]:
    """The old function of inputs."""
    plain: Forward = forward if forward is not None else lambda run, given: run(given)
    return lambda inputs: teacher(model, plain, inputs)


def unkept(memory: Posterior | Memory, now: Iterable[str]) -> list[str]:
    """The statistics among the names of a model's buffers, or weights, of which a memory does not know what they were.

    Buffers that a model computes with and does not count are what they were.
    """
    kept = memory.buffers if isinstance(memory, Memory) else {}
    return [name for name in now if name.endswith(STATISTICS) and name not in kept]


def _rounds(mean: Tensor, parameter: Tensor) -> bool:
    """Whether a mean is kept in fewer digits than the parameter has."""
    return torch.finfo(mean.dtype).eps > torch.finfo(parameter.dtype).eps
