"""One small rule per operation: from its inputs and its output's gradient to the gradients of single examples.

A layer is what it does: `nn.Linear`, an attention's packed projection and a hand-written `x @ w + b` all come here as
the same few operations, so that a module made of torch's operations needs no rule of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from .forms import Form, Lookup, Products, Rows, Shifted, wide


@dataclass(frozen=True)
class Split:
    """Where the examples are along an axis of a tensor: it holds (outer, examples, inner), flattened."""

    axis: int
    outer: int
    examples: int
    inner: int

    def resized(self, shape: torch.Size, size: int) -> Split | None:
        """The same for another size of batch or of its examples; None where that would be a guess."""
        share, left = divmod(shape[self.axis], size)
        if left or (share > 1 and self.outer == self.inner) or (self.outer > 1 and self.inner > 1):
            return None
        outer = 1 if self.outer == 1 else share
        return Split(self.axis, outer, size, share // outer)

    def rows(self, tensor: Tensor) -> Tensor:
        """Examples first; behind them, the tensor as it would be for one example alone."""
        if self.axis == 0 and self.outer == 1:
            return torch.unflatten(tensor, 0, (self.examples, self.inner))
        parted = torch.unflatten(tensor, self.axis, (self.outer, self.examples, self.inner)).movedim(self.axis + 1, 0)
        return parted.flatten(self.axis + 1, self.axis + 2)


@dataclass(frozen=True)
class Call:
    """One call of an operation in which a weight, at input `slot`, met the examples."""

    node: Node
    slot: int
    weight: torch.Size
    split: Split
    output: torch.Size

    def saved(self, name: str) -> Any:
        """What the operation saved of its forward pass."""
        return getattr(self.node, f"_saved_{name}")

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor of the output's axes (or one that broadcasts to them), examples first."""
        return self.split.rows(tensor)

    def rows_like_output(self, tensor: Tensor) -> Tensor:
        """A tensor that broadcasts to the output, examples first."""
        return self.split.rows(tensor.expand(self.output))


# A convolution with fewer input channels has its patches unfolded; with more, each entry of its kernel is a product.
_FEW_CHANNELS = 16
# How much longer than its places a line may be.
_SPARSE = 1.3

