"""What all that is attached to an optimizer needs: whose hooks run, which step is outermost, who steps beside it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any
from weakref import ReferenceType, WeakSet, finalize, ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .errors import ArgumentError, InertError

_held: WeakSet[Optimizer] = WeakSet()


def innermost(optimizer: Optimizer, what: str) -> Optimizer:
    """The optimizer inside a trainer's wrapper, which is the one whose hooks run; `what` needs it, for the error."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    kind = type(optimizer).__name__
    inside = [name for name, value in getattr(optimizer, "__dict__", {}).items() if isinstance(value, Optimizer)]
    cure = f" There is one inside: give {what} its `.{inside[0]}`." if inside else ""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"{what} needs a torch.optim.Optimizer, or a list of them, got {kind}.{cure}")
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        raise ArgumentError(
            f"{what} works in the hooks of an optimizer's step, and {kind} has none: it does not call "
            f"Optimizer.__init__.{cure}"
        )
    return optimizer


class UnderWay:
    """Steps that have begun, told by the frame that called the hook.

    A subclass of an optimizer that calls its parent's `step` fires the hooks of both: a step within a step. A frame is
    gone when a step was left by an error, so that the next one is not taken for a step within it.
    """

    def __init__(self) -> None:
        self._frames: dict[int, FrameType] = {}
        self.begun = 0  # how many steps there were so far

    def begins(self, optimizer: Optimizer, caller: FrameType) -> bool:
        """Whether this is a step of its own, and not one within another."""
        caller = _stepping(caller)
        outer = self._frames.get(id(optimizer))
        if outer is not None and _is_within(caller.f_back, [outer]):
            return False
        self._frames[id(optimizer)] = caller
        self.begun += 1
        return True

    def ends(self, optimizer: Optimizer, caller: FrameType) -> bool:
        """Whether the step that ends is the one that began."""
        if self._frames.get(id(optimizer)) is not _stepping(caller):
            return False
        del self._frames[id(optimizer)]
        return True

    def surrounds(self, caller: FrameType) -> bool:
        """Whether this is called from within a step that has begun."""
        return _is_within(caller, list(self._frames.values()))

    def clear(self) -> None:
        """Nothing is under way."""
        self._frames.clear()


class Strays:
    """Optimizers that train held parameters and are not held: a copy, which loses its hooks, or one made since.

    Torch tells of the steps of all optimizers. One within a held step, or around it, is a part of it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], under_way: UnderWay) -> None:
        self._optimizers, self._under_way = optimizers, under_way
        self._begun: dict[int, int] = {}
        self._trained: dict[int, tuple[ReferenceType[Tensor], str]] = {}
        me = ref(self)  # torch keeps these hooks for good, and must not keep the model
        self._hooks = [
            register_optimizer_step_pre_hook(uncompiled(partial(_told, me, Strays._before))),
            register_optimizer_step_post_hook(uncompiled(partial(_told, me, Strays._after))),
        ]
        for hook in self._hooks:
            finalize(self, hook.remove).atexit = False
        for optimizer in optimizers:
            _held.add(optimizer)
            vars(optimizer)["__deepcopy__"] = partial(_copied, optimizer, me)

    def end(self) -> None:
        """Look no more, and let copies step."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._optimizers if self._hooks else ():
            _held.discard(optimizer)
            vars(optimizer).pop("__deepcopy__", None)
        self._hooks.clear()

    @property
    def looking(self) -> bool:
        """Whether what they were looked for is still held."""
        return bool(self._hooks)

    def require_none(self, held: Mapping[str, Tensor]) -> None:
        """Raise where one of them has trained a parameter that is held."""
        for name, parameter in held.items() if self._trained else ():
            known, kind = self._trained.get(id(parameter), (None, ""))
            if known is not None and known() is parameter:
                raise InertError(
                    f"{kind} made a step on `{name}`, and the hold is on another optimizer: the penalty did nothing "
                    "there. A copy of an optimizer loses the hold, and one made since has none. Give hold the "
                    "optimizer that trains, or let go first: remove()."
                )

    def _before(self, optimizer: Optimizer) -> None:
        inside = self._under_way.surrounds(sys._getframe())
        if optimizer not in _held and not inside:
            self._begun[id(optimizer)] = self._under_way.begun
        elif inside and optimizer in _held and not any(optimizer is each for each in self._optimizers):
            ours = {id(p) for each in self._optimizers for group in each.param_groups for p in group["params"]}
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                raise ArgumentError(
                    f"{type(optimizer).__name__} is held, and steps inside another optimizer that is held too: both "
                    "penalties would act. Hold one of the two."
                )

    def _after(self, optimizer: Optimizer) -> None:
        if self._begun.pop(id(optimizer), None) == self._under_way.begun:
            # A learning rate of zero moves nothing. One on a device is not waited for.
            groups = [g for g in optimizer.param_groups if isinstance(g.get("lr"), Tensor) or g.get("lr", 1.0) != 0]
            for parameter in (p for group in groups for p in group["params"]):
                if parameter.requires_grad and parameter.grad is not None:
                    self._trained[id(parameter)] = ref(parameter), type(optimizer).__name__


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that torch.compile leaves alone where it compiles a step: it would compile it anew for every strength."""
    found: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return found


def _told(
    me: ReferenceType[Strays], what: Callable[[Strays, Optimizer], None], optimizer: Optimizer, args: Any, kwargs: Any
) -> None:
    strays = me()
    if strays is not None:
        what(strays, optimizer)


def _copied(optimizer: Optimizer, me: ReferenceType[Strays], memo: dict[int, Any]) -> Optimizer:
    """A deep copy of an optimizer that is held. It may be kept, and is not stepped with while the first is held."""
    own = vars(optimizer).pop("__deepcopy__")
    try:
        twin = copy.deepcopy(optimizer, memo)
    finally:
        vars(optimizer)["__deepcopy__"] = own
    twin.register_step_pre_hook(partial(_refused, me))
    vars(twin)["__deepcopy__"] = partial(_copied, twin, me)
    return twin


def _refused(me: ReferenceType[Strays], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    strays = me()
    if strays is not None and strays.looking and optimizer not in _held:
        raise InertError(
            f"this {type(optimizer).__name__} is a copy of one that is held, and a copy loses the hold: its steps "
            "would be free. Hold the copy too, with its model, or let go of the first: remove()."
        )


def _stepping(frame: FrameType) -> FrameType:
    """The frame of torch's that runs the hooks of a step: a hook that is not compiled has another one around it."""
    found: FrameType | None = frame
    while found is not None and found.f_globals.get("__name__") != "torch.optim.optimizer":
        found = found.f_back
    return found or frame


def _is_within(frame: FrameType | None, outer: list[FrameType]) -> bool:
    while outer and frame is not None:
        if any(frame is each for each in outer):
            return True
        frame = frame.f_back
    return False
