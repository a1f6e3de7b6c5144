"""A sum of terms of different structure, or over different parameters: what `+` gives where no closed form is exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .base import DENSE_LIMIT, Precision, added
from .dense import Dense, embedded
from .diagonal import SignedDiagonal
from .iterative import conjugate_gradients
from .kinds import described, made
from .kronecker import Kronecker, require_dense_terms
from .rotated import Rotated, with_shift
from .source import Source, joined, parted, thinned


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Precision):
    """Λ = Σ terms. Terms over separate parameters are blocks: they keep their own closed forms.

    Where terms overlap, the inverse, determinant and samples are those of the dense block, if it is small enough.
    The sources are the sum's own: a term that absorbed a part of another no longer tells which parameters each of its
    sources is about, and the same data would count twice.
    """

    terms: tuple[Precision, ...]
    sources: tuple[Source, ...] = ()

    @staticmethod
    def of(*parts: Precision) -> Sum:
        """The parts as one sum, like added to like."""
        terms: list[Precision] = []
        for part in parts:
            for new in part.terms if isinstance(part, Sum) else (part,):
                for index, term in enumerate(terms):
                    combined = term.plus(new) or new.plus(term)
                    if combined is not None:
                        terms[index] = combined
                        break
                else:
                    terms.append(new)
        return Sum(tuple(terms), joined(*((part.shapes, part.sources) for part in parts)))

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: shape for term in self.terms for name, shape in term.shapes.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": tensor for i, term in enumerate(self.terms) for name, tensor in term.tensors.items()}

    def matvec(self, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return added(*(term.matvec(delta) for term in self.terms))

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for members in self._groups():
            names = list(dict.fromkeys(name for member in members for name in member.shapes))
            block = members[0] if len(members) == 1 else _closed(members)
            if block is None and sum(vector[name].numel() for name in names) > DENSE_LIMIT:
                found |= conjugate_gradients(Sum(tuple(members)).matvec, vector, names)
            else:
                found |= (block or _densified(members)).solve(vector)
        return found

    def diagonal(self) -> dict[str, Tensor]:
        return added(*(term.diagonal() for term in self.terms))

    def dense(self) -> Tensor:
        return _densified(list(self.terms)).matrix

    def logdet(self) -> Tensor:
        return sum((block.logdet() for block in self._apart()), start=torch.zeros(()))

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        kinds = (tensor.dtype for tensor in self.tensors.values())
        dtype = functools.reduce(torch.promote_types, kinds, torch.float32)
        return {name: value.to(dtype) for block in self._apart() for name, value in block.sample(generator).items()}

    def expanded(self, shapes: Mapping[str, torch.Size]) -> Sum:
        return Sum(tuple(term.expanded(shapes) for term in self.terms), self.sources)

    def renamed(self, names: Mapping[str, str]) -> Sum:
        return Sum(tuple(term.renamed(names) for term in self.terms), self.sources)

    def scaled(self, factor: float) -> Sum:
        return Sum(tuple(term.scaled(factor) for term in self.terms), thinned(self.sources, factor))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sum:
        return Sum(tuple(term.to(device, dtype) for term in self.terms), self.sources)

    def plus(self, other: Precision) -> Precision | None:
        return Sum.of(self, other)

    def minus(self, part: Precision) -> Precision | None:
        rest: list[Precision] = list(self.terms)
        for out in part.terms if isinstance(part, Sum) else (part,):
            for index, term in enumerate(rest):
                left = term.minus(out)
                if left is not None:
                    rest[index] = left
                    break
            else:
                return None
        return Sum(tuple(term for term in rest if term.shapes), parted(self.sources, part.sources))

    def __repr__(self) -> str:
        kinds = " + ".join(type(term).__name__ for term in self.terms)
        entries = sum(shape.numel() for shape in self.shapes.values())
        data = f"{self.num_data:g} {self.unit}s" if self.unit else "no data"
        return f"Sum({kinds}: {entries:,} entries of {len(self.shapes)} parameters, {data})"

    def merged(self) -> Sum:
        terms: list[Precision] = []
        for new in (term.merged() for term in self.terms):
            for index, term in enumerate(terms):
                both = term.merged_with(new) if isinstance(term, Rotated) and isinstance(new, Rotated) else None
                if both is not None:
                    terms[index] = both
                    break
            else:
                terms.append(new)
        return Sum(tuple(terms), self.sources)

    def is_zero(self) -> bool:
        return all(term.is_zero() for term in self.terms)

    def blocks(self) -> tuple[Precision, ...]:
        return tuple(self._apart())

    def nearest(self) -> Precision:
        """Kronecker terms with one product per layer, the nearest to their sum; the other terms as they are."""
        return self._with(Kronecker.nearest)

    def rotated(self) -> Precision:
        """Kronecker terms as diagonals in their own eigenvectors; the other terms as they are."""
        return self._with(Kronecker.rotated)

    def _with(self, change: Callable[[Kronecker], Precision]) -> Precision:
        if not any(isinstance(term, Kronecker) for term in self.terms):
            raise ArgumentError("there are no Kronecker factors in this sum: use kronecker_fisher.")
        return Sum(tuple(change(term) if isinstance(term, Kronecker) else term for term in self.terms), self.sources)

    def structure(self) -> dict[str, Any]:
        return {"terms": [described(term) for term in self.terms]}

    @classmethod
    def rebuilt(cls, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], sources: tuple[Source, ...]) -> Sum:
        terms = []
        for index, inner in enumerate(structure["terms"]):
            mark = f"{index}."
            mine = {key.removeprefix(mark): value for key, value in tensors.items() if key.startswith(mark)}
            terms.append(made(inner, mine))
        return Sum(tuple(terms), sources)

    def _apart(self) -> list[Precision]:
        """The same sum over separate parameters: blocks of the terms, those that overlap as one dense block."""
        return [
            members[0] if len(members) == 1 else _closed(members) or _densified(members) for members in self._groups()
        ]

    def _groups(self) -> list[list[Precision]]:
        """The terms' blocks, those that overlap together."""
        groups: list[tuple[set[str], list[Precision]]] = []
        for block in (block for term in self.terms for block in term.blocks()):
            names, members = set(block.shapes), [block]
            for group in [group for group in groups if group[0] & names]:
                groups.remove(group)
                names, members = names | group[0], group[1] + members
            groups.append((names, members))
        return [members for _, members in groups]


