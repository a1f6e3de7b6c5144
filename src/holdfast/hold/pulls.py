"""What is done around each step of the optimizers: the pull, in the gradients or as a step of its own after them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, HoldfastError
from ..penalty import Drawn, Quadratic, Term
from ..pieces import resharded
from ..steps import Strays, UnderWay, uncompiled
from .guard import Watch, parameters, require_reach
from .proximal import Proximal
from .rotation import Rotation

_LARGEST = torch.finfo(torch.float32).max


class Pulls:
    """Hooks on the steps of optimizers. `held` is what they last found to hold, `made` how many steps each has made."""

    def __init__(
        self,
        optimizers: list[Optimizer],
        model: nn.Module,
        terms: Sequence[Term],
        num_data: float,
        strength: float,
        rotation: Rotation | None,
        proximal: Proximal | None,
        ended: Callable[[], None],
    ) -> None:
        self._optimizers, self._model, self._terms = optimizers, model, terms
        self.num_data, self.strength = num_data, strength
        self._rotation, self.proximal = rotation, proximal
        self._ended = ended  # called after each step
        self._drawn = [term for term in terms if isinstance(term, Drawn)]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._under_way = UnderWay()
        self._strays: Strays | None = None
        self._own_steps: dict[int, bool] = {}  # whether the step that is under way has a pull of its own after it
        self._watches = {id(optimizer): Watch(optimizer) for optimizer in optimizers}
        self.made = {id(optimizer): 0 for optimizer in optimizers}
        self.held = self.found()

    @property
    def attached(self) -> bool:
        """Whether steps are held now."""
        return bool(self._hooks)

    def attach(self) -> None:
        """Begin. Steps of other optimizers on what is held are looked out for."""
        if self.held:
            self._strays = Strays(self._optimizers, self._under_way)
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(uncompiled(self._before)))
            self._hooks.append(optimizer.register_step_post_hook(uncompiled(self._after)))

    def detach(self) -> None:
        """Let go."""
        for hook in self._hooks:
            hook.remove()
        if self._strays is not None:
            self._strays.end()
        self._hooks.clear()
        self._under_way.clear()
        if self._rotation is not None:
            self._rotation.end()
        for term in self._terms:
            if isinstance(term, Quadratic) and term.brought is not None:
                term.brought.free()
        self._ended = _nothing  # whoever wanted to hear of steps is free to go, and with them what they hold

    def require_no_strays(self) -> None:
        """Raise where another optimizer has trained what was held when they last looked, or is now."""
        if self._strays is not None:
            self._strays.require_none(self.held)
            now = self.held
            with contextlib.suppress(HoldfastError):  # whoever has changed the model since is done with it
                now = self.found()
            self._strays.require_none(now)

    def found(self) -> dict[str, nn.Parameter]:
        """The parameters that there are to hold, as the model is now."""
        resharded(self._model)  # an evaluation between a backward pass and the step has made it whole
        self._by_term = [term.held(self._model) for term in self._terms]
        return {name: parameter for mine in self._by_term for name, parameter in mine.items()}

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._under_way.begins(optimizer, sys._getframe(1)):
            return None
        self.made[id(optimizer)] += 1
        if not self.held:
            return None
        if self._rotation is not None:
            self._rotation.start()
        for term in self._drawn:
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
            if not isinstance(loss, (Tensor, Real)):  # no loss: of an optimizer that does not look at it
                return loss
            return loss + (added.to(loss) if isinstance(loss, Tensor) else float(added))

        return held

    def _add_gradient(self, optimizer: Optimizer, *, value: bool = True) -> Tensor:
        """Add strength/N · ∇penalty to the gradients this optimizer will use; returns what that adds to the loss.

        Where that is not asked for (`value`), a quadratic need not compute it.
        """
        self.held = self.found()
        require_reach(self.held, self._optimizers, self._model)
        if self._strays is not None:
            self._strays.require_none(self.held)
        # Where the optimizer climbs, the penalty is what is taken off the objective.
        sign = -1.0 if _climbs(optimizer) else 1.0
        scale = sign * self.strength / self.num_data
        # A fused optimizer divides by the scaler's factor inside its kernel: the pull must be scaled up alike.
        loss_scale = getattr(optimizer, "grad_scale", None)
        ours = {id(parameter) for parameter in parameters(optimizer) if parameter.requires_grad}
        factor = scale if loss_scale is None else scale * loss_scale
        own = self.proximal is not None and self.proximal.fits(optimizer, self._model)
        self._own_steps[id(optimizer)] = own
        if abs(scale) > _LARGEST and not (own and all(isinstance(term, Quadratic) for term in self._terms)):
            raise ArgumentError(
                f"strength / num_data is {abs(scale):g}, which no float32 is: a gradient cannot have it. Take a lower "
                "strength; or, for a posterior alone, proximal=True, which stands any."
            )
        watch = self._watches[id(optimizer)]
        nats = torch.zeros(())
        for quadratic in (each for each in self._terms if own and value and isinstance(each, Quadratic)):
            nats = nats + quadratic.value(self._model)
        value = value or not watch.satisfied
        for term, mine in zip(self._terms, self._by_term, strict=True):
            if not isinstance(term, Quadratic):
                nats = nats + term.add_gradient_(self._model, factor, ours)
            elif not own:
                nats = nats + term.add_gradient_(self._model, factor, ours, value=value, held=mine)
        if not watch.satisfied and scale != 0 and bool(nats > 0):
            watch.before(self.held, ours)
        if self._rotation is not None:
            self._rotation.before(optimizer, self.held, ours)
        return scale * nats

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._under_way.ends(optimizer, sys._getframe(1)):
            if self._rotation is not None:
                self._rotation.after(self.held)
            if self.proximal is not None and self.held and self._own_steps.get(id(optimizer)):
                ours = {id(parameter) for parameter in parameters(optimizer) if parameter.requires_grad}
                self.proximal.after(optimizer, self._model, self.strength / self.num_data, ours)
            self._watches[id(optimizer)].after(optimizer)
            self._ended()


def _nothing() -> None:
    pass


def _climbs(optimizer: Optimizer) -> bool:
    """Whether the optimizer maximizes its objective."""
    ways = {bool(group.get("maximize", False)) for group in optimizer.param_groups}
    if len(ways) > 1:
        raise ArgumentError("some parameter groups of the optimizer maximize and others minimize: hold needs one way.")
    return True in ways
