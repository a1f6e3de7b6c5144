"""Distillation as a term of a hold: at every step, some inputs are drawn and the old model is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, HoldfastError, InertError, MismatchError, require_number
from ..likelihood import Likelihood
from ..params import trainable, unwrapped
from ..penalty import add_scaled_
from ..pieces import averaged, resharded, sharded
from ..posterior import Memory, Posterior
from ..posterior.recalled import Forward, Recalled
from ..probes import Probes
from ..probes.layer import module_at, replaced
from ..untouched import evaluating
from .loss import counted
from .new import NewInputs
from .teacher import Given, Teacher

_BATCH = 128
_BATCHES = 8  # drawn for the value, always the same


@runtime_checkable
class Source(Protocol):
    """What inputs are drawn from: probes, kept inputs, or the new data's."""

    @property
    def num_data(self) -> float:
        """How much old data they stand for."""

    @property
    def unit(self) -> str:
        """What that counts."""

    @property
    def layer(self) -> str:
        """The module whose output they are drawn for; nothing for the model's inputs."""

    @property
    def blank(self) -> Tensor | None:
        """For such a layer, an input that has the shape the model takes."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """A batch of inputs."""


@dataclass(eq=False)
class Distillation:
    """N_old · E KL(p_old ‖ p_θ) in nats, by a batch of inputs drawn anew at every step."""

    teacher: Teacher
    source: Source
    likelihood: Likelihood
    forward: Forward
    batch: int
    temperature: float
    seed: int
    classes: int | None = None
    generator: torch.Generator | None = field(default=None, repr=False)
    _reached: frozenset[str] | None = field(default=None, repr=False)
    _once: bool = field(default=False, repr=False)
    _drawn: Tensor | None = field(default=None, repr=False)
    _resumed: Tensor | None = field(default=None, repr=False)

    @property
    def num_data(self) -> float:
        return float(self.source.num_data)

    @property
    def unit(self) -> str:
        return self.source.unit

    def held(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Those that have a part in the answers: below a layer whose output is drawn, nothing has."""
        named = trainable(unwrapped(model))
        return named if self._reached is None else {k: p for k, p in named.items() if k in self._reached}

    def start(self) -> None:
        """A step begins: what is drawn next serves all of it."""
        self._once, self._drawn = True, None

    def value(self, model: nn.Module) -> Tensor:
        """On the same draws each time it is asked, so that values can be compared."""
        inner, generator = unwrapped(model), torch.Generator(_device(model)).manual_seed(self.seed)
        with torch.no_grad():
            means = [self._mean(inner, self.source.draw(self.batch, generator)) for _ in range(_BATCHES)]
        resharded(inner)
        found = self.num_data * torch.stack(means).mean()
        return averaged(found, model) if isinstance(self.source, NewInputs) else found

    def add_gradient_(self, model: nn.Module, scale: float | Tensor, only: Collection[int]) -> Tensor:
        inner = unwrapped(model)  # a wrapper's own hooks are for the data's backward pass
        resharded(inner)
        named = {name: parameter for name, parameter in self.held(inner).items() if id(parameter) in only}
        if not named:
            return torch.zeros((), device=_device(inner))
        with torch.enable_grad():
            mean, found = _gradients(lambda: self._mean(inner, self._now(inner)), named, inner)
        if not mean.requires_grad:
            raise InertError(f"nothing that trains has a part in the answers{_after(self.source.layer)}.")
        if isinstance(self.source, NewInputs) and type(model).__name__ == "DistributedDataParallel":
            found = {name: averaged(grad, model) for name, grad in found.items()}  # each has seen its own inputs
        with torch.no_grad():
            add_scaled_(named, {name: self.num_data * grad for name, grad in found.items()}, scale, only)
        return self.num_data * mean.detach()

    def _now(self, model: nn.Module) -> Tensor:
        """What is drawn for this step."""
        if self.generator is None:
            # The same on every process: what is added after gradients were averaged must not differ between them.
            self.generator = torch.Generator(_device(model)).manual_seed(self.seed)
        if self._resumed is not None:
            self.generator.set_state(self._resumed)
            self._resumed = None
        drawn = self._drawn
        if drawn is None:
            drawn = self.source.draw(self.batch, self.generator)
            self._drawn = drawn if self._once else None
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Where its draws stand."""
        if self._resumed is not None:
            return {"generator": self._resumed}
        return {} if self.generator is None else {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the draws that came next."""
        self._resumed = state["generator"].cpu()

    def _mean(self, model: nn.Module, drawn: Tensor) -> Tensor:
        """The mean divergence per example, or per token, over inputs that were drawn."""
        layer, blank = self.source.layer, self.source.blank
        if drawn.is_floating_point():
            drawn = drawn.to(next(p.dtype for p in model.parameters() if p.is_floating_point()))
        inputs = drawn if blank is None else blank.expand(len(drawn), *blank.shape[1:])

        def called(run: nn.Module, given: Any) -> Any:
            with replaced(run, layer, drawn) if layer else nullcontext():
                return self.forward(run, given)

        old = self.teacher(model, called, inputs)
        with evaluating(model):
            new = called(model, inputs)
        if self.classes is not None:
            if old.shape[-1] < self.classes:
                raise MismatchError(f"classes={self.classes}, and the teacher has {old.shape[-1]}.")
            old = old[..., : self.classes]
        each = self.likelihood.divergence(old, new, None, self.temperature)
        return each.sum() / counted(self.likelihood, new, None)

    def try_out(self, model: nn.Module) -> None:
        """Raise where teacher, inputs and model do not fit, before any step is made."""
        generator = torch.Generator(_device(model)).manual_seed(self.seed)
        drawn = self.source.draw(2, generator)
        layer, blank = self.source.layer, self.source.blank
        try:
            named = trainable(model)
            with torch.enable_grad():
                mean, grads = _gradients(lambda: self._mean(model, drawn), {} if blank is None else named, model)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, HoldfastError):
                raise
            where = f"for `{layer}` " if layer else ""
            raise MismatchError(
                f"inputs of shape {tuple(drawn.shape[1:])}, {drawn.dtype}, were drawn {where}and do not go through the "
                f"model, or through its teacher: {str(error).splitlines()[0]}"
            ) from error
        if blank is None:
            return
        if mean.requires_grad:
            self._reached = frozenset(grads)
        answers = []
        for _ in range(2):
            other = (
                torch.randn(blank.shape, generator=generator, device=blank.device, dtype=blank.dtype)
                if blank.is_floating_point()
                else torch.randint(0, 2, blank.shape, generator=generator, device=blank.device, dtype=blank.dtype)
            )
            with torch.no_grad(), evaluating(model), replaced(model, layer, drawn):
                answers.append(self.forward(model, other.expand(2, *blank.shape[1:])))
        resharded(model)
        if isinstance(answers[0], Tensor) and not torch.equal(answers[0], answers[1]):
            raise ArgumentError(
                f"the model's answers depend on its input by other ways than `{layer}` (a shortcut around it?), so "
                "the output of that module does not decide them. Choose a module that everything goes through."
            )


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
    `inputs` is what it is asked about: `gaussian_probes`, `kept_inputs`, `own_text` or `new_inputs`; a memory's own
    probes if left out. At strength 1 an old example counts as much as a new one: their number is the inputs'
    `num_data`. `classes` says how many classes, from the first, the teacher knows: the others had no probability, and
    must not get any on old inputs. `forward(model, inputs)` is for models that are called in another way.

        probes = holdfast.gaussian_probes(old_loader)
        term = holdfast.distill(model, posterior, probes, holdfast.categorical)
        with holdfast.hold(optimizer, model, [posterior, term], num_data=len(new_data)):
            train(model, optimizer, new_loader)
    """
    if inputs is None and isinstance(teacher, Memory):
        inputs = teacher.probes
    if inputs is None:
        raise ArgumentError(
            "distill needs something to ask the teacher about, and this one has no probes of its own: give "
            "gaussian_probes(...), kept_inputs(...), own_text(...) or new_inputs(...)."
        )
    if not isinstance(likelihood, Likelihood):
        raise ArgumentError("distill needs the likelihood of the answers, such as likelihood=holdfast.categorical.")
    if not isinstance(inputs, Source):
        raise ArgumentError(
            f"what to ask about is gaussian_probes(...), kept_inputs(...), own_text(...) or new_inputs(...), got "
            f"{type(inputs).__name__}."
        )
    for what, number in (("batch, how many inputs are drawn at each step,", batch), ("classes", classes)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ArgumentError(f"{what} is a whole number, 1 or more, got {number!r}.")
    if not isinstance(seed, int):
        raise ArgumentError(f"seed is a whole number, got {seed!r}.")
    if inputs.unit != likelihood.unit:
        raise MismatchError(f"the inputs count {inputs.unit}s, and {likelihood.name} counts {likelihood.unit}s.")
    require_number(temperature, "temperature", positive=True)
    inner = unwrapped(model)
    asked: Teacher = Given(teacher, inner) if isinstance(teacher, nn.Module) else Recalled(teacher, inner)
    if isinstance(asked, Recalled):
        asked.say_assumed(stacklevel=3)
    plain: Forward = forward if forward is not None else lambda run, given: run(given)
    there = inputs.to(_device(model)) if isinstance(inputs, Probes) else inputs
    if there.layer:
        module_at(inner, there.layer)
    term = Distillation(asked, there, likelihood, plain, batch, float(temperature), seed, classes)
    if isinstance(there, Probes):
        term.try_out(inner)
    return term


def _gradients(
    mean: Callable[[], Tensor], named: Mapping[str, nn.Parameter], model: nn.Module
) -> tuple[Tensor, dict[str, Tensor]]:
    """What `mean` comes to, and the gradients that there are; none where it has no graph.

    `fully_shard` puts gradients where its parameters are in a backward pass alone, and adds them to what is there.
    """
    if not sharded(model):
        found = mean()
        wanted = list(named.values()) if found.requires_grad else []
        grads = torch.autograd.grad(found, wanted, allow_unused=True) if wanted else ()
        return found, {name: grad for name, grad in zip(named, grads, strict=False) if grad is not None}
    resharded(model)
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        found = mean()
        if found.requires_grad:
            found.backward()  # type: ignore[no-untyped-call]
        resharded(model)
        return found, {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


def _after(layer: str) -> str:
    return f" after `{layer}`: unfreeze some of it, or take probes at a layer below" if layer else ""


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
