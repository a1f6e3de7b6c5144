"""Which rows of tensors a fused kernel serves in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .codes import Codes
from .compiled import has_triton

_PLAIN = {Tensor, torch.nn.Parameter}
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}  # the kernels compute in float32


def launches(*roles: Sequence[Tensor], entries: Sequence[Tensor | Codes]) -> list[list[int]] | None:
    """Rows that have entries, in lots of the same dtypes, role by role; those in codes have one factor as well.

    None where a kernel cannot serve every row: of plain tensors, contiguous, on one GPU, in float32 at most.
    """
    device = roles[0][0].device
    # A recorded step would find the addresses of its own tensors in memory that is someone else's by then.
    if device.type != "cuda" or not has_triton(device) or torch.cuda.is_current_stream_capturing():
        return None
    kept = [(each.codes, each.tops) if isinstance(each, Codes) else (each,) for each in entries]
    every = [*chain(*roles), *chain(*kept)]  # at every step of a hold: in few long loops
    if not (
        _PLAIN.issuperset(map(type, every))
        and {each.get_device() for each in every} == {device.index}
        and False not in [each.is_contiguous() for each in every]
        and max([each.numel() for each in roles[0]]) < 2**31
    ):
        return None
    kinds = [each.factor if isinstance(each, Codes) else each.dtype for each in entries]
    alike = list(zip(*([each.dtype for each in role] for role in roles), kinds, strict=True))
    lots: dict[tuple[Any, ...], list[int]] = {kind: [] for kind in alike}
    if any(isinstance(each, torch.dtype) and each not in _DTYPES for kind in lots for each in kind):
        return None
    for row, (kind, param) in enumerate(zip(alike, roles[0], strict=True)):
        if param.numel():
            lots[kind].append(row)
    return [rows for rows in lots.values() if rows]


def chosen(rows: Sequence[int], *roles: Sequence[Any]) -> list[list[Any]]:
    """These rows of each role."""
    return [[role[row] for row in rows] for role in roles]
