"""SI: how much of the loss's fall each weight is answerable for, from the path that training took."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..devices import full
from ..errors import ArgumentError, DataError, InertError, MismatchError, require_number
from ..identity import digest, fingerprint, fingerprints
from ..params import all_parameters, matched, shapes, some
from ..precision import Diagonal, Source
from ..steps import UnderWay, innermost
from .forms import wide

DAMPING = 0.1  # as for permuted MNIST in Zenke's published code (0.001 for CIFAR there), and in van de Ven's


@dataclass(frozen=True)
class _Step:
    """What a step begins with: the loss's gradients, and the weights."""

    params: dict[str, nn.Parameter]
    grads: list[Tensor]
    before: list[Tensor]


class RecordedPath:
    """A path being recorded, step by step; `precision` makes a Λ of it, and `remove()` ends it."""

    def __init__(self, optimizers: list[Optimizer], model: nn.Module) -> None:
        self._model = model
        self._steps = 0
        self._path: dict[str, Tensor] = {}  # ω
        self._start: dict[str, Tensor] = {}
        self._end: tuple[dict[str, Tensor], dict[str, str]] | None = None
        self._begun: dict[int, _Step] = {}
        self._under_way = UnderWay()
        self._join({name: p for each in optimizers for name, p in self._found(each).items()})
        if not self._path:
            raise InertError(
                "the optimizer has no trainable parameter of the model, so there is no path to record. Was it made for "
                "a copy of the model, or before the model was replaced or frozen?"
            )
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._last: dict[int, int] = {}
        for each in optimizers:
            first = each.register_step_pre_hook(self._before)
            # A hold adds its pull to `.grad` in a hook of its own: in front of it, there is the data's gradient alone.
            _ordered(each._optimizer_step_pre_hooks).move_to_end(first.id, last=False)
            last = each.register_step_post_hook(self._after)
            self._last[id(each)] = last.id
            self._hooks += [first, last]

    def __repr__(self) -> str:
        return f"RecordedPath({self.steps} steps of {len(self._path)} parameters)"

    @property
    def steps(self) -> int:
        """How many optimizer steps were recorded, over all optimizers."""
        return self._steps

    @property
    def integral(self) -> dict[str, Tensor]:
        """ω = −Σ_t g(t) Δθ(t) by parameter. Its sum over all entries is about how far the mean loss fell."""
        return {name: omega.clone() for name, omega in self._path.items()}

    def precision(self, *, num_data: float, damping: float = DAMPING, unit: str = "example") -> Diagonal:
        """Λ = 2 N Ω with Ω = max(ω, 0) / (Δ² + ξ), Δ being how far each weight went (Zenke 2017).

        A loss ½ h θ² that is walked down to its minimum has ω = ½ h Δ², and so Λ = N h as ξ → 0: the units of a Fisher
        summed over `num_data`, the number of examples (or tokens, `unit="token"`) that the recorded loss was a mean
        over. Then the published penalty c Σ Ω δ² at c = 1 is ½ δᵀΛδ / N. `damping` ξ is in weights squared: where a
        weight moved much less than √ξ, Λ is about 2 N ω / ξ and far below the curvature.

        It is of the weights that the model has now, or had when the recording ended: end it after a hold with a budget,
        whose finish moves them.
        """
        count = require_number(num_data, "num_data, the number of examples (len(loader.dataset)),", positive=True)
        bound = require_number(damping, "damping, in weights squared,", positive=True)
        if not isinstance(unit, str) or not unit:
            raise ArgumentError(f'unit says what num_data counts, "example" or "token", got {unit!r}.')
        if not self._steps:
            raise InertError(
                "no step was recorded, so there is no path. Was the model trained with another optimizer (a copy loses "
                "its hooks), or before recorded_path was called, or was the loop empty?"
            )
        went, weights = self._end or self._ended()
        broken = [name for name in went if not _every((self._path[name] + went[name]).isfinite())]
        if broken:
            raise DataError(
                f"the path of {some(broken)} is not finite: a gradient or a weight was not, at some step. Did training "
                "diverge? Record a new path, with a smaller learning rate."
            )
        if all(_every(each == 0) for each in went.values()):
            raise InertError("no weight is elsewhere than where the path began: is the learning rate zero?")
        entries = {
            name: 2 * count * self._path[name].clamp(min=0) / (went[name].square() + bound) for name in self._path
        }
        if all(_every(each == 0) for each in entries.values()):
            raise InertError(
                "the loss fell along no weight at all, so the precision would be zero. Were the gradients of another "
                "loss, or zeroed before the step?"
            )
        name = digest(f"path {fingerprint(self._path)} {sorted(weights.items())}")
        said = f"SI, damping {bound:g}"
        return Diagonal(entries, (Source(name, count, unit, "path integral", said, weights=weights),))

    def remove(self) -> None:
        """End the path at the weights that the model has now. `precision` still works, for these weights."""
        if self._hooks:
            self.detach()
            if self._steps:
                self._end = self._ended()
                self._start.clear()

    def __enter__(self) -> RecordedPath:
        if not self._hooks:
            raise InertError("this recording has ended and would see nothing. Call holdfast.recorded_path again.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.remove()
        else:
            self.detach()  # the first error is the one to see

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._begun.clear()
        self._under_way.clear()

    @torch.no_grad()
    def _ended(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """How far each weight is from where it began, and the marks of all weights."""
        params = matched(self._model, shapes(self._path))
        return {name: params[name] - self._start[name] for name in params}, fingerprints(all_parameters(self._model))

    def _found(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """The parameters that the model has now, as far as the optimizer trains them."""
        ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {name: p for name, p in all_parameters(self._model).items() if id(p) in ours and p.requires_grad}

    @torch.no_grad()
    def _join(self, params: Mapping[str, nn.Parameter]) -> None:
        """Paths begin for parameters that have none yet; the others must be what they were."""
        for name, parameter in params.items():
            known = self._path.get(name)
            if known is None:
                (self._start[name],) = _copies([parameter])
                self._path[name] = torch.zeros_like(self._start[name])
            elif (known.shape, known.device) != (parameter.shape, parameter.device):
                raise MismatchError(
                    f"`{name}` was {tuple(known.shape)} on {known.device} when its path began, and is now "
                    f"{tuple(parameter.shape)} on {parameter.device}. Call recorded_path after such changes."
                )

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._under_way.begins(optimizer, sys._getframe(1)):
            return
        if callable(kwargs.get("closure", args[1] if len(args) > 1 else None)):
            raise ArgumentError(
                f"{type(optimizer).__name__}.step was given a closure, which computes gradients within the step, where "
                "no path can be recorded. Call loss.backward() before optimizer.step() (in Lightning: "
                "automatic_optimization = False), or take a Fisher after training, which asks nothing of it."
            )
        # A hold with rotate=True ends its turn after the step: the last to look sees where the weights really are.
        _ordered(optimizer._optimizer_step_post_hooks).move_to_end(self._last[id(optimizer)])
        params = {name: p for name, p in self._found(optimizer).items() if p.grad is not None}
        self._join(params)
        with torch.no_grad():
            grads = _loss_gradients(optimizer, params)
            self._begun[id(optimizer)] = _Step(params, grads, _copies(list(params.values())))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._under_way.ends(optimizer, sys._getframe(1)):
            return
        step = self._begun.pop(id(optimizer))
        with torch.no_grad():
            _add_path_([self._path[name] for name in step.params], step)
        self._steps += 1


def recorded_path(optimizer: Optimizer | Sequence[Optimizer], model: nn.Module) -> RecordedPath:
    """Record the path of `model` while `optimizer` trains it (synaptic intelligence): ω = −Σ_t g(t) Δθ(t).

    g is the gradient of the mean loss, as `.grad` has it when `optimizer.step` is called: without the pull of a
    `holdfast.hold` on the same optimizer, attached before or after. What the user's loop did to it is in it: terms
    added to the loss, and clipping. Several optimizers are given as a list. Memory is on the parameters' devices: two
    copies of them, and two more during a step.

        with holdfast.recorded_path(optimizer, model) as path:
            train(model, optimizer, loader)
        posterior = holdfast.consolidate(posterior, model, path.precision(num_data=len(dataset)))

    A task has a recording of its own, and their sum is the running Ω of the paper; `consolidate(..., decay=)` lets
    older tasks fade. What is known to be off: a step goes down the gradient of its own minibatch, noise included, so
    that ω is too large (under SGD −g Δθ = lr g², variance and all); large steps overstate the fall, by their curvature;
    adaptive optimizers weigh both by coordinate, and what SI then measures is near the square root of a Fisher
    (Benzing 2022); and a weight is credited with what others did to its gradient on the way. Weights moved between
    steps (a checkpoint loaded, a budget finished) count in Δ and not in ω.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"recorded_path takes the optimizer, then the model; got {type(model).__name__} as model.")
    found = [_recordable(each) for each in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    return RecordedPath(found, model)


def _recordable(optimizer: Optimizer) -> Optimizer:
    found = innermost(optimizer, "recorded_path")
    if isinstance(found, torch.optim.LBFGS):
        raise ArgumentError(
            "LBFGS computes gradients within its steps, where no path can be recorded. Train with another optimizer, "
            "or take a Fisher after training, which asks nothing of it."
        )
    return found


def _loss_gradients(optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Copies of the gradients of the loss that goes down, as large as it is."""
    grads = _copies([cast(Tensor, parameter.grad).to_dense() for parameter in params.values()])
    climbing = {id(p) for group in optimizer.param_groups if group.get("maximize", False) for p in group["params"]}
    # A fused optimizer divides by the scaler's factor in its kernel, and does nothing there if a gradient is infinite.
    scale, skipped = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    for place, parameter in enumerate(params.values()):
        grad = grads[place]
        if id(parameter) in climbing:
            grad.neg_()
        if scale is not None:
            grad.div_(scale.to(grad.device).reshape(()))
        if skipped is not None:
            grads[place] = torch.where(skipped.to(grad.device).reshape(()) > 0, 0, grad)
    return grads


def _add_path_(path: list[Tensor], step: _Step) -> None:
    """ω ← ω − g (θ_after − θ_before)."""
    after: list[Tensor] = list(step.params.values())
    if path and _together([*path, *after, *step.grads]):
        torch._foreach_sub_(step.before, after)
        torch._foreach_addcmul_(path, step.grads, step.before)
    else:
        for omega, grad, before, now in zip(path, step.grads, step.before, after, strict=True):
            omega += grad * (before - now)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same in float32 at least: what a step changes is small beside what it changes."""
    if not tensors or not _together(tensors):
        return [tensor.detach().to(wide(tensor), copy=True) for tensor in tensors]
    copies = [torch.empty_like(tensor, dtype=wide(tensor), requires_grad=False) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies


def _together(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors can go through one call: plain ones on one device."""
    kinds, devices = {type(tensor) for tensor in tensors}, {tensor.device for tensor in tensors}
    return kinds <= {nn.Parameter, Tensor} and len(devices) == 1


def _every(entries: Tensor) -> bool:
    return bool(full(entries.all()))


def _ordered(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    return cast("OrderedDict[int, Any]", hooks)
