"""One side of a layer's curvature: a symmetric matrix over its inputs or outputs, or that matrix's diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError
from .base import require_finite

# What a sum was rounded to, whatever it was cast to since.
_FLOAT32 = torch.finfo(torch.float32).eps

# A factor is (groups, size, size), or (groups, size) where the side is too wide for a matrix.


def require_factor(factor: Tensor, groups: int, size: int, what: str) -> None:
    """Raise unless it is symmetric, finite, of this size, and not negative on its diagonal."""
    require_finite(what, factor)
    if factor.shape not in ((groups, size, size), (groups, size)):
        got = "×".join(map(str, factor.shape))
        raise ArgumentError(f"{what} is {groups}×{size}×{size}, or its diagonal {groups}×{size}; got {got}.")
    scale = float(factor.abs().max()) if factor.numel() else 0.0
    slack = 64 * torch.finfo(factor.dtype).eps * scale
    if factor.ndim == 3 and float((factor - factor.mT).abs().max()) > slack:
        raise ArgumentError(f"{what} must be symmetric, and is not.")
    if bool((diagonal(factor) < -slack).any()):
        raise ArgumentError(f"{what} has a negative diagonal, which no precision has.")


def diagonal(factor: Tensor) -> Tensor:
    """(groups, size)."""
    return factor.diagonal(dim1=-2, dim2=-1) if factor.ndim == 3 else factor


def full(factor: Tensor) -> Tensor:
    """(groups, size, size)."""
    return factor if factor.ndim == 3 else torch.diag_embed(factor)


def sandwiched(outputs: Tensor, matrix: Tensor, inputs: Tensor) -> Tensor:
    """G M A for matrices of (groups, outputs, inputs)."""
    right = matrix @ inputs if inputs.ndim == 3 else matrix * inputs.unsqueeze(-2)
    return outputs @ right if outputs.ndim == 3 else outputs.unsqueeze(-1) * right


def summed(factors: list[Tensor]) -> Tensor:
    """Their sum: a matrix if one of them is."""
    if len({factor.ndim for factor in factors}) > 1:
        factors = [full(factor) for factor in factors]
    total = factors[0].clone()
    for factor in factors[1:]:
        total += factor
    return total


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Σ aᵢⱼ bᵢⱼ, for each group."""
    if a.ndim == b.ndim:
        return (a * b).flatten(1).sum(1)
    return (diagonal(a) * diagonal(b)).sum(1)


def embedded(factor: Tensor, places: Tensor, size: int) -> Tensor:
    """The factor of a side that grew, zero on what is new."""
    places = places.to(factor.device)
    larger = factor.new_zeros(len(factor), *[size] * (factor.ndim - 1))
    if factor.ndim == 3:
        larger[:, places.unsqueeze(1), places] = factor
    else:
        larger[:, places] = factor
    return larger


def digit(tensor: Tensor) -> float:
    """The last digit that a tensor's entries were rounded to: that of float32, if all of them fit into it."""
    own = torch.finfo(tensor.dtype).eps
    return own if own > _FLOAT32 or not torch.equal(tensor, tensor.float().to(tensor)) else _FLOAT32


def eigen(factor: Tensor, what: str, *, cut: bool) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues and eigenvectors, which are none for a diagonal, in float64.

    Below rounding it cannot be told whether a direction is free. With `cut` it is, as for an inverse it must be; under
    a prior the small ones are right to count, and only what is negative is set to zero.
    """
    values, vectors = torch.linalg.eigh(factor.double()) if factor.ndim == 3 else (factor.double(), None)
    largest = values.shape[-1] * values.abs().amax(-1, keepdim=True)
    rounding = digit(factor) * largest
    below = int((values < -100 * max(torch.finfo(factor.dtype).eps, _FLOAT32) * largest).sum())
    if below:
        raise ArgumentError(f"{what} is no precision's: it is negative in {below} of {values.numel()} directions.")
    return values.where(values > rounding, 0) if cut else values.clamp(min=0), vectors
