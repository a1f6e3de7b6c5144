"""A number per parameter: the Λ of EWC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..devices import full
from ..errors import ArgumentError
from .base import (
    Precision,
    added,
    counted,
    grown,
    require_dense,
    require_finite,
    require_nonnegative,
    singular,
    standard_normal,
)
from .source import Source, joined, parted, thinned


@dataclass(frozen=True, eq=False, repr=False)
class _Entrywise(Precision):
    """What a diagonal does whatever its signs."""

    entries: dict[str, Tensor]
    sources: tuple[Source, ...] = ()

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: entries.shape for name, entries in self.entries.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(self.entries)

    def matvec(self, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: entries * delta[name] for name, entries in self.entries.items()}

    def diagonal(self) -> dict[str, Tensor]:
        return self.tensors

    def entrywise(self) -> dict[str, Tensor] | None:
        return self.entries

    def dense(self) -> Tensor:
        require_dense(sum(entries.numel() for entries in self.entries.values()))
        if not self.entries:
            return torch.zeros(0, 0)
        flat = torch.cat([entries.flatten() for entries in self.entries.values()])
        return flat.diag()

    def expanded(self, shapes: Mapping[str, torch.Size]) -> Self:
        return type(self)(
            {name: grown(entries, shapes.get(name, entries.shape)) for name, entries in self.entries.items()},
            self.sources,
        )

    def renamed(self, names: Mapping[str, str]) -> Self:
        return type(self)({names.get(name, name): entries for name, entries in self.entries.items()}, self.sources)

    def scaled(self, factor: float) -> Self:
        entries = {name: factor * entries for name, entries in self.entries.items()}
        return type(self)(entries, thinned(self.sources, factor))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        entries = {name: entries.to(device=device, dtype=dtype) for name, entries in self.entries.items()}
        return type(self)(entries, self.sources)

    def structure(self) -> dict[str, Any]:
        return {}

    @classmethod
    def rebuilt(cls, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], sources: tuple[Source, ...]) -> Self:
        return cls(dict(tensors), sources)


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(_Entrywise):
    """Λ = diag(entries), entries ≥ 0.

    >>> Λ = Diagonal({"w": torch.tensor([1.0, 4.0])})
    >>> Λ.quadratic({"w": torch.tensor([1.0, 0.5])})
    tensor(2.)
    """

    def __post_init__(self) -> None:
        for name, entries in self.entries.items():
            require_finite(name, entries)
        negative = {name: int(full((entries < 0).sum())) for name, entries in self.entries.items()}
        if any(negative.values()):
            named = ", ".join(f"{count} in `{name}`" for name, count in negative.items() if count)
            raise ArgumentError(
                f"a precision cannot be negative, but has negative entries: {named}. A Hessian's diagonal is negative "
                "away from a minimum: train longer, or take diagonal_hessian(...).clamped()."
            )

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: torch.where(entries > 0, vector[name] / entries.where(entries > 0, 1), 0)
            for name, entries in self.entries.items()
        }

    def logdet(self) -> Tensor:
        self._require_positive("log det")
        return sum((full(entries.log().sum()) for entries in self.entries.values()), start=torch.zeros(()))

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        self._require_positive("a sample")
        return {name: standard_normal(entries, generator) / entries.sqrt() for name, entries in self.entries.items()}

    def plus(self, other: Precision) -> Precision | None:
        if isinstance(other, Diagonal):
            sources = joined((self.entries, self.sources), (other.entries, other.sources))
            return Diagonal(_sum(self.entries, other.entries), sources)
        return None

    def minus(self, part: Precision) -> Precision | None:
        if not isinstance(part, Diagonal) or not set(part.entries) <= set(self.entries):
            return None
        rest = dict(self.entries)
        for name, entries in part.entries.items():
            rest[name] = require_nonnegative(rest[name] - entries, rest[name], name)
        return Diagonal(rest, parted(self.sources, part.sources))

    def blocks(self) -> tuple[Precision, ...]:
        return tuple(Diagonal({name: entries}, self.sources) for name, entries in self.entries.items())

    def _require_positive(self, what: str) -> None:
        dead = {name: int(full((entries == 0).sum())) for name, entries in self.entries.items()}
        if any(dead.values()):
            raise singular(what, (counted(count, name) for name, count in dead.items() if count))


@dataclass(frozen=True, eq=False, repr=False)
class SignedDiagonal(_Entrywise):
    """The diagonal of a Hessian as it was found, negative entries included. Not a precision until it is one.

    It scales and adds; `consolidate` takes it where the sum with the posterior's Λ is nowhere negative, and
    `clamped()` makes it a precision by force.
    """

    def __post_init__(self) -> None:
        for name, entries in self.entries.items():
            require_finite(name, entries)

    @property
    def negative(self) -> dict[str, int]:
        """How many entries of each parameter are below zero."""
        return {name: int(full((entries < 0).sum())) for name, entries in self.entries.items()}

    def clamped(self) -> Diagonal:
        """Negative entries set to zero: directions in which the loss curves downwards are not held at all."""
        return Diagonal({name: entries.clamp(min=0) for name, entries in self.entries.items()}, self.sources)

    def precision(self) -> Diagonal:
        """The same as a precision; raises where an entry is negative."""
        return Diagonal(self.entries, self.sources)

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.precision().solve(vector)

    def logdet(self) -> Tensor:
        return self.precision().logdet()

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return self.precision().sample(generator)

    def plus(self, other: Precision) -> Precision | None:
        if isinstance(other, (Diagonal, SignedDiagonal)):
            sources = joined((self.entries, self.sources), (other.entries, other.sources))
            return SignedDiagonal(_sum(self.entries, other.entries), sources)
        return None


def _sum(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """a + b over all the names, sharing memory with neither."""
    return {name: value.clone() if (name in a) != (name in b) else value for name, value in added(a, b).items()}
