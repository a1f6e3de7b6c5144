"""Many tensors in one launch: blocks that know which tensor they belong to, and where in it they start."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

BLOCK = 4096
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@functools.lru_cache(maxsize=8)
def blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The size of every tensor; of every block, which tensor it belongs to, and where in it it starts."""
    counts = torch.tensor([(size + BLOCK - 1) // BLOCK for size in sizes])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = counts.cumsum(0) - counts
    starts = (torch.arange(len(owners)) - first[owners]) * BLOCK
    return torch.tensor(sizes, device=device), owners.to(device), starts.to(device)


def pointers(*roles: Sequence[Tensor]) -> Tensor:
    """The addresses of all tensors, role after role."""
    return _pointers(tuple(tensor.data_ptr() for role in roles for tensor in role), roles[0][0].device)


@functools.lru_cache(maxsize=16)
def _pointers(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64).to(device, non_blocking=True)
