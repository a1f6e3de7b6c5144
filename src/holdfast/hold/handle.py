"""A model being held: what happens around each step of its optimizers."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from types import TracebackType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, HoldfastError, HoldfastWarning, InertError, MismatchError, require_number
from ..penalty import Drawn, Quadratic, Resumable, Term
from ..pieces import number, resharded
from ..posterior import Covered, Posterior
from ..posterior.covered import covered, with_precision
from ..steps import Strays, UnderWay, uncompiled
from .budget import Budget, Spent
from .guard import (
    Watch,
    parameters,
    require_gradient_matters,
    require_reach,
    require_something_trains,
    require_values,
    require_weights_in_use,
    warn_of_divergence,
    warn_of_weight_decay,
)
from .proximal import Proximal
from .reused import Reused
from .rotation import Rotation
from .statistics import Frozen

# Weak on both sides: the optimizer's own hooks keep its handle alive.
_held_by: WeakKeyDictionary[Optimizer, ReferenceType[Handle]] = WeakKeyDictionary()


class Handle:
    """A model being held. `strength` may be changed while training; `remove()` lets go."""

    def __init__(
        self,
        optimizers: list[Optimizer],
        model: nn.Module,
        terms: list[Term],
        num_data: float,
        strength: float,
        rotation: Rotation | None = None,
        budget: Budget | None = None,
        proximal: Proximal | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._proximal = proximal
        self.statistics: Frozen | None = None
        self._model = model
        self._terms = terms
        self._num_data = num_data
        self._strength = require_number(strength, "strength")
        self._rotation = rotation
        self._budget = budget
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._steps = {id(optimizer): 0 for optimizer in optimizers}
        self._under_way = UnderWay()
        self._strays: Strays | None = None
        self._own_steps: dict[int, bool] = {}  # whether the step that is under way has a pull of its own after it
        self._held = self._lookup()
        self._watches = {id(optimizer): Watch(optimizer) for optimizer in optimizers}

    @property
    def strength(self) -> float:
        """How much an old example counts against a new one."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        self._strength = require_number(value, "strength")

    @property
    def proximal(self) -> bool:
        """Whether the pull of posteriors is a step of its own, and not in the gradients."""
        return self._proximal is not None

    @property
    def penalty(self) -> float:
        """What the terms sum to now, in nats, before the strength: ½ (θ−μ)ᵀΛ(θ−μ) for a posterior."""
        resharded(self._model)
        return sum(number(term.value(self._model)) for term in self._terms) if self._held else 0.0

    @property
    def steps(self) -> int:
        """How many optimizer steps were held, over all optimizers."""
        return sum(self._steps.values())

    @property
    def generators(self) -> list[torch.Generator]:
        """What terms draw with: a CUDA graph that records steps must register each (`register_generator_state`)."""
        found = [term.generator for term in self._terms if isinstance(term, Drawn)]
        return [generator for generator in found if generator is not None]

    @property
    def coverage(self) -> Covered:
        """Which of the model's parameters are held, and which are free or frozen: print it."""
        held: dict[int, int] = {}
        for term in self._terms:
            known = term.posterior.precision.diagonal() if isinstance(term, (Quadratic, Reused)) else {}
            for name, parameter in term.held(self._model).items():
                entries = with_precision(known[name]) if name in known else parameter.numel()
                held[id(parameter)] = max(entries, held.get(id(parameter), 0))
        return covered(self._model, held, held)

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger. `rise` is the terms' estimate of nats lost per old example."""
        value = self.penalty
        old = sum(term.num_data for term in self._terms)
        return {
            "holdfast/penalty": value,
            "holdfast/loss": self.strength * value / self._num_data,
            "holdfast/rise": value / old if old else 0.0,
            "holdfast/strength": self.strength,
            "holdfast/steps": float(self.steps),
            "holdfast/held_parameters": float(sum(p.numel() for p in self._held.values())),
            **({} if self._budget is None else {"holdfast/spent": self._budget.spent}),
        }

    def finish(self) -> Spent:
        """Bring the model inside its budget, and say what was spent: before the last save. Training is over then."""
        if self._budget is None:
            raise ArgumentError("there is no budget to finish: hold(..., budget=0.05) sets one.")
        require_weights_in_use(self._optimizers)
        return self._budget.finish(self._model, self.strength, stacklevel=4)

    @property
    def spent(self) -> Spent | None:
        """What came of the budget, once it is finished."""
        return None if self._budget is None else self._budget.finished

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs: which memories it holds to, where the strength and a budget stand, and `terms`.

        These are what terms use from one step to the next: the pulls of `every`, as large as what is held, and the
        generators of those that draw. There are none where the next step is made of the weights alone.
        """
        budget = {} if self._budget is None else {"budget": self._budget.state_dict()}
        states = [term.state_dict() if isinstance(term, Resumable) else {} for term in self._terms]
        used = {"terms": states} if any(states) else {}
        return {"memories": list(self._identities), "strength": self.strength, **budget, **used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; raises where it is of a hold to other memories."""
        then, now = list(state["memories"]), list(self._identities)
        if then != now:
            raise MismatchError(
                f"this state is of a hold to the memory {', '.join(then)}, and this one holds to {', '.join(now)}. "
                "Give it the memory that training began with, or begin anew from the weights alone."
            )
        self.strength = state["strength"]
        if self._budget is not None and "budget" in state:
            self._budget.load_state_dict(state["budget"])
        for term, each in zip(self._terms, state.get("terms", ()), strict=False):
            if isinstance(term, Resumable) and each:
                term.load_state_dict(each)

    @cached_property
    def _identities(self) -> tuple[str, ...]:
        """Of the posteriors that terms hold to."""
        known = (getattr(term, "posterior", None) for term in self._terms)
        return tuple(each.id for each in known if isinstance(each, Posterior))

    def remove(self) -> None:
        """Let go, inside the budget if there is one. Raises if an optimizer with something to hold made no step."""
        self._remove()

    def _remove(self) -> None:
        attached = bool(self._hooks)
        if attached and self.statistics is not None and self.spent is None:  # a finish moves them too
            self.statistics.require_kept()
        self.detach()
        if attached and self._strays is not None:
            self._strays.require_none(self._held)
            now = self._held
            with contextlib.suppress(HoldfastError):  # whoever has changed the model since is done with it
                now = self._lookup()
            self._strays.require_none(now)
        if attached and self._budget is not None and self._budget.finished is None and self.steps:
            require_weights_in_use(self._optimizers)
            self._budget.finish(self._model, self.strength, stacklevel=5)
        ids = {id(parameter) for parameter in self._held.values() if parameter.requires_grad}
        for optimizer in self._optimizers if attached else []:
            if not self._steps[id(optimizer)] and any(id(parameter) in ids for parameter in parameters(optimizer)):
                raise InertError(
                    f"{type(optimizer).__name__} never made a step while it was held, so the penalty did nothing. Was "
                    "the model trained with another optimizer (a copy loses its hooks), or was the loop empty?"
                )
        if attached:
            warn_of_divergence(self._held, stacklevel=3)

    def __enter__(self) -> Handle:
        if not self._hooks:
            raise InertError("this hold was removed and would do nothing. Call holdfast.hold again.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.detach()  # the first error is the one to see
            if self._budget is not None and self._budget.finished is None and self.steps:
                warnings.warn(
                    "training was left before its budget was finished: call finish() on the handle before the model is "
                    "used.", HoldfastWarning, stacklevel=2,
                )  # fmt: skip
        else:
            self._remove()

    def _attach(self) -> None:
        for optimizer in self._optimizers:
            if _holder(optimizer) is not None:
                raise ArgumentError(
                    "this optimizer is already held, and both penalties would act. Call remove() on the first handle "
                    "(or leave its `with` block; after a training that was broken off, callback.handle.detach()); to "
                    "hold to several posteriors, give hold a list of them."
                )
        if self._held:
            require_something_trains(self._held)
            require_reach(self._held, self._optimizers, self._model)
            require_values(self._held)
            for optimizer in self._optimizers:
                require_gradient_matters(optimizer)
            warn_of_weight_decay(self._held, self._optimizers, stacklevel=3)
            self._strays = Strays(self._optimizers, self._under_way)
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(uncompiled(self._before)))
            self._hooks.append(optimizer.register_step_post_hook(uncompiled(self._after)))
            _held_by[optimizer] = ref(self)

    def _lookup(self) -> dict[str, nn.Parameter]:
        resharded(self._model)  # an evaluation between a backward pass and the step has made it whole
        return {name: parameter for term in self._terms for name, parameter in term.held(self._model).items()}

    def detach(self) -> None:
        """Let go at once: nothing is checked, and no budget is finished."""
        for hook in self._hooks:
            hook.remove()
        if self._strays is not None:
            self._strays.end()
        if self.statistics is not None:
            self.statistics.remove()
        self._hooks.clear()
        for optimizer in self._optimizers:
            if _holder(optimizer) is self:
                del _held_by[optimizer]
        self._under_way.clear()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._under_way.begins(optimizer, sys._getframe(1)):
            return None
        self._steps[id(optimizer)] += 1
        if not self._held:
            return None
        if self._rotation is not None:
            self._rotation.start()
        for term in self._terms:
            if isinstance(term, Drawn):
                term.start()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._add_gradient(optimizer, value=False)
            return None
        if getattr(optimizer, "closure_at_a_draw", False):
            raise ArgumentError(
                "IVON runs a closure at a draw, where the pull of a hold would be taken for curvature. Run the passes "
                "inside `with optimizer.sampled():`, and call step() without a closure."
            )
        held = self._held_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": held}
        return (args[0], held, *args[2:]), kwargs

    def _held_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure zeroes the gradients itself, so the pull comes after it; line searches see the whole objective."""

        def held() -> Any:
            loss = closure()
            added = self._add_gradient(optimizer)
            return None if loss is None else loss + (added.to(loss) if isinstance(loss, Tensor) else float(added))

        return held

    def _add_gradient(self, optimizer: Optimizer, *, value: bool = True) -> Tensor:
        """Add strength/N · ∇penalty to the gradients this optimizer will use; returns what that adds to the loss.

        Where that is not asked for (`value`), a quadratic need not compute it.
        """
        self._held = self._lookup()
        require_reach(self._held, self._optimizers, self._model)
        if self._strays is not None:
            self._strays.require_none(self._held)
        # Where the optimizer climbs, the penalty is what is taken off the objective.
        sign = -1.0 if _climbs(optimizer) else 1.0
        scale = sign * self.strength / self._num_data
        # A fused optimizer divides by the scaler's factor inside its kernel: the pull must be scaled up alike.
        loss_scale = getattr(optimizer, "grad_scale", None)
        ours = {id(parameter) for parameter in parameters(optimizer) if parameter.requires_grad}
        factor = scale if loss_scale is None else scale * loss_scale
        own = self._proximal is not None and self._proximal.fits(optimizer, self._model)
        self._own_steps[id(optimizer)] = own
        watch = self._watches[id(optimizer)]
        nats = torch.zeros(())
        for quadratic in (each for each in self._terms if own and value and isinstance(each, Quadratic)):
            nats = nats + quadratic.value(self._model)
        value = value or not watch.satisfied
        for term in (each for each in self._terms if not (own and isinstance(each, Quadratic))):
            if isinstance(term, Quadratic):
                nats = nats + term.add_gradient_(self._model, factor, ours, value=value)
            else:
                nats = nats + term.add_gradient_(self._model, factor, ours)
        if not watch.satisfied and scale != 0 and bool(nats > 0):
            watch.before(self._held, ours)
        if self._rotation is not None:
            self._rotation.before(self._held, ours)
        return scale * nats

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._under_way.ends(optimizer, sys._getframe(1)):
            if self._rotation is not None:
                self._rotation.after(self._held)
            if self._proximal is not None and self._held and self._own_steps.get(id(optimizer)):
                ours = {id(parameter) for parameter in parameters(optimizer) if parameter.requires_grad}
                self._proximal.after(optimizer, self._model, self.strength / self._num_data, ours)
            self._watches[id(optimizer)].after(optimizer)
            if self._budget is not None:
                self._budget.finished = None  # what is trained on is not finished
                self.strength = self._budget.turn(self._model, self.strength)


def _holder(optimizer: Optimizer) -> Handle | None:
    handle = _held_by.get(optimizer)
    return None if handle is None else handle()


def _climbs(optimizer: Optimizer) -> bool:
    """Whether the optimizer maximizes its objective."""
    ways = {bool(group.get("maximize", False)) for group in optimizer.param_groups}
    if len(ways) > 1:
        raise ArgumentError("some parameter groups of the optimizer maximize and others minimize: hold needs one way.")
    return True in ways
