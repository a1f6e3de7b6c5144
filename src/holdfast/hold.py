"""The attachment to an optimizer: every step feels the data's gradient and the pull of what was known."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ArgumentError, HoldfastWarning, InertError, MismatchError, require_number
from .params import all_parameters
from .penalty import Quadratic, Term
from .posterior import Memory, Posterior, as_posterior
from .posterior.product import require_counted_once
from .precision import Precision

# How many steps may leave every pulled parameter unchanged (tiny steps can round to nothing) before it is an error.
_PATIENCE = 3

Held = Posterior | Memory | Term

_held_by: WeakKeyDictionary[Optimizer, Handle] = WeakKeyDictionary()


def hold(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    posterior: Held | Sequence[Held],
    *,
    num_data: float,
    strength: float = 1.0,
    unit: str = "example",
) -> Handle:
    """Hold `model` to `posterior` while `optimizer` trains it, in any loop: nll.mean() + strength · penalty / num_data.

    `num_data` is the number of new examples, `len(loader.dataset)` and not `len(loader)`, or of tokens with
    `unit="token"` if that is what the posterior counts. At strength 1 an old example counts as much as a new one. The
    gradient enters at the optimizer's step, after accumulation and clipping. Several optimizers, and several
    posteriors or terms, are given as lists. Use it as a context manager, or keep the handle and call `remove()`.

        with holdfast.hold(optimizer, model, posterior, num_data=len(dataset)):
            train(model, optimizer, loader)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"hold takes the optimizer, then the model; got {type(model).__name__} as the model.")
    count = require_number(num_data, "num_data, the number of new examples (len(loader.dataset)),", positive=True)
    terms = [_as_term(each, model) for each in (posterior if isinstance(posterior, Sequence) else [posterior])]
    for term in terms:
        if term.unit and term.unit != unit:
            raise MismatchError(
                f"this memory counts in units of {term.unit!r}, and num_data={count:g} is said to count in "
                f"{unit!r}. Give the number of {term.unit}s in the new data, and unit={term.unit!r}."
            )
    require_counted_once([term.posterior for term in terms if isinstance(term, Quadratic)])
    optimizers = [_innermost(each) for each in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    if not optimizers or not terms:
        raise ArgumentError("hold needs at least one optimizer and one posterior.")
    handle = Handle(optimizers, model, terms, count, strength)
    handle._attach()
    return handle


class Handle:
    """A model being held. `strength` may be changed while training; `remove()` lets go."""

    def __init__(
        self, optimizers: list[Optimizer], model: nn.Module, terms: list[Term], num_data: float, strength: float
    ) -> None:
        self._optimizers = optimizers
        self._model = model
        self._terms = terms
        self._num_data = num_data
        self._strength = require_number(strength, "strength")
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._steps = 0
        self._held = self._lookup()
        self._watched: list[tuple[str, nn.Parameter, int, Tensor]] = []
        self._unfelt: int | None = 0  # steps that pulled at parameters and moved none; None once one moved

    @property
    def strength(self) -> float:
        """How much an old example counts against a new one."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        self._strength = require_number(value, "strength")

    @property
    def penalty(self) -> float:
        """What the terms sum to now, in nats, before the strength: ½ (θ−μ)ᵀΛ(θ−μ) for a posterior."""
        return sum(float(term.value(self._model)) for term in self._terms) if self._held else 0.0

    @property
    def steps(self) -> int:
        """How many optimizer steps were held."""
        return self._steps

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger. `rise` is the quadratic's estimate of nats lost per old example."""
        value = self.penalty
        old = sum(term.num_data for term in self._terms)
        return {
            "holdfast/penalty": value,
            "holdfast/loss": self.strength * value / self._num_data,
            "holdfast/rise": value / old if old else 0.0,
            "holdfast/strength": self.strength,
            "holdfast/steps": float(self._steps),
            "holdfast/held_parameters": float(sum(p.numel() for p in self._held.values())),
        }

    def remove(self) -> None:
        """Let go. Raises if there was something to hold and no step ever felt it."""
        attached = bool(self._hooks)
        self._detach()
        if attached and self._held and not self._steps:
            raise InertError(
                "the optimizer never made a step while it was held, so the penalty did nothing. Was the model trained "
                "with another optimizer (a copy loses its hooks), or was the loop empty?"
            )

    def __enter__(self) -> Handle:
        if not self._hooks:
            raise InertError("this hold was removed and would do nothing. Call holdfast.hold again.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._detach()  # the first error is the one to see
        else:
            self.remove()

    def _attach(self) -> None:
        for optimizer in self._optimizers:
            if optimizer in _held_by:
                raise ArgumentError(
                    "this optimizer is already held, and both penalties would act. Call remove() on the first handle "
                    "(or leave its `with` block); to hold to several posteriors, give hold a list of them."
                )
        self._require_reach()
        self._warn_of_weight_decay()
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before))
            self._hooks.append(optimizer.register_step_post_hook(self._after))
            _held_by[optimizer] = self

    def _lookup(self) -> dict[str, nn.Parameter]:
        return {name: parameter for term in self._terms for name, parameter in term.held(self._model).items()}

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for optimizer in self._optimizers:
            if _held_by.get(optimizer) is self:
                del _held_by[optimizer]

    def _require_reach(self) -> None:
        """Every held parameter that trains must be in a held optimizer."""
        if not self._held:
            return
        live = {name: p for name, p in self._held.items() if p.requires_grad}
        if not live:
            raise InertError(
                "every held parameter is frozen, so there is nothing to hold. Unfreeze them, or do not hold."
            )
        owned = Counter(id(p) for optimizer in self._optimizers for p in _parameters(optimizer))
        twice = [name for name, p in live.items() if owned[id(p)] > 1]
        if twice:
            raise ArgumentError(f"`{twice[0]}` is in two of the optimizers given to hold, and would be pulled twice.")
        reached = set(owned)
        missed = [name for name, p in live.items() if id(p) not in reached]
        if missed:
            known = {id(p) for p in all_parameters(self._model).values()}
            foreign = not (reached & known)
            cause = (
                "It holds none of the model's: was it made for a copy of the model, or before the model was replaced?"
                if foreign
                else "Give hold all the optimizers that train the model, as a list, or freeze what does not train."
            )
            raise InertError(
                f"`{missed[0]}` is held, but no optimizer given to hold has it ({len(missed)} such parameters). {cause}"
            )

    def _warn_of_weight_decay(self) -> None:
        ids = {id(p) for p in self._held.values()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                decay = group.get("weight_decay", 0.0)
                count = sum(id(p) in ids for p in group["params"])
                if decay and count:
                    warnings.warn(
                        f"weight decay {decay} acts on {count} held parameters: a second prior, which pulls them to "
                        "zero and away from what was learned. Set weight_decay=0 while holding.",
                        HoldfastWarning,
                        stacklevel=4,
                    )

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._steps += 1
        if not self._held:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._add_gradient(optimizer)
            return None
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

    def _add_gradient(self, optimizer: Optimizer) -> Tensor:
        """Add strength/N · ∇penalty to the gradients this optimizer will use; returns what that adds to the loss."""
        self._held = self._lookup()
        self._require_reach()
        # Where the optimizer climbs, the penalty is what is taken off the objective.
        sign = -1.0 if _climbs(optimizer) else 1.0
        scale = sign * self.strength / self._num_data
        # A fused optimizer divides by the scaler's factor inside its kernel: the pull must be scaled up alike.
        loss_scale = getattr(optimizer, "grad_scale", None)
        ours = {id(p) for p in _parameters(optimizer) if p.requires_grad}
        factor = scale if loss_scale is None else scale * loss_scale
        value: Tensor = sum(term.add_gradient_(self._model, factor, ours) for term in self._terms)  # type: ignore[assignment]
        if self._unfelt is not None and not self._watched and bool(value > 0) and scale != 0:
            self._watch(ours)
        return scale * value

    def _watch(self, ours: set[int]) -> None:
        """Remember the held parameters that are about to be updated, until one is seen to be."""
        self._watched = [
            (name, p, p._version, p.detach().flatten()[:4096].clone())
            for name, p in self._held.items()
            if id(p) in ours and p.grad is not None and bool(p.grad.any())
        ]

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check, once, that a step with a pull moved what it pulled at."""
        skipped = getattr(optimizer, "found_inf", None)
        idle = all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups)
        if not self._watched or idle or (skipped is not None and bool(skipped)):
            self._watched = []
            return
        moved = any(
            p._version != version or not torch.equal(p.detach().flatten()[:4096], before)
            for _, p, version, before in self._watched
        )
        name = self._watched[0][0]
        self._watched = []
        self._unfelt = None if moved else (self._unfelt or 0) + 1
        if self._unfelt is not None and self._unfelt >= _PATIENCE:
            raise InertError(
                f"{_PATIENCE} steps of {type(optimizer).__name__} left `{name}` and every other held parameter as it "
                "was though they had gradients, so the penalty does nothing. Does it keep its own copy of the weights? "
                "Hold the optimizer that updates the model's parameters."
            )


def _as_term(held: Held, model: nn.Module) -> Term:
    """The term for a posterior, on the model's device if it has one device; terms as they are."""
    if not isinstance(held, (Posterior, Memory)):
        if not hasattr(held, "add_gradient_"):
            cure = (
                " Make a posterior of it: consolidate(prior(model), model, fisher)."
                if isinstance(held, Precision)
                else " Read it from its file: holdfast.load(path)."
                if isinstance(held, (str, PathLike))
                else ""
            )
            raise ArgumentError(f"a Posterior, a Memory or a term is needed, got {type(held).__name__}.{cure}")
        return held
    devices = {parameter.device for parameter in model.parameters()}
    posterior = as_posterior(held)
    return Quadratic(posterior.to(devices.pop()) if len(devices) == 1 else posterior)


def _climbs(optimizer: Optimizer) -> bool:
    """Whether the optimizer maximizes its objective."""
    ways = {bool(group.get("maximize", False)) for group in optimizer.param_groups}
    if len(ways) > 1:
        raise ArgumentError("some parameter groups of the optimizer maximize and others minimize: hold needs one way.")
    return ways.pop()


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a trainer's wrapper, which is the one whose hooks run."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ArgumentError("SparseAdam takes sparse gradients alone, and a hold pulls at every entry. Use Adam.")
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"hold needs a torch.optim.Optimizer (or a list of them), got {type(optimizer).__name__}.")
    return optimizer


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
