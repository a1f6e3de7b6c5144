"""Σφφᵀ + λI, factored once: the weights, their spread, and the evidence."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SingularError
from .statistics import Statistics


@dataclass(frozen=True, eq=False)
class Ridge:
    """Ridge regression from sums. Of prior precision and noise variance the weights know only λ, their product."""

    statistics: Statistics
    value: float  # λ

    @functools.cached_property
    def factor(self) -> Tensor:
        """L with L Lᵀ = Σφφᵀ + λI."""
        gram = self.statistics.gram
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(gram + self.value * torch.eye(len(gram)).to(gram))
        pivots = factor.diagonal().square()
        floor = len(gram) * torch.finfo(gram.dtype).eps  # below it, the last pivots are rounding
        if int(failed) or float(pivots.min()) <= floor * float(pivots.max()):
            raise SingularError(
                f"{self.statistics.num_data} examples and prior · noise = {self.value:g} do not determine {len(gram)} "
                f"weights, as far as {gram.dtype} can tell. Give a larger prior precision, head.with_prior(1.0), or "
                "let the evidence choose it, head.tuned()."
            )
        return factor

    @functools.cached_property
    def solution(self) -> Tensor:
        """(Σφφᵀ + λI)⁻¹ Σφyᵀ: (K, C)."""
        return torch.cholesky_solve(self.statistics.cross, self.factor)

    def spread(self, phi: Tensor) -> Tensor:
        """φᵀ(Σφφᵀ + λI)⁻¹φ of each row: (N,)."""
        root: Tensor = torch.linalg.solve_triangular(self.factor, phi.T, upper=False)
        return root.square().sum(0)

    @property
    def misfit(self) -> Tensor:
        """min ‖y − Wᵀφ‖² + λ‖W‖², summed over examples and outputs."""
        return self.statistics.squares.sum() - (self.statistics.cross * self.solution).sum()

    def best_noise(self) -> float:
        """The noise variance of highest evidence at this λ: misfit / (N·C)."""
        size = self.statistics.num_data * self.statistics.outputs
        noise = float(self.misfit) / size
        if noise <= torch.finfo(self.factor.dtype).eps * float(self.statistics.squares.sum()) / size:
            raise SingularError(
                f"with prior · noise = {self.value:g} the head fits its targets exactly, so the evidence has no "
                "highest point. Choose by hand: head.with_prior(prior, noise)."
            )
        return noise

    def log_evidence(self, noise: float) -> Tensor:
        """log p(D) = ½C (K log λ − log det(Σφφᵀ + λI)) − ½NC log 2πσ² − misfit / 2σ², with σ² = `noise`."""
        width, outputs = len(self.factor), self.statistics.outputs
        shrinkage = width * math.log(self.value) - 2 * self.factor.diagonal().log().sum()
        size = self.statistics.num_data * outputs
        return 0.5 * (outputs * shrinkage - size * math.log(2 * math.pi * noise) - self.misfit / noise)
