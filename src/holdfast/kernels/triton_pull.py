"""The pull on a GPU: every parameter in one launch, every number read once and every gradient written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tensors import BLOCK, DTYPES, blocks, pointers


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
    sizes, owners, starts = blocks(tuple(grad.numel() for grad in grads), device)
    table = pointers(grads, params, means, entries)
    partial = torch.empty(len(owners), dtype=torch.float32, device=device)
    scaled = isinstance(scale, Tensor)
    with torch.cuda.device(device):
        _kernel[(len(owners),)](
            table, sizes, owners, starts, partial, scale if scaled else partial, 1.0 if scaled else scale,
            len(grads), DTYPE=DTYPES[grads[0].dtype], SCALED=scaled, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return partial.sum()
