"""The shrinking step on a GPU: every parameter in one launch, read once and written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tensors import BLOCK, DTYPES, blocks, pointers


@triton.jit
def _kernel(pointers, sizes, owners, starts, scale, tensors, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    place = tl.load(starts + block) + tl.arange(0, BLOCK)
    inside = place < tl.load(sizes + owner)
    param_at = tl.load(pointers + owner).to(tl.pointer_type(DTYPE)) + place
    mean_at = tl.load(pointers + tensors + owner).to(tl.pointer_type(DTYPE)) + place
    entry_at = tl.load(pointers + 2 * tensors + owner).to(tl.pointer_type(DTYPE)) + place
    param = tl.load(param_at, mask=inside, other=0.0).to(tl.float32)
    delta = param - tl.load(mean_at, mask=inside, other=0.0).to(tl.float32)
    entry = scale * tl.load(entry_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(param_at, (param - delta * (entry / (1.0 + entry))).to(DTYPE), mask=inside)


def shrink(params: Sequence[Tensor], means: Sequence[Tensor], entries: Sequence[Tensor], scale: float) -> None:
    """params ← params − (params − means) · scale · entries / (1 + scale · entries)."""
    device = params[0].device
    sizes, owners, starts = blocks(tuple(param.numel() for param in params), device)
    with torch.cuda.device(device):
        _kernel[(len(owners),)](
            pointers(params, means, entries), sizes, owners, starts, scale, len(params),
            DTYPE=DTYPES[params[0].dtype], BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
