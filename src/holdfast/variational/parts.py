"""Parameters that may be distributed over processes: what this one has of them, and which noise belongs to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..devices import full, part
from ..errors import ArgumentError
from ..identity import digest


def gradient(parameter: nn.Parameter) -> Tensor:
    """What this process holds of a gradient, laid out as the parameter is."""
    grad: Any = parameter.grad
    if grad is None:  # the loss does not depend on it
        return torch.zeros_like(part(parameter.data))
    if grad.is_sparse:
        raise ArgumentError("IVON needs dense gradients: make the embedding with sparse=False.")
    layout = getattr(parameter, "placements", None)
    if layout is not None and grad.placements != layout:
        grad = grad.redistribute(placements=layout)  # a sum over processes that is yet to be made
    return part(grad).contiguous()


def placed(value: Tensor, parameter: Any) -> Tensor:
    """A tensor where a parameter is: on its device, in its dtype, and parted among processes as it is."""
    found: Any = value.to(device=parameter.device, dtype=parameter.dtype).contiguous()
    if not hasattr(parameter, "placements"):
        found = full(found)
    elif hasattr(found, "placements"):
        found = found.redistribute(parameter.device_mesh, parameter.placements)
    else:
        from torch.distributed.tensor import distribute_tensor

        found = distribute_tensor(found, parameter.device_mesh, parameter.placements)
    settled: Tensor = found
    return settled


def bundled(params: Iterable[Any]) -> list[list[Any]]:
    """Parameters that one pass can serve: on one device, of one dtype, and the same part of the model."""
    found: dict[Any, list[Any]] = {}
    for parameter in params:
        found.setdefault((parameter.device, parameter.dtype, _place(parameter)), []).append(parameter)
    return list(found.values())


def seed_of(parameter: Any, seed: int, draw: int) -> int:
    """A seed for a draw of what this process has of a parameter: replicas share it, parts have their own."""
    return int(digest(f"{seed} {draw} {_place(parameter)}")[:8], 16) >> 1


def _place(parameter: Any) -> tuple[int, ...]:
    if not hasattr(parameter, "placements"):
        return ()
    pairs = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
    return tuple(at for at, placement in pairs if not placement.is_replicate())
