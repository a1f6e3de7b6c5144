"""Σₙ (leftₙᵀ rightₙ)² without writing out the products of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .compiled import has_triton

# Below this many entries a product is too small to be worth a call of its own.
_SMALL = 1 << 14
# What a GPU's matrix units take; below, tiles would be mostly empty.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TILE = 16


def add_squared_products_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add Σₙ (leftₙᵀ rightₙ)² to total, for left (batch, groups, positions, rows) and right (…, columns)."""
    if _fits(total, left, right):
        from .triton_products import squared_products

        squared_products(total, left, right)
    else:
        plain_squared_products(total, left, right)


def plain_squared_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """The same by matrix products, one example after another where they are large."""
    left, right = left.to(total.dtype), right.to(total.dtype)
    _, rows, columns = total.shape
    if rows * columns < _SMALL:
        total += (left.mT @ right).square_().sum(0)
        return
    product = torch.empty_like(total)
    for a, b in zip(left, right, strict=True):
        torch.bmm(a.mT, b, out=product)
        total.addcmul_(product, product)


def _fits(total: Tensor, left: Tensor, right: Tensor) -> bool:
    return (
        total.is_cuda
        and has_triton(total.device)
        and total.dtype == torch.float32
        and left.dtype == right.dtype
        and left.dtype in _DTYPES
        and min(left.shape[-1], right.shape[-1], left.shape[-2]) >= _TILE
    )
