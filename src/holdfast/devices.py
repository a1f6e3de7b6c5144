"""Where tensors are: on which device, and on which of several processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device. From pinned memory: a copy from any other waits for all that a GPU has yet to do."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetched(labels: Any) -> Callable[[], Any]:
    """Integers from a GPU, asked for now: to read them waits for what it was to do by now, and for nothing after."""
    if not isinstance(labels, Tensor) or not labels.is_cuda or labels.is_floating_point() or labels.is_complex():
        return lambda: labels
    copy = torch.empty(labels.shape, dtype=labels.dtype, pin_memory=True)
    copy.copy_(labels, non_blocking=True)
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record(torch.cuda.current_stream(labels.device))

    def read() -> Tensor:
        there.synchronize()
        return copy

    return read


def full(tensor: Any) -> Any:
    """A tensor that is distributed over processes, gathered on each of them; anything else as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Let matrix products of float32 on a GPU round their factors to ten bits (TF32), several times as fast."""
    if not torch.cuda.is_available():
        yield
        return
    settings, name = torch.backends.cuda.matmul, "allow_tf32"
    fast: object = True
    if hasattr(settings, "fp32_precision"):
        name, fast = "fp32_precision", "tf32"
    before = getattr(settings, name)
    setattr(settings, name, fast)
    try:
        yield
    finally:
        setattr(settings, name, before)
