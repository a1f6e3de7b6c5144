"""Mean and the longest directions of a covariance, from one pass over rows in constant memory."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Rows R with RᵀR near the scatter Σ (x−m)(x−m)ᵀ, cut to the longest directions; its diagonal exactly.

    A batch adds its centered rows, and one row for the distance of its mean from the mean so far (Ross et al. 2008).
    """

    def __init__(self, rank: int) -> None:
        self.count = 0
        self._rank = rank
        self._mean = torch.zeros(0)
        self._squares = torch.zeros(0)  # Σ (x−m)², entry by entry
        self._rows = torch.zeros(0)

    def add(self, x: Tensor) -> None:
        """Rows (n, entries)."""
        x = x.double()
        mean = x.mean(0)
        centered = x - mean
        if not self.count:
            self._mean, self._squares, self._rows = mean, centered.square().sum(0), centered
            self.count = len(x)
        else:
            both = self.count + len(x)
            apart = (mean - self._mean) * (self.count * len(x) / both) ** 0.5
            self._rows = torch.cat([self._rows, centered, apart.unsqueeze(0)])
            self._squares = self._squares + centered.square().sum(0) + apart.square()
            self._mean = self._mean + (mean - self._mean) * (len(x) / both)
            self.count = both
        if len(self._rows) > 4 * self._rank + 64:
            self._rows = longest(self._rows, 2 * self._rank)

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean, factors U (rank or fewer, entries) and a diagonal: UᵀU + diag has the covariance's own diagonal."""
        factors = longest(self._rows, min(self._rank, self.count - 1)) / self.count**0.5
        rest = (self._squares / self.count - factors.square().sum(0)).clamp(min=0)
        return self._mean, factors, rest


def longest(rows: Tensor, rank: int) -> Tensor:
    """The `rank` longest principal directions of rows, with their lengths: turned even where all are kept, for the rows
    themselves are the inputs."""
    rank = min(rank, *rows.shape)
    if rows.shape[1] < len(rows):  # in the smaller of the two spaces
        values, vectors = torch.linalg.eigh(rows.T @ rows)
        first = len(values) - rank
        found: Tensor = vectors[:, first:].T * values[first:].clamp(min=0).sqrt().unsqueeze(1)
        return found
    _, vectors = torch.linalg.eigh(rows @ rows.T)
    turned: Tensor = vectors[:, len(rows) - rank :].T @ rows
    return turned
