"""The passes of natural-gradient variational learning on a GPU: every weight in one launch, every number read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tensors import TILE, pointers, tiles

Tensors = Sequence[Tensor]


@triton.jit
def _at(table, role, tensors, owner, place):
    return tl.load(table + role * tensors + owner).to(tl.pointer_type(tl.float32)) + place


@triton.jit
def _shake(table, sizes, owners, starts, tensors, n, seed, sign, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    place = tl.load(starts + block) + tl.arange(0, BLOCK)
    inside = place < tl.load(sizes + owner)
    param_at = _at(table, 0, tensors, owner, place)
    param = tl.load(param_at, mask=inside, other=0.0)
    scale = tl.load(_at(table, 2, tensors, owner, place), mask=inside, other=1.0)
    scale += tl.load(_at(table, 3, tensors, owner, place), mask=inside, other=1.0)
    noise = tl.randn(seed + owner, place.to(tl.int32))
    tl.store(_at(table, 1, tensors, owner, place), param, mask=inside)
    tl.store(param_at, param + sign * noise / tl.sqrt(n * scale), mask=inside)


@triton.jit
def _bend(table, sizes, owners, starts, tensors, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    place = tl.load(starts + block) + tl.arange(0, BLOCK)
    inside = place < tl.load(sizes + owner)
    param_at = _at(table, 0, tensors, owner, place)
    bend_at = _at(table, 5, tensors, owner, place)
    mean = tl.load(_at(table, 1, tensors, owner, place), mask=inside, other=0.0)
    scale = tl.load(_at(table, 2, tensors, owner, place), mask=inside, other=0.0)
    scale += tl.load(_at(table, 3, tensors, owner, place), mask=inside, other=0.0)
    moved = (tl.load(param_at, mask=inside, other=0.0) - mean) * n * scale
    grad = tl.load(_at(table, 4, tensors, owner, place), mask=inside, other=0.0)
    bend = tl.load(bend_at, mask=inside, other=0.0)
    tl.store(bend_at, bend + grad * moved, mask=inside)
    tl.store(param_at, mean, mask=inside)


@triton.jit
def _step(
    table, sizes, owners, starts, tensors, lr, momentum, memory, correction, radius, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    place = tl.load(starts + block) + tl.arange(0, BLOCK)
    inside = place < tl.load(sizes + owner)
    param_at, grad_at = _at(table, 0, tensors, owner, place), _at(table, 1, tensors, owner, place)
    running_at, curvature_at = _at(table, 2, tensors, owner, place), _at(table, 3, tensors, owner, place)
    bend_at = _at(table, 4, tensors, owner, place)
    param = tl.load(param_at, mask=inside, other=0.0)
    curvature = tl.load(curvature_at, mask=inside, other=1.0)
    bend = tl.load(bend_at, mask=inside, other=1.0)
    prior = tl.load(_at(table, 5, tensors, owner, place), mask=inside, other=1.0)
    center = tl.load(_at(table, 6, tensors, owner, place), mask=inside, other=0.0)
    running = tl.load(running_at, mask=inside, other=0.0)
    running = momentum * running + (1 - momentum) * tl.load(grad_at, mask=inside, other=0.0)
    apart = bend - curvature
    new = 1 - memory
    after = curvature + new * apart + 0.5 * new * new * apart * apart / (curvature + prior)
    way = (running / correction + prior * (param - center)) / (after + prior)
    way = tl.minimum(tl.maximum(way, -radius), radius)
    tl.store(running_at, running, mask=inside)
    tl.store(curvature_at, after, mask=inside)
    tl.store(bend_at, tl.zeros_like(bend), mask=inside)
    tl.store(param_at, param - lr * way, mask=inside)


def shake(
    params: Tensors, means: Tensors, curvatures: Tensors, priors: Tensors, n: float, seed: int, sign: float
) -> None:
    """means ← θ, θ ← θ ± ε / √(N (h + s)), with noise that a seed decides."""
    _launch(_shake, (params, means, curvatures, priors), n, seed, sign)


def bend(
    params: Tensors, means: Tensors, curvatures: Tensors, priors: Tensors, grads: Tensors, bends: Tensors, n: float
) -> None:
    """bend ← bend + g (θ − m) N (h + s); then θ ← m."""
    _launch(_bend, (params, means, curvatures, priors, grads, bends), n)


def step(roles: Sequence[Tensors], lr: float, momentum: float, memory: float, correction: float, radius: float) -> None:
    """The step of momenta, curvatures and means, and bends zeroed."""
    _launch(_step, roles, lr, momentum, memory, correction, radius)


def _launch(kernel: Any, roles: Sequence[Tensors], *numbers: float) -> None:
    device = roles[0][0].device
    sizes, owners, starts = tiles(tuple(tensor.numel() for tensor in roles[0]), (0,) * len(roles[0]), device)
    table = pointers(tuple(tensor.data_ptr() for role in roles for tensor in role), device)
    with torch.cuda.device(device):
        kernel[(len(owners),)](table, sizes, owners, starts, len(roles[0]), *numbers, BLOCK=TILE, num_warps=8)
