"""Σₙ (leftₙᵀ rightₙ)² without writing out the products of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this many entries a product is too small to be worth a call of its own.
_SMALL = 1 << 14


def add_squared_products_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add Σₙ (leftₙᵀ rightₙ)² to total, for left (batch, groups, positions, rows) and right (…, columns)."""
    left, right = left.to(total.dtype), right.to(total.dtype)
    _, rows, columns = total.shape
    if rows * columns < _SMALL:
        total += (left.mT @ right).square_().sum(0)
        return
    product = torch.empty_like(total)
    for a, b in zip(left, right, strict=True):
        torch.bmm(a.mT, b, out=product)
        total.addcmul_(product, product)
