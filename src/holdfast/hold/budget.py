"""At most so much forgetting: a strength that follows what is spent, and a finish that brings the model inside."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, BudgetError, HoldfastWarning, require_number
from ..params import buffers, matched, shapes, some, told_apart, unwrapped
from ..penalty import Term
from ..pieces import number, placed
from ..posterior import Memory, Posterior, as_posterior
from ..posterior.recalled import Recalled, asking
from ..rise import asked, missing

_EVERY = 5  # steps between two looks at what is spent
_GAIN = 0.3  # by how much of the logarithm of what is spent over the budget the strength's follows
_LEAST, _MOST = 1e-3, 1e5
_PATIENCE = 40  # looks at the strongest hold after which there is no hope
_SMALLEST = 1e-4  # nats: below, the rounding of a loss is in the way
_DRAWS, _LAST_DRAWS = 500, 2000  # probes asked about at each look, and at the end
_HALVINGS = 20
_HALF = 0.5  # of the way kept, below which what was learned may be lost with the rest
_NOTHING = 0.02  # of the way from the old weights to the new: so little is no learning


@dataclass(frozen=True)
class Spent:
    """What came of a budget: the estimated rise of the old loss in nats per old example, and what it took."""

    budget: float
    rise: float
    strength: float  # where it settled
    kept: float  # how much of the way from the old weights the last finish left: 1 where it had nothing to do
    by: str  # what the rise is told by

    def __str__(self) -> str:
        way = "" if self.kept == 1 else f", {100 * self.kept:.0f} % of the way kept"
        return f"{self.rise:.4f} of {self.budget:g} nats spent (by {self.by}), strength {self.strength:.3g}{way}"


@runtime_checkable
class Space(Protocol):
    """A term over what parameters make together, such as W + s·BA, for a memory of that."""

    @property
    def memory(self) -> Posterior | Memory:
        """What it holds to."""

    def way_back(self, model: nn.Module) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """The parameters that train, and where each goes back to."""

    def recalled(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> Callable[[Any], Any]:
        """The old function."""


@dataclass
class Budget:
    """The rise that is allowed, and the gauge that tells how much of it is spent."""

    limit: float
    memory: Posterior | Memory
    terms: Sequence[Term]
    forward: Callable[[nn.Module, Any], Any] | None = None
    space: Space | None = None  # where the memory is not of the parameters as they are
    spent: float = 0.0
    finished: Spent | None = None
    _looks: int = field(default=0, repr=False)
    _hopeless: int = field(default=0, repr=False)
    _gauge: Callable[[], float] | None = field(default=None, repr=False)
    _then: Callable[[Any], Any] | None = field(default=None, repr=False)
    _buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)  # those that the memory lacks

    def __post_init__(self) -> None:
        self.limit = require_number(self.limit, "a budget, in nats per old example,", positive=True)
        if self.limit < _SMALLEST:
            raise ArgumentError(f"a budget of {self.limit:g} nats is less than can be told: {_SMALLEST:g} or more.")
        if not self._by_probes and not sum(term.num_data for term in self.terms):
            raise ArgumentError(
                f"nothing tells what is spent of a budget: {missing(self.memory)}, and the posterior is a prior alone."
            )
        if not self._by_probes and not all(source.in_nats for source in as_posterior(self.memory).sources):
            raise ArgumentError(
                "a budget is in nats, and this precision is a sensitivity (MAS), which is not, and "
                f"{missing(self.memory)}. Keep probes and answers in the memory, or give a strength instead."
            )

    @property
    def by(self) -> str:
        """What the rise is told by."""
        return "probes" if self._by_probes else "what is held to, a local estimate"

    @property
    def _by_probes(self) -> bool:
        return not missing(self.memory)

    def caution(self, model: nn.Module) -> str:
        """Why the budget may be overspent all the same; nothing where probes tell."""
        if self._by_probes:
            return ""
        counted = [name for name, buffer in buffers(unwrapped(model)).items() if buffer.is_floating_point()]
        blind = f" It does not see {some(counted)} change." if counted else ""
        return (
            f"{missing(self.memory)}, so what is spent of this budget is told by the quadratic, a local estimate that "
            f"can be many times too small.{blind} Keep probes and answers while the old data is there: "
            "Memory.of(posterior, model, gaussian_probes(loader), kept_answers(model, loader, likelihood))."
        )

    def ready(self, model: nn.Module) -> Callable[[], float]:
        """The gauge; made before the first step, so that what does not fit is said then."""
        if self._gauge is None:
            self._require_covered(model)
            self._gauge = self._made(model, _DRAWS, 0)
            if self.space is not None:
                self._require_a_way_back(model, self._gauge)
        return self._gauge

    @torch.no_grad()
    def _require_a_way_back(self, model: nn.Module, gauge: Callable[[], float]) -> None:
        """Raise where the way back ends outside the budget: with an adapter that took its start out of W."""
        params, start = self._way_back(model)
        there = {name: value.detach().clone() for name, value in params.items()}
        _place(params, {name: placed(start[name], value) for name, value in there.items()}, there, 0.0)
        try:
            least = gauge()
        finally:
            _place(params, start, there, 1.0)
        if not least <= self.limit:
            raise ArgumentError(
                f"{least:.3g} nats are spent where the adapters do nothing, more than the budget of {self.limit:g}: "
                "they took their start out of the base weights (PiSSA, OLoRA), or these have moved. Start adapters at "
                "zero (init_lora_weights=True), or give a strength instead of a budget."
            )

    def _require_covered(self, model: nn.Module) -> None:
        """What the quadratic does not see move, it does not count."""
        if self._by_probes:
            return
        posterior = as_posterior(self.memory)
        if self.space is not None:
            seen = {id(parameter) for term in self.terms for parameter in term.held(model).values()}
        else:
            inside = matched(model, shapes(posterior.mean), ties=posterior.ties)
            seen = {id(parameter) for name, parameter in inside.items() if name in posterior.precision.shapes}
        named = told_apart(unwrapped(model)).items()
        blind = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in seen]
        if blind:
            raise ArgumentError(
                f"the quadratic says nothing of {some(blind)}, which trains: what is spent there would not be counted. "
                "Freeze it, or keep probes and answers in the memory."
            )

    def state_dict(self) -> dict[str, float]:
        """Where it stands."""
        return {"spent": self.spent, "looks": self._looks, "hopeless": self._hopeless}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from where one stood."""
        self.spent, self._looks, self._hopeless = state["spent"], int(state["looks"]), int(state["hopeless"])

    def turn(self, model: nn.Module, strength: float) -> float:
        """After a step: look at what is spent, every few of them, and say which strength to go on with."""
        self._looks += 1
        if self._looks % _EVERY:
            return strength
        self.spent = self._told(self.ready(model))
        over = math.log(max(self.spent, 1e-12) / self.limit)
        found = min(_MOST, max(_LEAST, strength * math.exp(_GAIN * min(1.0, max(-1.0, over)))))
        self._hopeless = self._hopeless + 1 if found == _MOST and self.spent > self.limit else 0
        if self._hopeless >= _PATIENCE:
            raise BudgetError(
                f"a budget of {self.limit:g} nats cannot be kept with any learning: at strength {_MOST:g}, "
                f"{self.spent:.3g} are spent. Allow more, take smaller steps, or train on old and new data together."
            )
        return found

    def _told(self, gauge: Callable[[], float]) -> float:
        found = gauge()
        if not math.isfinite(found):
            raise BudgetError(
                "what was spent is not a number any more: the model's weights or answers are not finite. A strong hold "
                "needs small steps of plain SGD; take a lower learning rate, or Adam."
            )
        return found

    @torch.no_grad()
    def finish(self, model: nn.Module, strength: float, stacklevel: int) -> Spent:
        """Go back toward the old weights, as far as it takes: θ ← μ + s (θ − μ), the largest s inside the budget."""
        gauge = self._made(model, _LAST_DRAWS, 1)  # other probes than those the strength was steered by
        params, start = self._way_back(model)
        known = {**self._buffers, **(self.memory.buffers if isinstance(self.memory, Memory) else {})}
        for name, buffer in buffers(unwrapped(model)).items():  # statistics go back with the weights
            if name in known and buffer.is_floating_point():
                params[f"buffer {name}"], start[f"buffer {name}"] = buffer, known[name]
        there = {name: value.detach().clone() for name, value in params.items()}
        start = {name: placed(start[name], value) for name, value in there.items()}
        last, self.spent, kept = self.finished, self._told(gauge), 1.0
        # What the last finish left is told by the same probes; weights that were loaded since have a way of their own.
        before = 1.0 if last is None or not math.isclose(self.spent, last.rise, rel_tol=1e-6) else last.kept
        if self.spent > self.limit:
            low, high = 0.0, 1.0
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                _place(params, start, there, middle)
                low, high = (middle, high) if self._told(gauge) <= self.limit else (low, middle)
            if low < _NOTHING:
                _place(params, start, there, 1.0)
                raise BudgetError(
                    f"a budget of {self.limit:g} nats would leave {100 * low:.1f} % of the way from the old weights: "
                    f"nothing is learned. The model is as it was trained, with {self.spent:.3g} nats spent. "
                    "Allow more, hold by answers (holdfast.distill), or train on old and new data together."
                )
            _place(params, start, there, low)
            self.spent, kept = self._told(gauge), low
            if low < _HALF:
                warnings.warn(
                    f"to stay within {self.limit:g} nats the model went back {100 * (1 - low):.0f} % of its way: look "
                    "whether it still knows the new task. More of it is learned with a larger budget, a hold by "
                    "answers (holdfast.distill), or more and smaller steps.", HoldfastWarning, stacklevel=stacklevel,
                )  # fmt: skip
        self.finished = Spent(self.limit, self.spent, strength, before * kept, self.by)
        return self.finished

    def _way_back(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What there is to move, and where to."""
        if self.space is not None:
            way = self.space.way_back(model)
            return {name: pair[0] for name, pair in way.items()}, {name: pair[1] for name, pair in way.items()}
        posterior = as_posterior(self.memory)
        params: dict[str, Tensor] = dict(matched(model, shapes(posterior.mean), ties=posterior.ties))
        return params, {name: posterior.mean[name] for name in params}

    def _old(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> Callable[[Any], Any]:
        """The old function: kept from the start where the memory lacks buffers, which nothing tells later."""
        if self._then is not None:
            return self._then
        kept = self.memory.buffers if isinstance(self.memory, Memory) else {}
        lost = {name: b.clone() for name, b in buffers(model).items() if name not in kept and b.is_floating_point()}
        if self.space is None:
            found = asking(Recalled(self.memory, model), model, forward)
        else:
            found = self.space.recalled(model, forward)
        if lost:
            self._then, self._buffers = found, lost
        return found

    def _made(self, model: nn.Module, draws: int, seed: int) -> Callable[[], float]:
        if not isinstance(self.memory, Memory) or not self._by_probes:
            # Each term is an estimate of the same rise: the largest, for a mean of them would hide it.
            counted = [term for term in self.terms if term.num_data]
            return lambda: max(number(term.value(model)) / term.num_data for term in counted)
        estimate, now = asked(unwrapped(model), self.memory, draws, seed, self.forward, self._old)

        def rise() -> float:
            found = estimate.rise(now())
            return max(found.by_outputs, found.by_probabilities) + found.error  # what another sample may give

        return rise


def _place(params: Mapping[str, Tensor], start: Mapping[str, Tensor], end: Mapping[str, Tensor], part: float) -> None:
    for name, parameter in params.items():
        parameter.copy_(end[name] if part == 1 else torch.lerp(start[name], end[name], part))
