"""A model being held: what a user sees of it, from the first step to the last."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ArgumentError, BudgetError, HoldfastWarning, InertError, MismatchError, require_number
from ..penalty import Drawn, Quadratic, Resumable, Term
from ..pieces import number, resharded
from ..posterior import Covered, Posterior
from ..posterior.covered import covered, with_precision
from .budget import Budget, Spent
from .guard import (
    parameters,
    require_finite_values,
    require_gradient_matters,
    require_reach,
    require_something_trains,
    require_weights_in_use,
    warn_of_divergence,
    warn_of_weight_decay,
)
from .proximal import Proximal
from .pulls import Pulls
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
        self._optimizers, self._model, self._terms, self._budget = optimizers, model, terms, budget
        self._rotation = rotation
        self.statistics: Frozen | None = None
        strength = require_number(strength, "strength")
        self._pulls = Pulls(optimizers, model, terms, num_data, strength, rotation, proximal, self._turn)

    @property
    def strength(self) -> float:
        """How much an old example counts against a new one."""
        return self._pulls.strength

    @strength.setter
    def strength(self, value: float) -> None:
        self._pulls.strength = require_number(value, "strength")

    @property
    def proximal(self) -> bool:
        """Whether the pull of posteriors is a step of its own, and not in the gradients."""
        return self._pulls.proximal is not None

    @property
    def penalty(self) -> float:
        """What the terms sum to now, in nats, before the strength: ½ (θ−μ)ᵀΛ(θ−μ) for a posterior."""
        resharded(self._model)
        return sum(number(term.value(self._model)) for term in self._terms) if self._pulls.held else 0.0

    @property
    def steps(self) -> int:
        """How many optimizer steps were held, over all optimizers."""
        return sum(self._pulls.made.values())

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
        """Numbers for a logger. `rise` is the terms' estimate of nats lost per old example; `held_parameters` are those
        that a term reaches, of whose entries `coverage` tells how many have a precision."""
        value = self.penalty
        old = sum(term.num_data for term in self._terms)
        return {
            "holdfast/penalty": value,
            "holdfast/loss": self.strength * value / self._pulls.num_data,
            "holdfast/rise": value / old if old else 0.0,
            "holdfast/strength": self.strength,
            "holdfast/steps": float(self.steps),
            "holdfast/held_parameters": float(sum(p.numel() for p in self._pulls.held.values())),
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
        """What resuming needs: which memories it holds to, where the strength and a budget stand, and `terms`; also
        whether the optimizer's moments, in its own state, are of rotated steps.

        These are what terms use from one step to the next: the pulls of `every`, as large as what is held, and the
        generators of those that draw. There are none where the next step is made of the weights alone.
        """
        budget = {} if self._budget is None else {"budget": self._budget.state_dict()}
        states = [term.state_dict() if isinstance(term, Resumable) else {} for term in self._terms]
        used = {"terms": states} if any(states) else {}
        turned = {"rotated": True} if self._rotation is not None and self._rotation.gathered else {}
        return {"memories": list(self._identities), "strength": self.strength, **budget, **turned, **used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; raises where it is of a hold to other memories."""
        then, now = list(state["memories"]), list(self._identities)
        if then != now:
            raise MismatchError(
                f"this state is of a hold to the memory {', '.join(then)}, and this one holds to {', '.join(now)}. "
                "Give it the memory that training began with, or begin anew from the weights alone."
            )
        rotated = bool(state.get("rotated", False))
        if self._rotation is not None:
            self._rotation.resumed = rotated
        elif rotated:
            raise MismatchError(
                "this state is of a hold with rotate=True, in whose eigenvectors its optimizer's moments are, and this "
                "one steps in the weights' own. Hold with rotate=True, or begin anew from the weights alone."
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
        attached, held = self._pulls.attached, self._pulls.held
        if attached and self.statistics is not None and self.spent is None:  # a finish moves them too
            self.statistics.require_kept()
        self.detach()
        if attached:
            self._pulls.require_no_strays()
        if attached and self._budget is not None and self._budget.finished is None and self.steps:
            require_weights_in_use(self._optimizers)
            self._budget.finish(self._model, self.strength, stacklevel=5)
        ids = {id(parameter) for parameter in held.values() if parameter.requires_grad}
        for optimizer in self._optimizers if attached else []:
            if not self._pulls.made[id(optimizer)] and any(id(parameter) in ids for parameter in parameters(optimizer)):
                raise InertError(
                    f"{type(optimizer).__name__} never made a step while it was held, so the penalty did nothing. Was "
                    "the model trained with another optimizer (a copy loses its hooks), or was the loop empty?"
                )
        if attached:
            warn_of_divergence(held, stacklevel=3)

    def __enter__(self) -> Handle:
        if not self._pulls.attached:
            raise InertError("this hold was removed and would do nothing. Call holdfast.hold again.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.detach()  # the first error is the one to see
            hopeless = issubclass(kind, BudgetError)  # and said so
            if self._budget is not None and self._budget.finished is None and self.steps and not hopeless:
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
        if held := self._pulls.held:
            require_something_trains(held)
            require_reach(held, self._optimizers, self._model)
            require_finite_values(held)
            for optimizer in self._optimizers:
                require_gradient_matters(optimizer)
            warn_of_weight_decay(held, self._optimizers, stacklevel=3)
        self._pulls.attach()
        for optimizer in self._optimizers:
            _held_by[optimizer] = ref(self)

    def detach(self) -> None:
        """Let go at once: nothing is checked, and no budget is finished."""
        self._pulls.detach()
        if self.statistics is not None:
            self.statistics.remove()
        for optimizer in self._optimizers:
            if _holder(optimizer) is self:
                del _held_by[optimizer]

    def _turn(self) -> None:
        """After each step the strength goes where a budget wants it."""
        if self._budget is not None:
            self._budget.finished = None  # what is trained on is not finished
            self.strength = self._budget.turn(self._model, self.strength)


def _holder(optimizer: Optimizer) -> Handle | None:
    handle = _held_by.get(optimizer)
    return None if handle is None else handle()
