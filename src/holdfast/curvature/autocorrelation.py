"""Σ a aᵀ over all that a kernel saw, without unfolding it.

With stride one, the block of two entries o and o′ of a kernel, Σₚ x(p + o) x(p + o′)ᵀ, depends on little more than
o′ − o: it is a sum over the same products, in a window moved by o. So there is one product for each difference (13
for 3×3, instead of 45), and what enters and leaves the window as it moves on is thin.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels import add_gram_, mirrored

# How much of the multiplications of an unfolded Gram matrix this may take, to be used instead.
_WORTH = 0.7
# How many places to take at once: fewer would be mostly the making of blocks, and more leave the cache.
_PLACES = 1 << 15


@dataclass(frozen=True)
class Patches:
    """What a kernel saw at every place where it was put, with stride one."""

    under: Tensor  # (examples, groups, channels, *space): with its padding
    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def pays(self) -> bool:
        """Whether differences and slabs take clearly fewer multiplications than the upper half of a Gram matrix."""
        entries = math.prod(self.kernel)
        sizes = [places + (size - 1) * gap for size, gap, places in self._axes]
        longer = math.prod(sizes[1:]) / math.prod(self.places[1:])
        cost = (math.prod(2 * size - 1 for size in self.kernel) + 1) / 2 * longer
        for size, gap, places in self._axes:
            moved = entries - entries // size
            cost += moved * (moved + 1) * gap / places
        return cost < _WORTH * entries * (entries + 1) / 2

    def only(self, example: int) -> Patches:
        return replace(self, under=self.under[example : example + 1].clone())

    def sums(self, dtype: torch.dtype) -> Tensor:
        """Σ a: (groups, channels · kernel)."""
        sums = self.under.sum(0, dtype=dtype)  # (groups, channels, *space)
        for axis, (size, gap, places) in enumerate(self._axes, 2):
            windows = [sums.narrow(axis, at * gap, places).sum(axis, keepdim=True) for at in range(size)]
            sums = torch.cat(windows, axis)
        return sums.flatten(1)

    def add_grams_(self, total: Tensor, step: int) -> None:
        """Add Σ a aᵀ to a total of (groups, channels · kernel, channels · kernel), up to `step` examples at a time."""
        under, step = self.under, max(1, min(step, _PLACES // math.prod(self.places)))
        for axis, (size, gap, places) in enumerate(self._axes, 3):
            under = under.narrow(axis, 0, places + (size - 1) * gap)
        for some in torch.split(under, step):
            for group, each in enumerate(some.unbind(1)):
                seen = each.movedim(1, -1).transpose(0, 1)  # (first axis, examples, other axes, channels)
                total[group] += self._gram(seen.to(total.dtype).contiguous())

    @property
    def _axes(self) -> Sequence[tuple[int, int, int]]:
        return list(zip(self.kernel, self.dilation, self.places, strict=True))

    def _gram(self, seen: Tensor) -> Tensor:
        blocks = self._firsts(seen)
        for axis, size in enumerate(self.kernel):
            if size > 1:
                added = self._moved(seen, axis)
                for at in range(1, size):  # each from the one before it; what is not due yet is overwritten
                    self._part(blocks, axis, at).copy_(
                        self._part(blocks, axis, at - 1, size - at) + self._part(added, axis, at - 1)
                    )
        count = len(self.kernel)
        order = [count, *range(count), 2 * count + 1, *range(count + 1, 2 * count + 1)]  # channels first, as weights
        gram = blocks.permute(order).reshape(2 * [blocks.shape[count] * math.prod(self.kernel)])
        gram.diagonal().clamp_(min=0)  # squares, and rounding where a slab took away all that there was
        return gram

    def _firsts(self, seen: Tensor) -> Tensor:
        """The first block of every difference, in a total of (*kernel, channels, *kernel, channels).

        All examples are one line. Two entries of the kernel saw the same line, a little further on. Where the one with
        offset zero along an axis was not put, the line is zero, so that the other does not run into the next row.
        """
        lines: dict[tuple[int, ...], Tensor] = {(): seen}  # by the axes along which they are zero outside
        for axis, places in enumerate(self.places[1:], 1):
            for zeros, line in list(lines.items()):
                lines[(*zeros, axis)] = line.clone()
                lines[(*zeros, axis)].narrow(axis + 1, places, line.shape[axis + 1] - places).zero_()
        channels = seen.shape[-1]
        steps = [math.prod(seen.shape[axis + 1 + (axis > 0) : -1]) for axis in range(len(self.kernel))]
        blocks = seen.new_zeros(*self.kernel, channels, *self.kernel, channels)
        zero = (0,) * len(self.kernel)
        for lag in itertools.product(*(range(1 - size, size) for size in self.kernel)):
            if lag < zero:
                continue
            pair = [tuple(max(0, sign * each) for each in lag) for sign in (-1, 1)]
            starts = [sum(a * g * s for a, g, s in zip(at, self.dilation, steps, strict=True)) for at in pair]
            behind = tuple(axis for axis, each in enumerate(lag) if axis and each < 0)
            ahead = tuple(axis for axis in range(1, len(lag)) if axis not in behind)
            left, right = (lines[axes].view(-1, channels) for axes in (ahead, behind))
            length = min(self.places[0] * steps[0], len(left) - max(starts))
            left, right = left[starts[0] :][:length], right[starts[1] :][:length]
            block = left.T @ right
            blocks[pair[0]].movedim(0, -2)[pair[1]] = block
            blocks[pair[1]].movedim(0, -2)[pair[0]] = block.T
        return blocks

    def _moved(self, seen: Tensor, axis: int) -> Tensor:
        """What a block gains, and loses, as its window moves on by an entry of the kernel along an axis."""
        kernel = [size - (at == axis) for at, size in enumerate(self.kernel)]
        width = math.prod(kernel) * seen.shape[-1]
        grams = [seen.new_zeros(width, width) for _ in range(2)]
        for gram, start in zip(grams, (self.places[axis], 0), strict=True):
            slabs = []
            for offset in itertools.product(*map(range, kernel)):
                slab = seen
                for each, (at, (_, gap, places)) in enumerate(zip(offset, self._axes, strict=True)):
                    begin, count = (start, gap) if each == axis else (0, places)
                    slab = slab.narrow(each + (each > 0), begin + at * gap, count)
                slabs.append(slab)
            add_gram_(gram, torch.stack(slabs, -2).view(-1, width))
        shape = (*kernel, seen.shape[-1])
        return mirrored(grams[0] - grams[1]).view(*shape, *shape)

    def _part(self, blocks: Tensor, axis: int, start: int, count: int | None = None) -> Tensor:
        """Those blocks of which both entries are at `start` or behind it along an axis."""
        count = blocks.shape[axis] - start if count is None else count
        return blocks.narrow(axis, start, count).narrow(axis + len(self.kernel) + 1, start, count)
