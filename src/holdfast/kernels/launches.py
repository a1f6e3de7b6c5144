"""Which rows of tensors a fused kernel serves in one launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .codes import Codes
from .products import has_triton

_PLAIN = (Tensor, torch.nn.Parameter)
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}  # the kernels compute in float32


def launches(*roles: Sequence[Tensor], entries: Sequence[Tensor | Codes]) -> list[list[int]] | None:
    """Rows that have entries, in lots of the same dtypes, role by role; those in codes have one factor as well.

    None where a kernel cannot serve every row: of plain tensors, contiguous, on one GPU, in float32 at most.
    """
    device = roles[0][0].device
    # A recorded step would find the addresses of its own tensors in memory that is someone else's by then.
    if device.type != "cuda" or not has_triton() or torch.cuda.is_current_stream_capturing():
        return None
    lots: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row, (entry, *tensors) in enumerate(zip(entries, *roles, strict=True)):
        factor: tuple[float, ...] = ()
        if isinstance(entry, Codes):
            stored, factor = [entry.codes, entry.tops], (entry.factor,)
        else:
            tensors.append(entry)
            stored = []
        kinds = tuple([each.dtype for each in tensors])
        if not _DTYPES.issuperset(kinds) or tensors[0].numel() >= 2**31:
            return None
        for each in (*tensors, *stored):
            if type(each) not in _PLAIN or not each.is_contiguous() or each.device != device:
                return None
        if tensors[0].numel():
            lots[kinds + factor].append(row)
    return list(lots.values())


def chosen(rows: Sequence[int], *roles: Sequence[Any]) -> list[list[Any]]:
    """These rows of each role."""
    return [[role[row] for row in rows] for role in roles]
