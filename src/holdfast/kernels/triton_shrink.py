"""The shrinking step on a GPU: every parameter in one launch, read once and written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import Codes
from .shrink import FIRM
from .triton_roles import DTYPES, Lot, lies_even, numbers, places, put, weights

_FIRM = tl.constexpr(FIRM)


@triton.jit
def _tile(
    at, tensors, octave, start, size, scale,
    PARAM: tl.constexpr, MEAN: tl.constexpr, ENTRY: tl.constexpr, CODED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    place = places(start, EVEN)
    inside = (place >= 0) & (place < size)
    param = numbers(at, place, inside, PARAM, EVEN)
    delta = param - numbers(at + tensors, place, inside, MEAN, EVEN)
    entry = weights(at + 2 * tensors, at + 3 * tensors, octave, start, size, place, inside, ENTRY, CODED, EVEN)
    entry = tl.minimum(entry * scale, _FIRM)
    put(at, place, inside, param - delta * (entry / (1.0 + entry)), PARAM, EVEN)


@triton.jit
def _kernel(
    pointers, sizes, owners, starts, octave, scale, tensors,
    PARAM: tl.constexpr, MEAN: tl.constexpr, ENTRY: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    owner = tl.load(owners + tile)
    start, size = tl.load(starts + tile), tl.load(sizes + owner)
    at = pointers + owner
    if lies_even(at, tensors, start, size, 3):
        _tile(at, tensors, octave, start, size, scale, PARAM, MEAN, ENTRY, CODED, True)
    else:
        _tile(at, tensors, octave, start, size, scale, PARAM, MEAN, ENTRY, CODED, False)


def shrink(params: Sequence[Tensor], means: Sequence[Tensor], entries: Sequence[Tensor | Codes], scale: float) -> None:
    """params ← params − (params − means) · scale · entries / (1 + scale · entries)."""
    lot = Lot.of(params, means, entries=entries)
    entry = None if isinstance(entries[0], Codes) else DTYPES[entries[0].dtype]
    with torch.cuda.device(params[0].device):
        _kernel[(len(lot.owners),)](
            *lot[:5], scale, len(params),
            DTYPES[params[0].dtype], DTYPES[means[0].dtype], entry, lot.coded, num_warps=8,
        )  # fmt: skip
