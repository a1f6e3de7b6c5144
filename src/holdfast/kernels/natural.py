"""The three passes of natural-gradient variational learning over all weights: shake, bend, step.

h is the curvature of the mean loss, s = Λ₀/N the prior's, per example; the posterior has precision N (h + s).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compiled import has_triton

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Natural:
    """The numbers of a step."""

    lr: float
    momentum: float  # β₁
    memory: float  # β₂
    correction: float  # 1 − β₁ᵗ
    radius: float = float("inf")


def shake_(
    params: Tensors, means: Tensors, curvatures: Tensors, priors: Tensors, n: float, seed: int, sign: float = 1.0
) -> None:
    """means ← θ, θ ← θ ± ε / √(N (h + s)), with noise that a seed decides, on each kind of device its own."""
    if _in_one_launch(params, means, curvatures, priors):
        from .triton_natural import shake

        return shake(params, means, curvatures, priors, n, seed, sign)
    drawer = torch.Generator(params[0].device).manual_seed(seed)
    noise = [torch.empty_like(each).normal_(generator=drawer) for each in params]
    return plain_shake_(params, means, curvatures, priors, n, noise, sign)


def plain_shake_(
    params: Tensors, means: Tensors, curvatures: Tensors, priors: Tensors, n: float, noise: Tensors, sign: float = 1.0
) -> None:
    """The same with noise that is given, and used up."""
    torch._foreach_copy_(list(means), list(params))
    deviations = torch._foreach_add(list(curvatures), list(priors))
    torch._foreach_mul_(deviations, n)
    torch._foreach_sqrt_(deviations)
    torch._foreach_div_(list(noise), deviations)
    torch._foreach_add_(list(params), list(noise), alpha=sign)


def bend_(
    params: Tensors, means: Tensors, curvatures: Tensors, priors: Tensors, grads: Tensors, bends: Tensors, n: float
) -> None:
    """bend ← bend + g (θ − m) N (h + s), whose mean is the curvature; then θ ← m, exactly."""
    if _in_one_launch(params, means, curvatures, priors, grads, bends):
        from .triton_natural import bend

        return bend(params, means, curvatures, priors, grads, bends, n)
    return plain_bend_(params, means, curvatures, priors, grads, bends, n)


def plain_bend_(
    params: Tensors, means: Tensors, curvatures: Tensors, priors: Tensors, grads: Tensors, bends: Tensors, n: float
) -> None:
    """The same, one operation over all tensors after another."""
    moves = torch._foreach_sub(list(params), list(means))
    precisions = torch._foreach_add(list(curvatures), list(priors))
    torch._foreach_mul_(precisions, n)
    torch._foreach_mul_(moves, precisions)
    torch._foreach_addcmul_(list(bends), list(grads), moves)
    torch._foreach_copy_(list(params), list(means))


def natural_step_(roles: Sequence[Tensors], numbers: Natural) -> None:
    """g ← β₁g + (1−β₁)ĝ;  h ← β₂h + (1−β₂)ĥ + ½(1−β₂)²(h − ĥ)²/(h + s);  m ← m − α (ḡ + s(m − μ₀))/(h + s).

    The roles are m, ĝ, g, h, ĥ (zeroed for the next step), s and μ₀.
    """
    if _in_one_launch(*roles):
        from .triton_natural import step

        return step(
            roles, numbers.lr, numbers.momentum, numbers.memory, numbers.correction, numbers.radius
        )  # fmt: skip
    return plain_natural_step_(roles, numbers)


def plain_natural_step_(roles: Sequence[Tensors], numbers: Natural) -> None:
    """The same, one operation over all tensors after another."""
    params, grads, momenta, curvatures, bends, priors, centers = roles
    new = 1 - numbers.memory
    torch._foreach_lerp_(list(momenta), list(grads), 1 - numbers.momentum)
    scales = torch._foreach_add(list(curvatures), list(priors))
    apart = torch._foreach_sub(list(bends), list(curvatures))  # ĥ − h
    squares = torch._foreach_mul(apart, apart)
    torch._foreach_div_(squares, scales)
    torch._foreach_add_(list(curvatures), apart, alpha=new)
    torch._foreach_add_(list(curvatures), squares, alpha=0.5 * new**2)
    pulls = torch._foreach_sub(list(params), list(centers))
    torch._foreach_mul_(pulls, list(priors))
    torch._foreach_add_(pulls, list(momenta), alpha=1 / numbers.correction)
    torch._foreach_copy_(scales, list(curvatures))
    torch._foreach_add_(scales, list(priors))
    torch._foreach_div_(pulls, scales)
    if numbers.radius != float("inf"):
        torch._foreach_clamp_min_(pulls, -numbers.radius)
        torch._foreach_clamp_max_(pulls, numbers.radius)
    torch._foreach_add_(list(params), pulls, alpha=-numbers.lr)
    torch._foreach_zero_(list(bends))


def _in_one_launch(*roles: Tensors) -> bool:
    """Whether one kernel can serve all tensors; a recorded step would find their addresses taken by others."""
    first = roles[0][0]
    fits = first.is_cuda and has_triton(first.device) and not torch.cuda.is_current_stream_capturing()
    return fits and all(
        tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.numel() < 2**31 and type(tensor) is Tensor
        for role in roles
        for tensor in role
    )
