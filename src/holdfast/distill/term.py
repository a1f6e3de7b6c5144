"""Distillation as a term of a hold: at every step, some inputs are drawn and the old model is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, MismatchError, require_number
from ..likelihood import Likelihood
from ..params import trainable, unwrapped
from ..penalty import add_scaled_
from ..posterior import Memory, Posterior
from ..probes import Probes
from ..probes.layer import module_at, replaced
from .loss import counted
from .teacher import Forward, Given, Recalled, Teacher, evaluating

_BATCH = 128
_BATCHES = 8  # drawn for the value, always the same


class Source(Protocol):
    """What inputs are drawn from: probes, kept inputs, or the new data's."""

    @property
    def num_data(self) -> float:
        """How much old data they stand for."""

    @property
    def unit(self) -> str:
        """What that counts."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """A batch of inputs."""


@dataclass
class Distillation:
    """N_old · E KL(p_old ‖ p_θ) in nats (T15), by a batch of inputs drawn anew at every step."""

    teacher: Teacher
    source: Any
    likelihood: Likelihood
    forward: Forward
    batch: int
    temperature: float
    seed: int
    classes: int | None = None
    _generator: torch.Generator | None = field(default=None, repr=False)

    @property
    def num_data(self) -> float:
        return float(self.source.num_data)

    @property
    def unit(self) -> str:
        return str(self.source.unit)

    def held(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return trainable(unwrapped(model))

    def value(self, model: nn.Module) -> Tensor:
        """On the same draws each time it is asked, so that values can be compared."""
        generator = torch.Generator(_device(model)).manual_seed(self.seed)
        with torch.no_grad():
            means = [self._mean(unwrapped(model), generator) for _ in range(_BATCHES)]
        return self.num_data * torch.stack(means).mean()

    def add_gradient_(self, model: nn.Module, scale: float | Tensor, only: Collection[int]) -> Tensor:
        inner = unwrapped(model)  # a wrapper's own hooks are for the data's backward pass
        if self._generator is None:
            # The same on every process: what is added after gradients were averaged must not differ between them.
            self._generator = torch.Generator(_device(model)).manual_seed(self.seed)
        named = {name: parameter for name, parameter in self.held(inner).items() if id(parameter) in only}
        with torch.enable_grad():
            mean = self._mean(inner, self._generator)
            grads = torch.autograd.grad(mean, list(named.values()), allow_unused=True)
        found = {name: grad for name, grad in zip(named, grads, strict=True) if grad is not None}
        with torch.no_grad():
            add_scaled_(named, {name: self.num_data * grad for name, grad in found.items()}, scale, only)
        return self.num_data * mean.detach()

    def _mean(self, model: nn.Module, generator: torch.Generator) -> Tensor:
        drawn = self.source.draw(self.batch, generator)
        layer, blank = self.source.layer, self.source.blank
        inputs = drawn if blank is None else blank.expand(len(drawn), *blank.shape[1:])

        def inside(run: nn.Module) -> Any:
            return replaced(run, layer, drawn) if layer else nullcontext()

        def called(run: nn.Module, given: Any) -> Any:
            with inside(run):
                return self.forward(run, given)

        old = self.teacher(model, called, inputs)
        with evaluating(model):
            new = called(model, inputs)
        if self.classes is not None:
            old = old[..., : self.classes]
        each = self.likelihood.divergence(old, new, None, self.temperature)
        return each.sum() / counted(self.likelihood, new, None)


def distill(
    model: nn.Module,
    teacher: Posterior | Memory | nn.Module,
    inputs: Source | None = None,
    likelihood: Likelihood | None = None,
    *,
    batch: int = _BATCH,
    temperature: float = 1.0,
    classes: int | None = None,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Distillation:
    """A term that holds `model` to what the old one answered, for `hold`, alone or beside a posterior.

    `teacher` is a posterior or a memory, at whose mean the model itself is asked (no second network), or another model.
    `inputs` is what it is asked about: `gaussian_probes`, `kept_inputs`, `own_text` or `new_inputs`; a memory's own probes
    if left out. At strength 1 an old example counts as much as a new one: their number is the inputs' `num_data`.
    `classes` says how many classes, from the first, the teacher knows: the others had no probability, and must not get
    any on old inputs.

        probes = holdfast.gaussian_probes(old_loader)
        term = holdfast.distill(model, posterior, probes, holdfast.categorical)
        with holdfast.hold(optimizer, model, [posterior, term], num_data=len(new_data)):
            train(model, optimizer, new_loader)
    """
    if inputs is None and isinstance(teacher, Memory):
        inputs = teacher.probes
    if inputs is None or likelihood is None or not isinstance(likelihood, Likelihood):
        raise ArgumentError(
            "distill needs the model, a teacher, what to ask it about, and the likelihood of its answers."
        )
    if not hasattr(inputs, "draw"):
        raise ArgumentError(
            f"what to ask about is gaussian_probes(...), kept_inputs(...), own_text(...) or new_inputs(...), got "
            f"{type(inputs).__name__}."
        )
    if not isinstance(batch, int) or batch < 1:
        raise ArgumentError(f"batch is how many inputs are drawn at each step, got {batch!r}.")
    if inputs.unit != likelihood.unit:
        raise MismatchError(f"the inputs count {inputs.unit}s, and {likelihood.name} counts {likelihood.unit}s.")
    require_number(temperature, "temperature", positive=True)
    inner = unwrapped(model)
    if isinstance(inputs, Probes):
        inputs = inputs.to(_device(model))
        if inputs.layer:
            module_at(inner, inputs.layer)
    asked: Teacher = Given(teacher, inner) if isinstance(teacher, nn.Module) else Recalled(teacher, inner)
    plain: Forward = forward if forward is not None else lambda run, given: run(given)
    return Distillation(asked, inputs, likelihood, plain, batch, float(temperature), seed, classes)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
