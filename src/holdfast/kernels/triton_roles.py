"""What the pull and the shrinking step read: parameters, means and the like, each role in a dtype of its own, and Λ."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import BLOCK, LARGEST, STEPS, ZERO, Codes
from .triton_tensors import TILE, pointers, tiles

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_ROWS, _BLOCK, _STEPS = tl.constexpr(TILE // BLOCK), tl.constexpr(BLOCK), tl.constexpr(STEPS)
_ZERO, _LARGEST = tl.constexpr(ZERO), tl.constexpr(LARGEST)
_RAISED = tl.constexpr(2**15 // STEPS + 1)  # octaves that make every top positive
_LEAST = tl.constexpr(-1000)  # octaves: float64 has no powers of two far below
_PER_STEP = tl.constexpr(1 / STEPS)


class Lot(NamedTuple):
    """Tensors of one launch, and what the kernels find them by."""

    pointers: Tensor  # role after role; after the entries' the addresses of their first tops, if they are in codes
    sizes: Tensor  # of every tensor
    owners: Tensor  # of every tile, the tensor that it belongs to
    starts: Tensor  # of every tile, where in it it starts
    octave: Tensor  # what the steps of an octave are worth, in codes
    coded: bool

    @staticmethod
    def of(*roles: Sequence[Tensor], entries: Sequence[Tensor | Codes]) -> Lot:
        """Of tensors that `launches` puts together."""
        device, factor = roles[0][0].device, next((each.factor for each in entries if isinstance(each, Codes)), None)
        addresses = [each.data_ptr() for role in roles for each in role]
        addresses += [each.codes.data_ptr() if isinstance(each, Codes) else each.data_ptr() for each in entries]
        addresses += [_first_top(each) for each in entries if isinstance(each, Codes)]
        leads = tuple(each.start % BLOCK if isinstance(each, Codes) else 0 for each in entries)
        sizes = tuple(each.numel() for each in roles[0])
        octave = _octave(1.0 if factor is None else factor, device)
        return Lot(pointers(tuple(addresses), device), *tiles(sizes, leads, device), octave, factor is not None)


@triton.jit
def places(start):
    """Where the entries of a tile are in their tensor. Its rows are blocks of codes."""
    return start + tl.arange(0, _ROWS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def numbers(at, place, inside, DTYPE: tl.constexpr):
    """The entries of a tile in float32, of the tensor whose address is at `at`."""
    return tl.load(tl.load(at).to(tl.pointer_type(DTYPE)) + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def weights(at, tops_at, octave, start, size, place, inside, ENTRY: tl.constexpr, CODED: tl.constexpr):
    """Entries of Λ in float32, from numbers or from codes."""
    if CODED:
        code = tl.load(tl.load(at).to(tl.pointer_type(tl.uint8)) + place, mask=inside, other=_ZERO).to(tl.int32)
        row = tl.arange(0, _ROWS)
        first = (start + _BLOCK - 1) // _BLOCK  # a first tile may start before its tensor does
        tops = tl.load(tops_at).to(tl.pointer_type(tl.int16)) + first + row
        steps = tl.load(tops, mask=start + row * _BLOCK < size, other=0).to(tl.int32) + _RAISED * _STEPS
        octaves = tl.maximum(steps // _STEPS - _RAISED, _LEAST)
        power = ((octaves + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        scale = tl.minimum(tl.load(octave + steps % _STEPS) * power, _LARGEST).to(tl.float32)
        below = tl.exp2(code.to(tl.float32) * -_PER_STEP)
        found = tl.where(code == _ZERO, 0.0, below * scale[:, None])
    else:
        found = numbers(at, place, inside, ENTRY)
    return found


def _first_top(codes: Codes) -> int:
    return codes.tops.data_ptr() + codes.start // BLOCK * codes.tops.element_size()


@functools.lru_cache(maxsize=16)
def _octave(factor: float, device: torch.device) -> Tensor:
    """In float64: with a power of two each gives the scale of a block."""
    return (factor * torch.exp2(torch.arange(STEPS, dtype=torch.float64) / STEPS)).to(device)
