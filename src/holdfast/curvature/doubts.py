"""Checks whose answers lie on a GPU: asked in time, and read when they are there anyway."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Error = Callable[[list[bool]], Exception]


class Doubts:
    """What must turn out true. On the CPU it is looked at immediately; on a GPU a batch later: nothing waits."""

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, Error]] = []
        self._asked: tuple[Tensor, torch.cuda.Event, list[tuple[int, Error]]] | None = None

    def unless(self, fine: Tensor, error: Error) -> None:
        """Raise, now or later, unless every one of `fine` is true; `error` is told which are."""
        if fine.is_cuda:
            self._open.append((fine.reshape(-1), error))
        elif not bool(fine.all()):
            raise error(fine.reshape(-1).tolist())

    def turn(self) -> None:
        """A batch is over: read the answers for the one before it, and have this one's sent."""
        self._read()
        if self._open:
            flags = torch.cat([fine.to(self._open[0][0].device) for fine, _ in self._open])
            answers = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            answers.copy_(flags, non_blocking=True)
            sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record(torch.cuda.current_stream(flags.device))
            self._asked = (answers, sent, [(len(fine), error) for fine, error in self._open])
            self._open = []

    def settle(self) -> None:
        """Wait for every answer, and raise the first error among them."""
        self.turn()
        self._read()

    def _read(self) -> None:
        if self._asked is None:
            return
        (answers, sent, asked), self._asked = self._asked, None
        sent.synchronize()
        found = answers.tolist()
        for count, error in asked:
            if not all(found[:count]):
                raise error(found[:count])
            found = found[count:]
