"""A sum of terms of different structure, or over different parameters: what `+` gives where no closed form is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Precision, Source, added, joined, thinned
from .dense import Dense, embedded


@dataclass(frozen=True, eq=False)
class Sum(Precision):
    """Λ = Σ terms. Terms over separate parameters are blocks: they keep their own closed forms.

    Where terms overlap, the inverse, determinant and samples are those of the dense block, if it is small enough.
    """

    terms: tuple[Precision, ...]
    sources: tuple[Source, ...]

    @staticmethod
    def of(*parts: Precision) -> Sum:
        """The parts as one sum, like added to like; the sum, not its terms, says where it came from."""
        terms: list[Precision] = []
        for part in parts:
            for new in part.terms if isinstance(part, Sum) else (part.attributed(()),):
                for index, term in enumerate(terms):
                    combined = term.plus(new) or new.plus(term)
                    if combined is not None:
                        terms[index] = combined
                        break
                else:
                    terms.append(new)
        return Sum(tuple(terms), joined(*(part.sources for part in parts)))

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: shape for term in self.terms for name, shape in term.shapes.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": tensor for i, term in enumerate(self.terms) for name, tensor in term.tensors.items()}

    def matvec(self, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return added(*(term.matvec(delta) for term in self.terms))

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for block in self._blocks() for name, value in block.solve(vector).items()}

    def diagonal(self) -> dict[str, Tensor]:
        return added(*(term.diagonal() for term in self.terms))

    def dense(self) -> Tensor:
        return _densified(list(self.terms)).matrix

    def logdet(self) -> Tensor:
        total: Tensor = sum(block.logdet() for block in self._blocks())  # type: ignore[assignment]
        return total

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        return {name: value for block in self._blocks() for name, value in block.sample(generator).items()}

    def expanded(self, shapes: Mapping[str, torch.Size]) -> Sum:
        return Sum(tuple(term.expanded(shapes) for term in self.terms), self.sources)

    def scaled(self, factor: float) -> Sum:
        return Sum(tuple(term.scaled(factor) for term in self.terms), thinned(self.sources, factor))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sum:
        return Sum(tuple(term.to(device, dtype) for term in self.terms), self.sources)

    def plus(self, other: Precision) -> Precision | None:
        return Sum.of(self, other)

    def structure(self) -> dict[str, Any]:
        return {"kind": "sum", "terms": [term.structure() for term in self.terms]}

    def _blocks(self) -> list[Precision]:
        """The same sum over separate parameters: a term alone, or the dense sum of terms that overlap."""
        groups: list[list[Precision]] = []
        for term in self.terms:
            touching = [group for group in groups if any(set(other.shapes) & set(term.shapes) for other in group)]
            groups = [group for group in groups if group not in touching]
            groups.append([other for group in touching for other in group] + [term])
        return [group[0] if len(group) == 1 else _densified(group) for group in groups]


def _densified(terms: list[Precision]) -> Dense:
    layout = {name: shape for term in terms for name, shape in term.shapes.items()}
    matrix: Tensor = sum(embedded(term, layout) for term in terms)  # type: ignore[assignment]
    return Dense(layout, matrix)
