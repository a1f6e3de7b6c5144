"""What all that is attached to an optimizer needs: which optimizer's hooks run, and which step is the outermost."""

from __future__ import annotations

from types import FrameType

from torch.optim import Optimizer

from .errors import ArgumentError


def innermost(optimizer: Optimizer, what: str) -> Optimizer:
    """The optimizer inside a trainer's wrapper, which is the one whose hooks run; `what` needs it, for the error."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"{what} needs a torch.optim.Optimizer, or a list of them, got {type(optimizer).__name__}.")
    return optimizer


class UnderWay:
    """Steps that have begun, told by the frame that called the hook.

    A subclass of an optimizer that calls its parent's `step` fires the hooks of both: a step within a step. A frame is
    gone when a step was left by an error, so that the next one is not taken for a step within it.
    """

    def __init__(self) -> None:
        self._frames: dict[int, FrameType] = {}

    def begins(self, optimizer: Optimizer, caller: FrameType) -> bool:
        """Whether this is a step of its own, and not one within another."""
        outer, frame = self._frames.get(id(optimizer)), caller.f_back
        while outer is not None and frame is not None:
            if frame is outer:
                return False
            frame = frame.f_back
        self._frames[id(optimizer)] = caller
        return True

    def ends(self, optimizer: Optimizer, caller: FrameType) -> bool:
        """Whether the step that ends is the one that began."""
        if self._frames.get(id(optimizer)) is not caller:
            return False
        del self._frames[id(optimizer)]
        return True

    def clear(self) -> None:
        """Nothing is under way."""
        self._frames.clear()
