"""Parameters that may be distributed over processes: what this one has of them, and which noise belongs to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..identity import digest


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
