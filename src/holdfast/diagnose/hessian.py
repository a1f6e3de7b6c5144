"""H = Σ ∇²nll as far as a model's size allows: whole, or by its products with random signs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .derivatives import products
from .task import Task


@dataclass(frozen=True)
class Hessian:
    """Hv for some v: every row of H where `exact`, else the products with random signs, E[vvᵀ] = 1."""

    exact: bool
    vectors: Tensor  # (rows, entries)
    products: Tensor  # (rows, entries)
    growth: tuple[tuple[float, float], ...]  # (data / entries, the diagonal's share), as the data came in

    @property
    def diagonal(self) -> Tensor:
        """diag H, or its unbiased estimate E[v ∘ Hv], (entries,)."""
        return self.products.diagonal() if self.exact else (self.vectors * self.products).mean(0)


def hessian(task: Task, *, exact: bool, probes: int, seed: int) -> Hessian:
    """One pass over the data, with a second-order pass for each row: as many as there are entries, or probes."""
    like = task.weights
    if exact:
        vectors = torch.eye(task.entries, dtype=like.dtype, device=like.device)
    else:
        generator = torch.Generator().manual_seed(seed % 2**63)
        coins = torch.randint(0, 2, (probes, task.entries), generator=generator, dtype=torch.int8)
        vectors = (2 * coins - 1).to(like)
    growth: dict[float, float] = {}

    def share(so_far: Tensor) -> float:
        return absolute(so_far) if exact else squares(vectors * so_far)[0]

    def seen(batches: int, num_data: float, so_far: Tensor) -> None:
        if batches & (batches - 1) == 0:  # 1, 2, 4, … batches
            growth[num_data / task.entries] = share(so_far)
        total[0] = num_data

    total = [0.0]
    found = products(task, vectors, seen)
    growth[total[0] / task.entries] = share(found)
    return Hessian(exact, vectors, found, tuple(growth.items()))


def absolute(matrix: Tensor) -> float:
    """Σ|H_ii| / Σ|H_ij|, the optimization view's measure; not a number where H is zero."""
    whole = matrix.abs().double().sum()
    return float(matrix.diagonal().abs().double().sum() / whole)


def squares(diagonals: Tensor) -> tuple[float, float]:
    """Σ H_ii² / Σ H_ij² and its standard error, from v ∘ Hv of several v, (probes, entries of some rows).

    E‖v ∘ Hv‖² = Σ H_ij², and of two independent ones the inner product has the mean Σ H_ii². The error is the
    jackknife's over the probes.
    """
    gram = (diagonals @ diagonals.T).double()
    count = len(gram)
    own, cross = gram.diagonal(), gram.sum(1) - gram.diagonal()

    def ratio(kept: int, mine: Tensor, theirs: Tensor) -> Tensor:
        return theirs / (kept * (kept - 1)) / (mine / kept)

    whole = ratio(count, own.sum(), cross.sum())
    if count < 3 or not bool(whole.isfinite()):
        return float(whole), float("nan")
    without = ratio(count - 1, own.sum() - own, cross.sum() - 2 * cross)
    error = ((count - 1) / count * (without - without.mean()).square().sum()).sqrt()
    return float(whole.clamp(min=0)), float(error)
