"""Checks whose answers lie on a GPU: asked in time, read where the program waits for the GPU anyway."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Doubts:
    """What must turn out true. On the CPU it is looked at immediately; elsewhere when `settle` is called."""

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, Callable[[list[bool]], Exception]]] = []

    def unless(self, fine: Tensor, error: Callable[[list[bool]], Exception]) -> None:
        """Raise, now or later, unless every one of `fine` is true; `error` is told which are."""
        self._open.append((fine.reshape(-1), error))
        if not fine.is_cuda:
            self.settle()

    def settle(self) -> None:
        """Raise the first error among the doubts that are open."""
        doubts, self._open = self._open, []
        if not doubts:
            return
        answers = torch.cat([fine.to("cpu", non_blocking=False) for fine, _ in doubts]).tolist()
        start = 0
        for fine, error in doubts:
            found = answers[start : start + len(fine)]
            start += len(fine)
            if not all(found):
                raise error(found)
