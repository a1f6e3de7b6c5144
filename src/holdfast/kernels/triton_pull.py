"""The pull on a GPU: every parameter in one launch, every number read once and every gradient written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import Codes
from .triton_roles import DTYPES, Lot, lies_even, numbers, places, put, weights


@triton.jit
def _tile(
    at, tensors, octave, start, size, scale,
    GRAD: tl.constexpr, PARAM: tl.constexpr, MEAN: tl.constexpr, ENTRY: tl.constexpr, CODED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    place = places(start, EVEN)
    inside = (place >= 0) & (place < size)
    delta = numbers(at + tensors, place, inside, PARAM, EVEN) - numbers(at + 2 * tensors, place, inside, MEAN, EVEN)
    entry = weights(at + 3 * tensors, at + 4 * tensors, octave, start, size, place, inside, ENTRY, CODED, EVEN)
    pull = delta * entry
    put(at, place, inside, numbers(at, place, inside, GRAD, EVEN) + scale * pull, GRAD, EVEN)
    return tl.sum(0.5 * delta * pull)


@triton.jit
def _kernel(
    pointers, sizes, owners, starts, octave, partial, factor, scale, tensors,
    GRAD: tl.constexpr, PARAM: tl.constexpr, MEAN: tl.constexpr, ENTRY: tl.constexpr, CODED: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    owner = tl.load(owners + tile)
    start, size = tl.load(starts + tile), tl.load(sizes + owner)
    at = pointers + owner
    if SCALED:
        scale = scale * tl.load(factor).to(tl.float32)
    if lies_even(at, tensors, start, size, 4):
        value = _tile(at, tensors, octave, start, size, scale, GRAD, PARAM, MEAN, ENTRY, CODED, True)
    else:
        value = _tile(at, tensors, octave, start, size, scale, GRAD, PARAM, MEAN, ENTRY, CODED, False)
    tl.store(partial + tile, value)


def pull(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    means: Sequence[Tensor],
    entries: Sequence[Tensor | Codes],
    scale: float | Tensor,
) -> Tensor:
    """Add scale · entries ∘ (params − means) to the gradients; returns ½ Σ entries (params − means)²."""
    lot = Lot.of(grads, params, means, entries=entries)
    partial = torch.empty(len(lot.owners), dtype=torch.float32, device=grads[0].device)
    scaled = isinstance(scale, Tensor)
    dtypes = [DTYPES[role[0].dtype] for role in (grads, params, means)]
    entry = None if isinstance(entries[0], Codes) else DTYPES[entries[0].dtype]
    with torch.cuda.device(grads[0].device):
        _kernel[(len(lot.owners),)](
            *lot[:5], partial, scale if scaled else partial, 1.0 if scaled else scale, len(grads),
            *dtypes, entry, lot.coded, scaled, num_warps=8,
        )  # fmt: skip
    return partial.sum()
