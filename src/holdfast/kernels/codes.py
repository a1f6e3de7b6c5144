"""Numbers ≥ 0 in a byte each: steps on one grid of logarithms, counted down from the largest of each block.

value = factor · 2^((top − code) / 18), and zero for code 255. The nearest step is off by at most 2^(1/36) − 1 = 1.94 %,
for all within 2¹⁴ of their block's largest; what is smaller is held at the lowest step, 2⁻¹⁴ of it, and zeros are zero.
There is one grid for all blocks: what was rounded once is on it, and is not rounded again, but for what lies more than
2¹⁴ below the top of another block that it came to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..pieces import Box

BLOCK = 256  # entries that share a top
STEPS = 18  # to an octave
ZERO = 255  # the code of zero; 0 … 254 are so many steps below the top
NOTHING = -(2**15)  # the top of a block of zeros
PIECE = 2**17  # entries that a processor's cache keeps from one operation to the next
LARGE = 2**24  # entries at a time elsewhere: many for few launches, few for small temporaries

LARGEST = torch.finfo(torch.float32).max
HIGHEST, LOWEST = 128 * STEPS, -126 * STEPS  # steps that float32 can tell, but for numbers that lack digits


class Codes(NamedTuple):
    """A run of entries of a tensor, the first of them number `start`, and the tops of all the tensor's blocks."""

    codes: Tensor  # uint8
    tops: Tensor  # int16: (blocks,)
    factor: float = 1.0
    start: int = 0

    def part(self, first: int, last: int) -> Codes:
        """Some of the entries, in a flat tensor, with the tops of their blocks alone."""
        begin = self.start + first
        blocks = slice(begin // BLOCK, -(-(self.start + last) // BLOCK))
        return Codes(self.codes.view(-1)[first:last], self.tops[blocks], self.factor, begin % BLOCK)

    def read(self, room: Tensor) -> Tensor:
        """The values, in a flat float32 tensor that has room for two blocks more: all of it may be written to."""
        lead, size = self.start % BLOCK, self.codes.numel()
        blocks = -(-(lead + size) // BLOCK)
        found = room[lead : lead + size]
        torch.index_select(_below_top(room.device), 0, self.codes.view(-1).int(), out=found)
        first = self.start // BLOCK
        scales = scales_of(self.tops[first : first + blocks], self.factor)
        room[: blocks * BLOCK].view(blocks, BLOCK).mul_(scales.unsqueeze(1))
        return found

    def unpacked(self) -> Tensor:
        """The values, as the codes are, in float32."""
        found = self.codes.new_empty(self.codes.numel(), dtype=torch.float32)
        size = piece(self.codes.device)
        room = found.new_empty(min(size, len(found)) + 2 * BLOCK)
        for first, last in bounds(len(found), self.start, size):
            found[first:last] = self.part(first, last).read(room)
        return found.view(self.codes.shape)


def packed(values: Tensor, box: Box, agreed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, int]:
    """The codes of what is here of a tensor, the tops of all its blocks, and the lowest step of any positive entry.

    `agreed` takes the largest of what all processes have.
    """
    flat = values.detach().reshape(-1)
    edges = list(bounds(len(flat), 0, piece(flat.device)))
    tops = torch.full((-(-box.size // BLOCK),), NOTHING, dtype=torch.int32, device=flat.device)
    for first, last in edges:
        blocks = box.places(first, last, flat.device) // BLOCK
        tops.scatter_reduce_(0, blocks, _steps(flat[first:last]), "amax")
    tops = agreed(tops)
    codes = torch.empty(len(flat), dtype=torch.uint8, device=flat.device)
    deepest = torch.full((1,), -HIGHEST, dtype=torch.int32, device=flat.device)
    for first, last in edges:
        part, top = flat[first:last], tops[box.places(first, last, flat.device) // BLOCK]
        below = (top - _steps(part)).clamp_(max=ZERO - 1)
        deepest = torch.cat([deepest, (below - top).masked_fill_(part == 0, -HIGHEST)]).amax(0, keepdim=True)
        codes[first:last] = below.masked_fill_(part == 0, ZERO).to(torch.uint8)
    return codes.view(values.shape), tops.to(torch.int16), -int(agreed(deepest))


def unpacked(codes: Tensor, tops: Tensor, factor: float, box: Box) -> Tensor:
    """The values of what is here of a tensor, wherever it is in it."""
    start = box.start
    if start is not None:
        return Codes(codes.contiguous(), tops, factor, start).unpacked()
    scales, flat = scales_of(tops, factor), codes.reshape(-1)
    found = torch.empty(len(flat), dtype=torch.float32, device=flat.device)
    for first, last in bounds(len(flat), 0, piece(flat.device)):
        below = _below_top(flat.device)[flat[first:last].int()]
        torch.mul(below, scales[box.places(first, last, flat.device) // BLOCK], out=found[first:last])
    return found.view(codes.shape)


def scales_of(tops: Tensor, factor: float) -> Tensor:
    """The values of the tops. What was rounded up beyond all numbers is the largest of them."""
    return torch.exp2(tops.double() / STEPS).mul_(factor).clamp_(max=LARGEST).float()


def bounds(size: int, start: int, most: int) -> Iterator[tuple[int, int]]:
    """Parts of so many entries at most, which end where blocks do; `start` is where the first entry is in its own."""
    step = max(BLOCK, most // BLOCK * BLOCK)
    return pairwise([0, *range(step - start % BLOCK, size, step), size])


def piece(device: torch.device) -> int:
    """How many entries at a time."""
    return PIECE if device.type == "cpu" else LARGE


def _steps(values: Tensor) -> Tensor:
    """The nearest whole number of steps of each logarithm."""
    found = torch.log2(values.double()).mul_(STEPS).round_()
    return found.clamp_(min=NOTHING).to(torch.int32)  # the logarithm of zero is −∞


@functools.cache
def _below_top(device: torch.device) -> Tensor:
    """2^(−code / 18) for each code."""
    values = torch.exp2(-torch.arange(ZERO, dtype=torch.float64) / STEPS)
    return torch.cat([values, values.new_zeros(1)]).float().to(device)
