"""The whole matrix, for heads, adapters and theorems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .base import (
    Precision,
    in_full_precision,
    require_dense,
    require_finite,
    require_growth,
    require_nonnegative,
    singular,
    standard_normal,
)
from .diagonal import Diagonal, SignedDiagonal
from .factors import digit
from .source import Source, joined, parted, thinned


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Precision):
    """Λ as one symmetric matrix over the flattened parameters, in the order of `layout`."""

    layout: dict[str, torch.Size]
    matrix: Tensor  # (P, P)
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        size = sum(shape.numel() for shape in self.layout.values())
        require_dense(size)
        if self.matrix.shape != (size, size):
            raise ArgumentError(
                f"the parameters have {size} entries, so Λ is {size}×{size}; got {tuple(self.matrix.shape)}."
            )
        require_finite("Λ", self.matrix)
        tolerance = 64 * torch.finfo(self.matrix.dtype).eps * float(self.matrix.abs().max()) if size else 0.0
        if size and float((self.matrix - self.matrix.T).abs().max()) > tolerance:
            raise ArgumentError("a precision must be symmetric; this matrix is not.")
        if size and float(self.matrix.diagonal().min()) < -tolerance:
            raise ArgumentError("a precision cannot have a negative diagonal; this matrix has.")

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return dict(self.layout)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def matvec(self, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with in_full_precision(self.matrix):
            flat = torch.cat([delta[name].flatten() for name in self.layout])
            return self._split(self.matrix.to(flat) @ flat)

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values, vectors = torch.linalg.eigh(self._wide())
        self._require_no_negative(values)
        held = values > self._cutoff(values)
        inverse = torch.where(held, 1 / values.where(held, 1), 0)
        with in_full_precision(self.matrix):
            return self._split(vectors @ (inverse * (vectors.T @ self._flat(vector))))

    def diagonal(self) -> dict[str, Tensor]:
        return self._split(self.matrix.diagonal())

    def dense(self) -> Tensor:
        return self.matrix

    def logdet(self) -> Tensor:
        return self._positive_eigenvalues("log det", torch.linalg.eigvalsh(self._wide())).log().sum()

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        values, vectors = torch.linalg.eigh(self._wide())
        scale = self._positive_eigenvalues("a sample", values).rsqrt()
        with in_full_precision(self.matrix):
            return self._split(vectors @ (scale * standard_normal(values, generator)))

    def expanded(self, shapes: Mapping[str, torch.Size]) -> Dense:
        new = {name: shapes.get(name, shape) for name, shape in self.layout.items()}
        where, start = [], 0
        for name, shape in self.layout.items():
            place = torch.arange(new[name].numel()).view(new[name])
            require_growth(shape, new[name])
            where.append(start + place[tuple(slice(size) for size in shape)].flatten())
            start += new[name].numel()
        index = torch.cat(where).to(self.matrix.device)
        matrix = self.matrix.new_zeros(start, start)
        matrix[index.unsqueeze(1), index] = self.matrix
        return Dense(new, matrix, self.sources)

    def renamed(self, names: Mapping[str, str]) -> Dense:
        return Dense({names.get(name, name): shape for name, shape in self.layout.items()}, self.matrix, self.sources)

    def scaled(self, factor: float) -> Dense:
        return Dense(self.layout, factor * self.matrix, thinned(self.sources, factor))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Dense:
        return Dense(self.layout, self.matrix.to(device=device, dtype=dtype), self.sources)

    def plus(self, other: Precision) -> Precision | None:
        if not isinstance(other, (Dense, Diagonal, SignedDiagonal)) or not set(other.shapes) <= set(self.layout):
            return None
        sources = joined((self.layout, self.sources), (other.shapes, other.sources))
        matrix, added = self.matrix, embedded(other, self.layout).to(self.matrix.device)
        if not isinstance(other, Dense) and _would_be_lost(added.diagonal(), matrix):
            matrix = matrix.double()
        return Dense(self.layout, matrix + added, sources)

    def minus(self, part: Precision) -> Precision | None:
        if not isinstance(part, (Dense, Diagonal)) or not set(part.shapes) <= set(self.layout):
            return None
        rest = self.matrix - embedded(part, self.layout).to(self.matrix)
        require_nonnegative(rest.diagonal(), self.matrix.diagonal(), "Λ")
        return Dense(self.layout, rest, parted(self.sources, part.sources))

    def structure(self) -> dict[str, Any]:
        return {"layout": [[name, list(shape)] for name, shape in self.layout.items()]}

    @classmethod
    def rebuilt(cls, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], sources: tuple[Source, ...]) -> Dense:
        layout = {str(name): torch.Size(shape) for name, shape in structure["layout"]}
        (matrix,) = (tensors[key] for key in tensors if key == "matrix")
        return Dense(layout, matrix, sources)

    def _flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].flatten().to(self._wide()) for name in self.layout])

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = torch.split(flat, [shape.numel() for shape in self.layout.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.layout.items(), pieces, strict=True)}

    def _wide(self) -> Tensor:
        return self.matrix.double()

    def _require_no_negative(self, values: Tensor) -> None:
        # A sum in float32 is rounded as such, whatever it was cast to since.
        eps = max(torch.finfo(values.dtype).eps, torch.finfo(torch.float32).eps)
        below = int((values < -100 * len(values) * eps * float(values.abs().max())).sum()) if len(values) else 0
        if below:
            raise ArgumentError(f"this matrix is no precision: it is negative in {below} of {len(values)} directions.")

    def _cutoff(self, values: Tensor) -> float:
        return len(values) * digit(self.matrix) * max(float(values.abs().max()), 0.0) if len(values) else 0.0

    def _positive_eigenvalues(self, what: str, values: Tensor) -> Tensor:
        self._require_no_negative(values)
        free = int((values <= self._cutoff(values)).sum())
        if free:
            names = ", ".join(f"`{name}`" for name in list(self.layout)[:6]) + (" …" if len(self.layout) > 6 else "")
            raise singular(what, [f"{free} of the {len(values)} directions of {names}"])
        return values


def _would_be_lost(entries: Tensor, matrix: Tensor) -> bool:
    """Whether what is added to a diagonal, such as a weak prior, is near the rounding of the matrix."""
    if matrix.dtype == torch.float64 or not len(matrix):
        return False
    least = entries.where(entries > 0, torch.inf).min()
    return bool(least < 100 * len(matrix) * torch.finfo(matrix.dtype).eps * matrix.diagonal().abs().max())


def embedded(precision: Precision, layout: Mapping[str, torch.Size]) -> Tensor:
    """Λ as a matrix over a wider layout, zero on the parameters it does not cover."""
    size = sum(shape.numel() for shape in layout.values())
    require_dense(size)
    place, start = {}, 0
    for name, shape in layout.items():
        place[name] = torch.arange(start, start + shape.numel())
        start += shape.numel()
    inner = precision.dense()
    index = torch.cat([place[name] for name in precision.shapes]).to(inner.device)
    matrix = inner.new_zeros(size, size)
    matrix[index.unsqueeze(1), index] = inner
    return matrix
