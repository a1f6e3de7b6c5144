"""The pull on a GPU: every parameter in one launch, every number read once and every gradient written once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _kernel(
    pointers, sizes, owners, starts, partial, factor, scale, tensors,
    DTYPE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    place = tl.load(starts + block) + tl.arange(0, BLOCK)
    inside = place < tl.load(sizes + owner)
    grad_at = tl.load(pointers + owner).to(tl.pointer_type(DTYPE)) + place
    param_at = tl.load(pointers + tensors + owner).to(tl.pointer_type(DTYPE)) + place
    mean_at = tl.load(pointers + 2 * tensors + owner).to(tl.pointer_type(DTYPE)) + place
    entry_at = tl.load(pointers + 3 * tensors + owner).to(tl.pointer_type(DTYPE)) + place
    delta = tl.load(param_at, mask=inside, other=0.0).to(tl.float32)
    delta -= tl.load(mean_at, mask=inside, other=0.0).to(tl.float32)
    pull = delta * tl.load(entry_at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        scale = scale * tl.load(factor).to(tl.float32)
    tl.store(grad_at, (grad + scale * pull).to(DTYPE), mask=inside)
    tl.store(partial + block, tl.sum(0.5 * delta * pull))


def pull(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    means: Sequence[Tensor],
    entries: Sequence[Tensor],
    scale: float | Tensor,
) -> Tensor:
    """Add scale · entries ∘ (params − means) to the gradients; returns ½ Σ entries (params − means)²."""
    device = grads[0].device
    sizes, owners, starts = _blocks(tuple(grad.numel() for grad in grads), device)
    pointers = _pointers(tuple(t.data_ptr() for role in (grads, params, means, entries) for t in role), device)
    partial = torch.empty(len(owners), dtype=torch.float32, device=device)
    scaled = isinstance(scale, Tensor)
    with torch.cuda.device(device):
        _kernel[(len(owners),)](
            pointers, sizes, owners, starts, partial, scale if scaled else partial, 1.0 if scaled else scale,
            len(grads), DTYPE=_DTYPES[grads[0].dtype], SCALED=scaled, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return partial.sum()


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@functools.lru_cache(maxsize=8)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Which tensor each block belongs to, and where in it it starts."""
    counts = torch.tensor([(size + _BLOCK - 1) // _BLOCK for size in sizes])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = counts.cumsum(0) - counts
    starts = (torch.arange(len(owners)) - first[owners]) * _BLOCK
    return torch.tensor(sizes, device=device), owners.to(device), starts.to(device)


@functools.lru_cache(maxsize=8)
def _pointers(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64).to(device, non_blocking=True)
