"""Many tensors in one launch: tiles that know which tensor they belong to, and where in it they start."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .codes import BLOCK

TILE = 16 * BLOCK  # entries


@functools.lru_cache(maxsize=64)
def tiles(sizes: tuple[int, ...], leads: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The size of every tensor; of every tile, which tensor it belongs to, and where in it it starts.

    A tensor's first tile starts `lead` entries before it.
    """
    counts = torch.tensor([-(-(size + lead) // TILE) for size, lead in zip(sizes, leads, strict=True)])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = counts.cumsum(0) - counts
    starts = (torch.arange(len(owners)) - first[owners]) * TILE - torch.tensor(leads)[owners]
    return torch.tensor(sizes, device=device), owners.to(device), starts.to(device)


@functools.lru_cache(maxsize=64)
def pointers(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses, where a kernel can read them. From pinned memory: else the copy may wait for all that runs before."""
    pinned = device.type == "cuda"
    return torch.tensor(addresses, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)
