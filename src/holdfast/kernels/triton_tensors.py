"""Many tensors in one launch: tiles that know which tensor they belong to, and where in it they start."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .codes import BLOCK

TILE = 16 * BLOCK  # entries


@functools.lru_cache(maxsize=1024)
def tiles(sizes: tuple[int, ...], leads: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The size of every tensor; of every tile, which tensor it belongs to, and where in it it starts.

    A tensor's first tile starts `lead` entries before it.
    """
    counts = torch.tensor([-(-(size + lead) // TILE) for size, lead in zip(sizes, leads, strict=True)])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = counts.cumsum(0) - counts
    starts = (torch.arange(len(owners)) - first[owners]) * TILE - torch.tensor(leads)[owners]
    return torch.tensor(sizes, device=device), owners.to(device), starts.to(device)


def pointers(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses, where a kernel can read them: one that runs after what is asked of this stream now."""
    return _pointers(addresses, device, torch.cuda.current_stream(device) if device.type == "cuda" else None)


@functools.lru_cache(maxsize=1024)
def _pointers(addresses: tuple[int, ...], device: torch.device, stream: torch.cuda.Stream | None) -> Tensor:
    # From pinned memory: else the copy may wait for all that runs before.
    pinned = stream is not None
    return torch.tensor(addresses, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)
