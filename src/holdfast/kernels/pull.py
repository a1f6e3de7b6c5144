"""The pull of a diagonal Λ on all parameters: g ← g + s · Λ ∘ (θ − μ), and the value ½ Σ Λ (θ − μ)²."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .products import has_triton

Tensors = Sequence[Tensor]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the kernel adds in float32


def in_one_pass(*roles: Tensors) -> bool:
    """Whether all tensors are plain, dense, on one device and of one dtype, so that one pass can serve them."""
    every = [tensor for role in roles for tensor in role]
    first = every[0]
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype == first.dtype
        and tensor.device == first.device
        for tensor in every
    )


def add_pull_(grads: Tensors, params: Tensors, means: Tensors, entries: Tensors, scale: float | Tensor) -> Tensor:
    """Add scale · entries ∘ (params − means) to the gradients; returns ½ Σ entries (params − means)²."""
    every = [tensor for role in (grads, params, means, entries) for tensor in role]
    fits = grads[0].is_cuda and grads[0].dtype in _DTYPES and has_triton()
    # A recorded step would find the addresses of its own tensors in memory that is someone else's by then.
    fits = fits and not torch.cuda.is_current_stream_capturing()
    if fits and all(tensor.is_contiguous() and tensor.numel() < 2**31 for tensor in every):
        from .triton_pull import pull

        return pull(grads, params, means, entries, scale)
    return plain_pull(grads, params, means, entries, scale)


def plain_pull(grads: Tensors, params: Tensors, means: Tensors, entries: Tensors, scale: float | Tensor) -> Tensor:
    """The same, one operation over all tensors after another."""
    deltas = torch._foreach_sub(list(params), list(means))
    pulls = torch._foreach_mul(deltas, list(entries))
    dots = [torch.dot(delta.flatten(), pull.flatten()) for delta, pull in zip(deltas, pulls, strict=True)]
    value = 0.5 * torch.stack(dots).sum()
    if isinstance(scale, Tensor):
        torch._foreach_mul_(pulls, scale)
        torch._foreach_add_(list(grads), pulls)
    else:
        torch._foreach_add_(list(grads), pulls, alpha=scale)
    return value
