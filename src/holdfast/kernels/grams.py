"""Σₙ xₙ xₙᵀ, the inner loop of Kronecker factors, and its diagonal."""

from __future__ import annotations

import torch
from torch import Tensor

# On a CPU a wide Gram matrix is made in strips of so many rows or an eighth, what lies below the diagonal left out.
_STRIP = 128
# Whether a product of half-precision factors can be written in float32.
_WIDENS = "out_dtype" in (torch.mm.__doc__ or "")


def add_gram_(total: Tensor, rows: Tensor) -> None:
    """Add XᵀX to total, (size, size), for rows X of (n, size). Below the diagonal it may stay as it was."""
    if _WIDENS and rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16) and total.dtype == torch.float32:
        total += torch.mm(rows.T, rows, out_dtype=torch.float32)
        return
    rows = rows.to(total.dtype)
    size = len(total)
    if size < 2 * _STRIP:
        # Made apart, then added: a small product in place adds row after row to a total that is large by then, and
        # rounds each of them to it.
        total += rows.T @ rows
        return
    if rows.is_cuda:
        total.addmm_(rows.T, rows)
        return
    strip = max(_STRIP, size // 8)
    for start in range(0, size, strip):
        total[start : start + strip, start:].addmm_(rows[:, start : start + strip].T, rows[:, start:])


def add_grams_(total: Tensor, rows: Tensor) -> None:
    """Add Σₙ XₙᵀXₙ to total for rows of (examples, n, size), whichever way they lie."""
    count, size = rows.shape[1:]
    if rows.is_contiguous() or len(rows) == 1 or not rows.mT.is_contiguous():
        add_gram_(total, rows.reshape(-1, size))
    elif not rows.is_cuda:  # as a convolution unfolds them, and without a copy
        for each in rows:
            add_gram_(total, each)
    elif count >= size and rows.dtype == total.dtype:
        # A launch for each example would take longer than its product, and the products together are no larger
        # than the rows.
        total += torch.bmm(rows.mT, rows).sum(0)
    else:
        add_gram_(total, rows.reshape(-1, size))


def mirrored(total: Tensor) -> Tensor:
    """The symmetric matrix whose upper triangle a total has."""
    upper = total.triu()
    upper.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    return upper + upper.mT


def add_squares_(total: Tensor, rows: Tensor) -> None:
    """Add Σₙ xₙ² to total, (size,), for rows of (…, size)."""
    total += torch.linalg.vector_norm(rows, dim=tuple(range(rows.ndim - 1)), dtype=total.dtype).square_()
