"""Which rows of tensors a fused kernel serves in one launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .codes import Codes
from .products import has_triton

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}  # the kernels compute in float32


def launches(*roles: Sequence[Tensor], entries: Sequence[Tensor | Codes]) -> list[list[int]] | None:
    """Rows that have entries, in lots of the same dtypes, role by role; those in codes have one factor as well.

    None where a kernel cannot serve every row: all tensors are contiguous, on one GPU, and in float32 at most.
    """
    first = roles[0][0]
    # A recorded step would find the addresses of its own tensors in memory that is someone else's by then.
    if not first.is_cuda or not has_triton() or torch.cuda.is_current_stream_capturing():
        return None
    lots: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row, (entry, *dense) in enumerate(zip(entries, *roles, strict=True)):
        coded = isinstance(entry, Codes)
        plain = dense if coded else [*dense, entry]
        stored = [*plain, entry.codes, entry.tops] if coded else plain
        if any(each.dtype not in _DTYPES for each in plain) or dense[0].numel() >= 2**31:
            return None
        if not all(each.is_contiguous() and each.device == first.device for each in stored):
            return None
        if dense[0].numel():
            lots[tuple(each.dtype for each in plain) + ((entry.factor,) if coded else ())].append(row)
    return list(lots.values())


def chosen(rows: Sequence[int], *roles: Sequence[Any]) -> list[list[Any]]:
    """These rows of each role."""
    return [[role[row] for row in rows] for role in roles]
