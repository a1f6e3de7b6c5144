"""The rule for convolutions: a matrix product for each entry of the kernel, or one over all that it saw."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .autocorrelation import Patches
from .calls import Call
from .forms import Form, Products, Rows, Shifted
from .rules import by_channel, rule

# A convolution with fewer input channels has its patches unfolded; with more, each entry of its kernel is a product.
_FEW_CHANNELS = 16
# How much longer than its places a line may be.
_SPARSE = 1.3


@rule("ConvolutionBackward0")
def convolution(call: Call, grad: Tensor) -> Form | None:
    """Any number of axes, strides, dilations, groups; transposed, inputs and gradients change places."""
    if call.split.axis != 0 or call.slot == 0:
        return None
    if call.slot == 2:
        return Rows(by_channel(grad))
    transposed, groups, kernel = call.saved("transposed"), call.saved("groups"), call.weight[2:]
    # The side with one value for each place where the kernel was put, and the side that it moved over.
    placed, under = call.rows(call.saved("input")), grad  # (batch, share, channels, *space)
    if not transposed:
        placed, under = under, placed
    margins = [margin for margin in reversed(call.saved("padding")) for _ in range(2)]
    under = F.pad(under.flatten(0, 1), margins).unflatten(0, (len(grad), -1))  # type: ignore[no-untyped-call]

    def left(start: int, stop: int) -> Tensor:
        """The placed side: (examples, groups, positions, rows)."""
        side = placed[start:stop].unflatten(2, (groups, -1)).flatten(4)  # type: ignore[no-untyped-call]
        return _positioned(side)

    def right(offsets: Sequence[tuple[int, ...]], start: int, stop: int) -> Tensor:
        """What the kernel's entries at `offsets` saw: (examples, groups, positions, columns)."""
        whole = len(offsets) == kernel.numel() and len(kernel) == 2 and placed.shape[1] == 1
        if whole and not under.is_cuda:  # the same, and faster; a GPU would unfold one example after another
            stride, dilation = call.saved("stride"), call.saved("dilation")
            seen = F.unfold(under[start:stop, 0], tuple(kernel), dilation, 0, stride)
            side = seen.unflatten(1, (groups, -1)).unsqueeze(1)  # type: ignore[no-untyped-call]
        else:
            seen = torch.stack([under[start:stop][(..., *_window(call, placed, offset))] for offset in offsets], 3)
            side = seen.unflatten(2, (groups, -1)).flatten(3, 4).flatten(4)  # type: ignore[no-untyped-call]
        return _positioned(side)

    def product(offsets: Sequence[tuple[int, ...]], shape: torch.Size) -> Products:
        positions, columns = placed[0, :, 0].numel(), call.weight[1] * len(offsets)
        return Products(
            left, functools.partial(right, offsets), len(grad), groups, positions, call.weight[0] // groups, columns,
            shape, inputs_left=transposed, share=4 * positions * groups * columns,
        )  # fmt: skip

    offsets = list(itertools.product(*(range(size) for size in kernel)))
    if call.weight[1] < _FEW_CHANNELS:
        return product(offsets, call.weight)
    lines = _lines(call, placed, under) if placed.shape[1] == 1 else None
    if lines is None:
        pieces = tuple(functools.partial(product, [each], call.weight[:2]) for each in offsets)
    else:
        pieces = tuple(functools.partial(lines, each) for each in offsets)
    whole = functools.partial(product, offsets, call.weight)
    return Shifted(pieces, whole, len(grad), call.weight, _patches(call, placed, under))


def _positioned(side: Tensor) -> Tensor:
    """From (examples, share, groups, rows, positions) to (examples, groups, share · positions, rows)."""
    return side[:, 0].mT if side.shape[1] == 1 else side.movedim(1, 3).flatten(3).mT


def _patches(call: Call, placed: Tensor, under: Tensor) -> tuple[Patches, ...]:
    """What the kernel saw, if its products with itself are cheaper than unfolded."""
    if placed.shape[1] > 1 or placed.is_cuda or any(stride != 1 for stride in call.saved("stride")):
        return ()
    seen = under[:, 0].unflatten(1, (call.saved("groups"), -1))  # type: ignore[no-untyped-call]
    patches = Patches(seen, tuple(call.weight[2:]), tuple(call.saved("dilation")), tuple(placed.shape[3:]))
    return (patches,) if patches.pays else ()


def _lines(call: Call, placed: Tensor, under: Tensor) -> Callable[[tuple[int, ...]], Products] | None:
    """With stride one, each side in one line: what an entry of the kernel saw is the same line, a little further on.

    Nothing is copied for each entry. Places to which the kernel was not put are zeros between the others; None where
    they would be many.
    """
    sizes, steps = under.shape[3:], [1]
    for size in reversed(sizes[1:]):
        steps.insert(0, steps[0] * size)
    length = sum((count - 1) * step for count, step in zip(placed.shape[3:], steps, strict=True)) + 1
    if any(stride != 1 for stride in call.saved("stride")) or length > _SPARSE * placed[0, 0, 0].numel():
        return None
    gaps = [size - count for size, count in zip(sizes[1:], placed.shape[4:], strict=True)]
    groups = call.saved("groups")
    left, right = (
        side[:, 0].flatten(2).unflatten(1, (groups, -1))  # type: ignore[no-untyped-call]
        for side in (F.pad(placed, [pad for gap in reversed(gaps) for pad in (0, gap)]), under)
    )  # (batch, groups, channels, line)

    def piece(offset: tuple[int, ...]) -> Products:
        start = sum(at * gap * step for at, gap, step in zip(offset, call.saved("dilation"), steps, strict=True))
        sides = left[..., :length].mT, right[..., start : start + length].mT
        return Products.of(*sides, call.weight[:2], inputs_left=call.saved("transposed"))

    return piece


def _window(call: Call, placed: Tensor, offset: tuple[int, ...]) -> tuple[slice, ...]:
    """Where an entry of the kernel lay, over all the places where the kernel was put."""
    axes = zip(offset, placed.shape[3:], call.saved("stride"), call.saved("dilation"), strict=True)
    return tuple(slice(at * gap, at * gap + (count - 1) * step + 1, step) for at, count, step, gap in axes)