# From a call and its output's gradient (examples first, each as if alone) to the weight's gradients, or None if it
# cannot. Keys are the names of nodes in the backward graph; of a torch.autograd.Function `F`, that is "FBackward".
Rule = Callable[[Call, Tensor], Form | None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations, by the names of their backward nodes."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def reduced(rows: Tensor, shape: torch.Size) -> Rows | None:
    """Gradients of a weight that was broadcast: summed over the axes that it lacks, or has once."""
    extra = rows.ndim - 1 - len(shape)
    if extra < 0:
        return None
    missing = [1 + extra + i for i, size in enumerate(shape) if size == 1 and rows.shape[1 + extra + i] != 1]
    axes = [axis for axis in (*range(1, 1 + extra), *missing) if rows.shape[axis] > 1]
    summed = rows.sum(axes, dtype=wide(rows)) if axes else rows.to(wide(rows))
    return Rows(summed.reshape(len(rows), *shape))


@rule("AddmmBackward0", "MmBackward0")
def matrix_product(call: Call, grad: Tensor) -> Form | None:
    """β·bias + α·(a @ b), the work of every linear layer: ∂b = aᵀg, ∂a = g bᵀ."""
    added = call.node.name().startswith("Addmm")
    slot = call.slot - added
    if slot < 0:
        return reduced(grad if call.saved("beta") == 1 else grad * call.saved("beta"), call.weight)
    if added and call.saved("alpha") != 1:
        grad = grad * call.saved("alpha")
    if slot == 1 and call.split.axis == 0:
        left, right = call.rows(call.saved("mat1" if added else "self")), grad  # (batch, positions, in), (…, out)
    elif slot == 0 and call.split.axis == 1:
        left, right = grad.mT, call.rows(call.saved("mat2")).mT
    else:
        return None
    return Products.of(left.unsqueeze(1), right.unsqueeze(1), call.weight, inputs_left=slot == 1)


@rule("BmmBackward0")
def batched_matrix_product(call: Call, grad: Tensor) -> Form | None:
    """As above, in groups: a weight per head, or einsum's products."""
    if call.slot == 1 and call.split.axis == 1:
        return Products.of(call.rows(call.saved("self")), grad, call.weight, inputs_left=True)
    if call.slot == 0 and call.split.axis == 2:
        return Products.of(grad.mT, call.rows(call.saved("mat2")).mT, call.weight, inputs_left=False)
    return None


@rule("ConvolutionBackward0")
def convolution(call: Call, grad: Tensor) -> Form | None:
    """Any number of axes, strides, dilations, groups; transposed, inputs and gradients change places."""
    if call.split.axis != 0 or call.slot == 0:
        return None
    if call.slot == 2:
        return Rows(_by_channel(grad))
    transposed, groups, kernel = call.saved("transposed"), call.saved("groups"), call.weight[2:]
    # The side with one value for each place where the kernel was put, and the side that it moved over.
    placed, under = call.rows(call.saved("input")), grad  # (batch, share, channels, *space)
    if not transposed:
        placed, under = under, placed
    margins = [margin for margin in reversed(call.saved("padding")) for _ in range(2)]
    under = F.pad(under.flatten(0, 1), margins).unflatten(0, (len(grad), -1))  # type: ignore[no-untyped-call]

    def sides(offsets: Sequence[tuple[int, ...]], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The placed side, and what the kernel's entries at `offsets` saw: (examples, groups, positions, rows)."""
        seen = torch.stack([under[start:stop][(..., *_window(call, placed, offset))] for offset in offsets], 3)
        left, right = placed[start:stop].unflatten(2, (groups, -1)), seen.unflatten(2, (groups, -1))  # type: ignore[no-untyped-call]
        left, right = left.flatten(4), right.flatten(3, 4).flatten(4)  # (examples, share, groups, rows, positions)
        if placed.shape[1] == 1:
            return left[:, 0].mT, right[:, 0].mT
        return left.movedim(1, 3).flatten(3).mT, right.movedim(1, 3).flatten(3).mT

    def product(offsets: Sequence[tuple[int, ...]], shape: torch.Size) -> Products:
        positions, columns = placed[0, :, 0].numel(), call.weight[1] * len(offsets)
        return Products(
            functools.partial(sides, offsets), len(grad), groups, positions, call.weight[0] // groups, columns, shape,
            inputs_left=transposed, share=4 * positions * groups * columns,
        )  # fmt: skip

    offsets = list(itertools.product(*(range(size) for size in kernel)))
    if call.weight[1] < _FEW_CHANNELS:
        return product(offsets, call.weight)
    lines = _lines(call, placed, under) if placed.shape[1] == 1 else None
    if lines is None:
        pieces = tuple(functools.partial(product, [each], call.weight[:2]) for each in offsets)
    else:
        pieces = tuple(functools.partial(lines, each) for each in offsets)
    return Shifted(pieces, len(grad), call.weight)


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


@rule("EmbeddingBackward0")
def embedding(call: Call, grad: Tensor) -> Form | None:
    if call.saved("scale_grad_by_freq"):
        return None  # the frequencies are the batch's
    indices = call.rows(call.saved("indices")).flatten(1)
    values = grad.flatten(1, -2)
    values = values.masked_fill((indices == call.saved("padding_idx")).unsqueeze(-1), 0.0)
    return Lookup(indices, values, call.weight)


@rule("NativeLayerNormBackward0")
def layer_norm(call: Call, grad: Tensor) -> Form | None:
    if call.slot == 1:
        inputs, mean, scale = (call.saved(name) for name in ("input", "result1", "result2"))
        grad = grad * call.rows((inputs - mean) * scale)
    return reduced(grad, call.weight) if call.slot else None


@rule("FusedRmsNormBackward0")
def rms_norm(call: Call, grad: Tensor) -> Form | None:
    if call.slot == 1:
        grad = grad * call.rows(call.saved("input") * call.saved("result1"))
        return reduced(grad, call.weight)
    return None


@rule("NativeGroupNormBackward0")
def group_norm(call: Call, grad: Tensor) -> Form | None:
    if call.split.axis != 0 or call.slot == 0:
        return None
    if call.slot == 1:
        inputs, mean, scale = (call.saved(name) for name in ("input", "result1", "result2"))
        parted = inputs.reshape(*mean.shape, -1)
        grad = grad * call.rows(((parted - mean.unsqueeze(-1)) * scale.unsqueeze(-1)).view(inputs.shape))
    return Rows(_by_channel(grad))


@rule("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
def batch_norm(call: Call, grad: Tensor) -> Form | None:
    """With running statistics: a fixed scale and shift per channel."""
    if call.split.axis != 0 or call.slot == 0 or call.saved("training"):
        return None
    if call.slot == 1:
        inputs = call.saved("input")
        channels = (-1, *[1] * (inputs.ndim - 2))
        mean, variance = (call.saved(f"running_{name}").view(channels) for name in ("mean", "var"))
        small = call.saved("epsilon" if call.node.name().startswith("Cudnn") else "eps")
        grad = grad * call.rows((inputs - mean) * (variance + small).rsqrt())
    return Rows(_by_channel(grad))


@rule("PreluKernelBackward0")
def prelu(call: Call, grad: Tensor) -> Form | None:
    return reduced(grad * call.rows(call.saved("self").clamp(max=0)), call.weight) if call.slot == 1 else None


@rule("MulBackward0")
def scale(call: Call, grad: Tensor) -> Form | None:
    """A bare parameter as a factor."""
    other = call.saved("self" if call.slot else "other")
    return reduced(grad * call.rows_like_output(other), call.weight)


@rule("DivBackward0")
def quotient(call: Call, grad: Tensor) -> Form | None:
    other = call.rows_like_output(call.saved("other"))
    if call.slot:
        return reduced(-grad * call.rows_like_output(call.saved("self")) / other.square(), call.weight)
    return reduced(grad / other, call.weight)


@rule("AddBackward0", "SubBackward0")
def shift(call: Call, grad: Tensor) -> Form | None:
    """A bare parameter as a summand: biases, positions."""
    factor = call.saved("alpha") * (1 if call.node.name().startswith("Add") else -1) if call.slot else 1
    return reduced(grad if factor == 1 else grad * factor, call.weight)


@rule("ExpandBackward0", "RepeatBackward0")
def repetition(call: Call, grad: Tensor) -> Form | None:
    """The same weight for every example: class tokens, an instance norm's scale."""
    if call.node.name().startswith("Expand"):
        return reduced(grad, call.weight)
    return Rows(grad.reshape(len(grad), *call.weight)) if grad[0].numel() == call.weight.numel() else None


def _by_channel(grad: Tensor) -> Tensor:
    """(batch, share, channels, *space) summed to (batch, channels)."""
    return grad.sum([axis for axis in range(1, grad.ndim) if axis != 2], dtype=wide(grad))


def _window(call: Call, placed: Tensor, offset: tuple[int, ...]) -> tuple[slice, ...]:
    """Where an entry of the kernel lay, over all the places where the kernel was put."""
    axes = zip(offset, placed.shape[3:], call.saved("stride"), call.saved("dilation"), strict=True)
    return tuple(slice(at * gap, at * gap + (count - 1) * step + 1, step) for at, count, step, gap in axes)
