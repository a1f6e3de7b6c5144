"""One small rule per operation: from its inputs and its output's gradient to the gradients of single examples.

A layer is what it does: `nn.Linear`, an attention's packed projection and a hand-written `x @ w + b` all come here as
the same few operations, so that a module made of torch's operations needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .calls import Call
from .forms import Form, Lookup, Products, Rows, wide

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
    return Rows(by_channel(grad))


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
    return Rows(by_channel(grad))


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


def by_channel(grad: Tensor) -> Tensor:
    """(batch, share, channels, *space) summed to (batch, channels)."""
    return grad.sum([axis for axis in range(1, grad.ndim) if axis != 2], dtype=wide(grad))
