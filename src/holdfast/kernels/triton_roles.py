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

_TILE, _ROWS = tl.constexpr(TILE), tl.constexpr(TILE // BLOCK)
_BLOCK, _STEPS = tl.constexpr(BLOCK), tl.constexpr(STEPS)
_ZERO, _LARGEST = tl.constexpr(ZERO), tl.constexpr(LARGEST)
_RAISED = tl.constexpr(2**15 // STEPS + 1)  # octaves that make every top positive
_LEAST = tl.constexpr(-1000)  # octaves: float64 has no powers of two far below
_PER_STEP = tl.constexpr(1 / STEPS)
_VECTOR = tl.constexpr(16)  # bytes that a thread reads at once, and entries: a multiple of as many for every dtype


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
def lies_even(at, tensors, start, size, ROLES: tl.constexpr):
    """Whether a tile is full, and all its roles start at a multiple of 16 bytes: then it is read 16 bytes at a time."""
    even = (start >= 0) & (start + _TILE <= size) & (start % _VECTOR == 0)
    for role in tl.static_range(ROLES):
        even = even & (tl.load(at + role * tensors) % _VECTOR == 0)
    return even


@triton.jit
def places(start, EVEN: tl.constexpr):
    """Where the entries of a tile are in their tensor. Its rows are blocks of codes."""
    if EVEN:
        start = start // _VECTOR * _VECTOR  # the same number, and the compiler sees what it is a multiple of
    return start + tl.arange(0, _ROWS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def raw(at, place, inside, DTYPE: tl.constexpr, EVEN: tl.constexpr, other):
    """The entries of a tile as they are, of the tensor whose address is at `at`."""
    base = tl.load(at).to(tl.pointer_type(DTYPE))
    return tl.load(tl.multiple_of(base, _VECTOR) + place) if EVEN else tl.load(base + place, mask=inside, other=other)


@triton.jit
def numbers(at, place, inside, DTYPE: tl.constexpr, EVEN: tl.constexpr):
    """The same in float32."""
    return raw(at, place, inside, DTYPE, EVEN, 0.0).to(tl.float32)


@triton.jit
def put(at, place, inside, found, DTYPE: tl.constexpr, EVEN: tl.constexpr):
    """Write a tile's entries to the tensor whose address is at `at`."""
    base = tl.load(at).to(tl.pointer_type(DTYPE))
    if EVEN:
        tl.store(tl.multiple_of(base, _VECTOR) + place, found.to(DTYPE))
    else:
        tl.store(base + place, found.to(DTYPE), mask=inside)


@triton.jit
def weights(
    at, tops_at, octave, start, size, place, inside, ENTRY: tl.constexpr, CODED: tl.constexpr, EVEN: tl.constexpr
):
    """Entries of Λ in float32, from numbers or from codes."""
    if CODED:
        code = raw(at, place, inside, tl.uint8, EVEN, _ZERO).to(tl.int32)
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
        found = numbers(at, place, inside, ENTRY, EVEN)
    return found


def _first_top(codes: Codes) -> int:
    return codes.tops.data_ptr() + codes.start // BLOCK * codes.tops.element_size()


@functools.lru_cache(maxsize=16)
def _octave(factor: float, device: torch.device) -> Tensor:
    """In float64: with a power of two each gives the scale of a block."""
    return (factor * torch.exp2(torch.arange(STEPS, dtype=torch.float64) / STEPS)).to(device)
