"""Σ exp(logits) over blocks of classes, which is most of drawing one from a large vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .compiled import has_triton

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the kernel adds in float32


def sums_in_one_pass(logits: Tensor) -> bool:
    """Whether logits are read once, and nothing of their size is written."""
    return logits.is_cuda and logits.dtype in _DTYPES and logits.stride(-1) == 1 and has_triton(logits.device)


def block_sums(logits: Tensor, block: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """For rows of logits: in proportion to probabilities, their sums over blocks, (rows, blocks), and each at places.

    Places are (rows, any number). Numbers of one row are in one proportion; rows may differ.
    """
    if not sums_in_one_pass(logits):
        return plain_block_sums(logits, block)
    from .triton_blocks import exponential_sums

    sums, highest = exponential_sums(logits, block)
    return sums, lambda places: (logits.gather(1, places).float() - highest).exp()


def plain_block_sums(logits: Tensor, block: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The same by the probabilities themselves."""
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    whole = p.shape[-1] // block * block
    sums = p[:, :whole].view(len(p), -1, block).sum(-1)
    if whole < p.shape[-1]:
        sums = torch.cat([sums, p[:, whole:].sum(-1, keepdim=True)], 1)
    return sums, lambda places: p.gather(1, places)
