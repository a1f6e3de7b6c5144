"""The machine that a run is made on: its devices by their names, what is set up at first use, and memory in use."""

from __future__ import annotations

import ctypes
import functools
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from ..curvature import diagonal_fisher
from ..errors import ArgumentError
from ..likelihood import categorical


def present(device: str) -> str:
    """A device of this machine by its name; "auto" is a GPU if there is one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda" if count else "cpu"
    if device == "cpu" or (count and device in ("cuda", *(f"cuda:{index}" for index in range(count)))):
        return device
    if device.partition(":")[0] == "cuda":
        there = f"has {count}, counted from 0" if count else "has no GPU that torch can use: take cpu"
        raise ArgumentError(f"there is no device {device!r}: this machine {there}.")
    raise ArgumentError(f"there is no device {device!r}: it is cpu, cuda, cuda:1 and so on, or auto.")


def usable(device: str | torch.device) -> str:
    """The same; and other kinds that torch knows as they are, for they need nothing of their own here."""
    device = str(device)
    try:
        other = torch.device(device).type not in ("cpu", "cuda")
    except RuntimeError:
        other = False
    return device if other else present(device)


@functools.cache
def warm(device: str) -> None:
    """Use once what libraries set up at their first use, which is no part of what the first run costs."""
    with torch.random.fork_rng([device] if device.startswith("cuda") else []):
        model, x, y = nn.Linear(4, 3).to(device), torch.randn(8, 4, device=device), torch.arange(8, device=device) % 3
        optimizer = torch.optim.Adam(model.parameters(), fused=device.startswith("cuda"))
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        diagonal_fisher(model, [(x, y)], categorical)


class Meter:
    """The seconds of a phase, and the most bytes in use: the GPU's, or the process's where the system tells."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds, self.most = 0.0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what is done within."""
        self._start()
        yield
        self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within what is counted: what is no part of it."""
        self._stop()
        try:
            yield
        finally:
            self._start()

    def _start(self) -> None:
        _reset_peak(self._device)
        self._since = time.perf_counter()

    def _stop(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._since
        self.most = max(self.most, _peak(self._device))


def in_use(device: str) -> int:
    """Bytes in use before a run, the data's among them: what it needs is counted from here."""
    on_gpu = device.startswith("cuda")
    gc.collect(2 if on_gpu else 1)  # all of what is left over would take as long as a small run does
    if on_gpu:
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()
    _give_back()
    return _told("RssAnon")


def _reset_peak(device: str) -> None:
    """From now on the most memory in use is counted anew."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return
    _give_back()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: str) -> int:
    """The most bytes in use since then: the GPU's, or the process's where the system tells."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return _told("VmHWM") - _told("RssFile") - _told("RssShmem")  # programs that were read in meanwhile are no data


def _told(what: str) -> int:
    """Bytes of this process, as the system tells them; 0 where it does not."""
    with suppress(OSError, ValueError, IndexError):
        return 1024 * int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0])
    return 0


def _give_back() -> None:
    """What is freed goes back to the system, where its C library can: else it would hide what comes next."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