def _closed(members: list[Precision]) -> Precision | None:
    """The sum of a Kronecker product and a number times the identity, in the product's eigenvectors."""

    def rotated(member: Precision) -> Precision:
        if not isinstance(member, Kronecker):
            return member
        return member if any(len(terms) > 1 for terms in member.layers.values()) else member.in_eigenvectors(cut=False)

    return with_shift([rotated(member) for member in members])


def settled(precision: Precision) -> Precision:
    """The same without signed diagonals; raises where one is negative."""
    if isinstance(precision, SignedDiagonal):
        return precision.precision()
    terms = precision.terms if isinstance(precision, Sum) else ()
    return Sum(tuple(map(settled, terms)), precision.sources) if terms else precision


def _densified(terms: list[Precision]) -> Dense:
    for layer, parts in ((k, v) for term in terms if isinstance(term, Kronecker) for k, v in term.layers.items()):
        if len(parts) > 1:
            require_dense_terms(layer, len(parts))
    layout = {name: shape for term in terms for name, shape in term.shapes.items()}
    size = sum(shape.numel() for shape in layout.values())
    if size > DENSE_LIMIT:
        kinds = " and ".join(dict.fromkeys(type(term).__name__ for term in terms))
        raise ArgumentError(
            f"{kinds} over `{next(iter(layout))}` have no closed form together, and its {size:,} entries are too many "
            "for a dense matrix. Take one structure for both (one Fisher for all tasks), a prior that is one number, "
            "or their diagonals: holdfast.Diagonal(precision.diagonal(), precision.sources)."
        )
    matrix: Tensor = sum(embedded(term, layout) for term in terms)  # type: ignore[assignment]
    return Dense(layout, matrix, joined(*((term.shapes, term.sources) for term in terms)))
