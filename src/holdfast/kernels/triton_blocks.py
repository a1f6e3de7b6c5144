"""Sums of exponentials over blocks of a row, on a GPU: what is read once is not written again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(logits, sums, highest, classes, blocks, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + place, mask=place < classes, other=-float("inf")).to(tl.float32)
    top = tl.max(values)
    # Of a block without a possible class the sum is zero, and no difference of infinities.
    total = tl.sum(tl.exp(values - tl.where(top == -float("inf"), 0.0, top)))
    tl.store(sums + row * blocks + block, total)
    tl.store(highest + row * blocks + block, top)


def exponential_sums(logits: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Σ exp(logits − highest) over blocks of a power of 2, (rows, blocks), and the highest of each row, (rows, 1)."""
    rows, classes = logits.shape
    blocks = triton.cdiv(classes, block)
    sums, tops = (torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(2))
    with torch.cuda.device(logits.device):
        _kernel[(rows, blocks)](logits, sums, tops, classes, blocks, logits.stride(0), BLOCK=block)
    highest = tops.amax(-1, keepdim=True)
    return sums * (tops - highest).exp(), highest
