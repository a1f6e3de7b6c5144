"""Inverse, determinant and samples of D + UUᵀ through matrices of rank × rank, also where entries of D are zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .base import singular

# Columns that are worked on at once.
COLUMNS = 1 << 16


@dataclass(frozen=True)
class Columns:
    """D and Uᵀ over the flattened parameters, some columns at a time, in float64: Woodbury's formula cancels digits."""

    entries: Mapping[str, Tensor]  # D
    factors: Mapping[str, Tensor]  # Uᵀ, (rank, *shape); zero for a parameter that it lacks

    def __iter__(self) -> Iterator[tuple[str, slice, Tensor, Tensor]]:
        for name, entries in self.entries.items():
            D = entries.flatten()
            U = flat(self.factors[name]) if name in self.factors else D.new_zeros(self.rank, 1).expand(-1, len(D))
            for start in range(0, len(D), COLUMNS):
                part = slice(start, start + COLUMNS)
                yield name, part, D[part].double(), U[:, part].double()

    @cached_property
    def rank(self) -> int:
        """How many directions there are."""
        return len(next(iter(self.factors.values()), ()))

    @cached_property
    def device(self) -> torch.device:
        """Where the small matrices are."""
        return next((each.device for each in (self.factors or self.entries).values()), torch.device("cpu"))

    def zeros(self, columns: int) -> Tensor:
        """(rank, columns) to sum into."""
        return torch.zeros(self.rank, columns, dtype=torch.float64, device=self.device)

    def gram(self, weight: Callable[[Tensor], Tensor]) -> Tensor:
        """Uᵀ w(D) U, (rank, rank)."""
        total = self.zeros(self.rank)
        for _, _, D, U in self:
            total += ((U * weight(D)) @ U.T).to(total)
        return total

    def along(self, weight: Callable[[Tensor], Tensor], vector: Mapping[str, Tensor]) -> Tensor:
        """Uᵀ w(D) v, (rank, 1)."""
        total = self.zeros(1)
        for name, part, D, U in self:
            total += (U @ (weight(D) * vector[name].flatten()[part].to(U)).unsqueeze(1)).to(total)
        return total

    def written(self, value: Callable[[str, slice, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        """Named tensors in the parameters' shapes, piece by piece, in float32 at least."""
        found = {name: torch.empty_like(each, dtype=_wide(each)).flatten() for name, each in self.entries.items()}
        for name, part, D, U in self:
            found[name][part] = value(name, part, D, U).to(found[name].dtype)
        return {name: each.view(self.entries[name].shape) for name, each in found.items()}


def solved(columns: Columns, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(D + UUᵀ)⁺v.

    Where D > 0, x = D⁻¹(v − Us) with s = Uᵀx. Where D is zero Λ spans no more than U does: there x = US⁺t, and Us is
    the part of v in that span. With M = I + UᵀD⁻¹U over the former and S = UᵀU = VσVᵀ over the latter,
    s = M⁻¹(UᵀD⁻¹v + Vt).
    """
    M = columns.gram(_reciprocal) + torch.eye(columns.rank, dtype=torch.float64, device=columns.device)
    values, V = torch.linalg.eigh(columns.gram(_is_zero))
    spanned = values > columns.rank * torch.finfo(values.dtype).eps * values.max() if columns.rank else values > 0
    V, values = V[:, spanned], values[spanned].unsqueeze(1)
    c, g = columns.along(_reciprocal, vector), columns.along(_is_zero, vector)
    t = torch.linalg.solve(V.T @ torch.linalg.solve(M, V), V.T @ g / values - V.T @ torch.linalg.solve(M, c))
    s, free = torch.linalg.solve(M, c + V @ t), V @ (t / values)

    def value(name: str, part: slice, D: Tensor, U: Tensor) -> Tensor:
        held = _reciprocal(D) * (vector[name].flatten()[part].to(U) - (s.T.to(U) @ U)[0])
        return torch.where(D > 0, held, (free.T.to(U) @ U)[0])

    return columns.written(value)


def logdet(columns: Columns) -> Tensor:
    """log det D + log det(I + UᵀD⁻¹U), and where D is zero the Schur complement's."""
    values, vectors, free = _spectrum(columns, "log det")
    total: Tensor = values.log1p().sum() + torch.linalg.slogdet(_schur(values, vectors, free)).logabsdet
    for _, _, D, _ in columns:
        total = total + D.where(D > 0, 1).log().sum().to(total)
    return total


def sampled(columns: Columns, noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(D + UUᵀ)^(−½) times standard normal `noise`, up to a rotation: D^(−½)(I + VVᵀ)^(−½) with V = D^(−½)U.

    With VᵀV = R diag(λ) Rᵀ and r = √(1 + λ), (I + VVᵀ)^(−½) = I − V R diag(1/(r(1 + r))) RᵀVᵀ.
    """
    values, vectors, free = _spectrum(columns, "a sample")
    root = (1 + values).sqrt().unsqueeze(1)
    along = columns.along(lambda D: _reciprocal(D).sqrt(), noise)
    pull = vectors @ ((vectors.T @ along) / (root * (1 + root)))
    # Where D is zero: a draw with the Schur complement as its precision, which the rest then follows.
    own = [noise[name].flatten()[each.flatten() == 0] for name, each in columns.entries.items()]
    few = torch.cat([values[:0], *(each.to(values) for each in own)]).unsqueeze(1)
    upper = torch.linalg.cholesky(_schur(values, vectors, free)).T
    loose = torch.linalg.solve_triangular(upper, few, upper=True)  # (zeros of D, 1)
    pull = pull + vectors @ ((vectors.T @ (free @ loose)) / root.square())
    left = iter(loose.flatten().split([int(_is_zero(D).sum()) for _, _, D, _ in columns]))

    def value(name: str, part: slice, D: Tensor, U: Tensor) -> Tensor:
        drawn: Tensor = (
            _reciprocal(D).sqrt() * noise[name].flatten()[part].to(U) - _reciprocal(D) * (pull.T.to(U) @ U)[0]
        )
        return drawn.masked_scatter(D == 0, next(left).to(drawn))

    return columns.written(value)


def _spectrum(columns: Columns, what: str) -> tuple[Tensor, Tensor, Tensor]:
    """UᵀD⁻¹U where D > 0, as eigenvalues and eigenvectors, and the columns of Uᵀ where D is zero, (rank, few).

    Raises where Λ is singular: every zero of D needs a direction of its own.
    """
    dead = {name: int((entries == 0).sum()) for name, entries in columns.entries.items()}
    error = singular(what, (f"{count} entries of the diagonal of `{n}`" for n, count in dead.items() if count))
    if sum(dead.values()) > columns.rank:
        raise error
    values, vectors = torch.linalg.eigh(columns.gram(_reciprocal))
    values = values.clamp(min=0)
    free = torch.cat([columns.zeros(0), *(U[:, D == 0].to(columns.device) for _, _, D, U in columns)], 1)
    left = torch.linalg.eigvalsh(_schur(values, vectors, free))
    if len(left) and float(left.min()) <= len(left) * torch.finfo(left.dtype).eps * float(left.max()):
        raise error
    return values, vectors, free


def flat(factors: Tensor) -> Tensor:
    """Uᵀ as a matrix, (rank, size)."""
    return factors.reshape(len(factors), factors.shape[1:].numel())


def _schur(values: Tensor, vectors: Tensor, free: Tensor) -> Tensor:
    """Λ where D is zero, the rest eliminated: U(I + UᵀD⁻¹U)⁻¹Uᵀ."""
    turned = vectors.T @ free
    return turned.T @ (turned / (1 + values).unsqueeze(1))


def _reciprocal(D: Tensor) -> Tensor:
    return torch.where(D > 0, 1 / D.where(D > 0, 1), 0)


def _is_zero(D: Tensor) -> Tensor:
    return (D == 0).to(D.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
