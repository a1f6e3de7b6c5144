"""A diagonal, and a few directions over all parameters at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..params import some
from .base import (
    Precision,
    added,
    grown,
    require_dense,
    require_finite,
    require_nonnegative,
    standard_normal,
)
from .dense import Dense
from .diagonal import Diagonal
from .source import Source, joined, parted, thinned
from .woodbury import Columns, flat, logdet, sampled, solved


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(Precision):
    """Λ = D + UUᵀ: D ≥ 0 is diagonal, and a column of U is a direction over all the parameters jointly.

    `factors` holds Uᵀ, (rank, *shape) for each parameter; one that it lacks has its diagonal alone. No P × P matrix is
    ever made. `kept` is how many directions `merged()` keeps, or None for as many as there are.

    >>> Λ = LowRank({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([[1.0, 2.0]])})
    >>> Λ.dense()
    tensor([[2., 2.],
            [2., 4.]])
    """

    entries: dict[str, Tensor]  # D
    factors: dict[str, Tensor]  # Uᵀ
    kept: int | None = None
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        for name, entries in self.entries.items():
            require_finite(name, entries)
            if bool((entries < 0).any()):
                raise ArgumentError(
                    f"a precision cannot be negative, but the diagonal of `{name}` has {int((entries < 0).sum())} "
                    "negative entries."
                )
        unknown = [name for name in self.factors if name not in self.entries]
        if unknown:
            raise ArgumentError(f"there are directions for {some(unknown)} and no diagonal. Give one, of zeros maybe.")
        ranks: dict[int, str] = {}
        for name, factors in self.factors.items():
            require_finite(f"directions of {name}", factors)
            shape = self.entries[name].shape
            if factors.ndim == 0 or factors.shape[1:] != shape:
                raise ArgumentError(
                    f"the directions of `{name}`, of shape {tuple(shape)}, have the number of directions in front of "
                    f"it; got {tuple(factors.shape)}."
                )
            ranks.setdefault(len(factors), name)
        if len(ranks) > 1:
            (one, first), (other, second), *_ = ranks.items()
            raise ArgumentError(
                f"`{first}` has {one} directions and `{second}` has {other}, but a direction spans all parameters. "
                "Fill up with zeros."
            )
        if self.kept is not None:
            require_rank(self.kept)

    @property
    def rank(self) -> int:
        """How many directions there are."""
        return self._columns.rank

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: entries.shape for name, entries in self.entries.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        diagonals = {f"{name}.diagonal": entries for name, entries in self.entries.items()}
        return diagonals | {f"{name}.directions": factors for name, factors in self.factors.items()}

    def matvec(self, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with self._in_full_precision():
            along = self._along(delta)
            found = {name: entries * delta[name] for name, entries in self.entries.items()}
            for name, factors in self.factors.items():
                pull = along.to(factors.device) @ flat(factors).to(along.dtype)
                found[name] = found[name] + pull.view(factors.shape[1:])
            return found

    def quadratic(self, delta: Mapping[str, Tensor]) -> Tensor:
        with self._in_full_precision():
            along = self._along(delta)
            apart = ((entries * delta[name].square()).sum() for name, entries in self.entries.items())
            return sum((each.to(along.device) for each in apart), start=along.square().sum())

    def solve(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with self._in_full_precision():
            return solved(self._columns, vector)

    def diagonal(self) -> dict[str, Tensor]:
        return added(self.entries, {name: factors.square().sum(0) for name, factors in self.factors.items()})

    def dense(self) -> Tensor:
        require_dense(sum(entries.numel() for entries in self.entries.values()))
        like = torch.empty(0, dtype=self._dtype, device=self._columns.device)
        D = torch.cat([like, *(each.to(like) for _, _, each, _ in self._columns)])
        U = torch.cat([like.expand(self.rank, 0), *(each.to(like) for _, _, _, each in self._columns)], 1)
        with self._in_full_precision():
            return D.diag() + U.T @ U

    def logdet(self) -> Tensor:
        with self._in_full_precision():
            return logdet(self._columns).to(self._dtype)

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        noise = {name: standard_normal(entries, generator) for name, entries in self.entries.items()}
        with self._in_full_precision():
            return sampled(self._columns, noise)

    def merged(self, rank: int | None = None) -> LowRank:
        """The nearest UUᵀ of `rank` directions (or `kept`), and on the diagonal what was cut off: diag Λ stays exact.

        An approximation: off the diagonal, the directions that were cut are gone. With it memory does not grow with
        the number of tasks.
        """
        rank = require_rank(rank if rank is not None else self.kept or self.rank or 1)
        if rank >= self.rank:
            return replace(self, kept=rank)
        with self._in_full_precision():
            gram = self._columns.gram(torch.ones_like)
            turn = torch.linalg.eigh(gram).eigenvectors.flip(1).T  # (rank, rank), the longest direction first
            entries, factors = dict(self.entries), {}
            for name, old in self.factors.items():
                wide = torch.promote_types(old.dtype, torch.float32)
                turned = (turn.to(old.device, wide) @ flat(old).to(wide)).view(old.shape)
                entries[name] = (entries[name] + turned[rank:].square().sum(0)).to(entries[name].dtype)
                factors[name] = turned[:rank].to(old.dtype, copy=True)
        return LowRank(entries, factors, rank, self.sources)

    def expanded(self, shapes: Mapping[str, torch.Size]) -> LowRank:
        new = {name: shapes.get(name, entries.shape) for name, entries in self.entries.items()}
        entries = {name: grown(entries, new[name]) for name, entries in self.entries.items()}
        factors = {name: grown(each, torch.Size([len(each), *new[name]])) for name, each in self.factors.items()}
        return replace(self, entries=entries, factors=factors)

    def renamed(self, names: Mapping[str, str]) -> LowRank:
        entries = {names.get(name, name): entries for name, entries in self.entries.items()}
        return replace(self, entries=entries, factors={names.get(n, n): each for n, each in self.factors.items()})

    def scaled(self, factor: float) -> LowRank:
        entries = {name: factor * entries for name, entries in self.entries.items()}
        factors = {name: factor**0.5 * each for name, each in self.factors.items()}
        return LowRank(entries, factors, self.kept, thinned(self.sources, factor))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LowRank:
        entries = {name: entries.to(device=device, dtype=dtype) for name, entries in self.entries.items()}
        factors = {name: each.to(device=device, dtype=dtype) for name, each in self.factors.items()}
        return replace(self, entries=entries, factors=factors)

    def plus(self, other: Precision) -> Precision | None:
        """Exact: diagonals add, and directions are put together. `merged()` makes them fewer again."""
        if isinstance(other, Dense) and set(self.entries) <= set(other.layout):
            return other.plus(Dense(self.shapes, self.dense(), self.sources))
        if isinstance(other, Diagonal):
            other = LowRank(other.entries, {}, None, other.sources)
        elif not isinstance(other, LowRank) or not set(self.entries) & set(other.entries):
            return None  # over separate parameters they are blocks, and need no zeros in between
        entries = {name: each.clone() for name, each in added(self.entries, other.entries).items()}
        factors = {}
        for name in (name for name in entries if name in self.factors or name in other.factors):
            both = (
                part.factors.get(name, entries[name].new_zeros(part.rank, *entries[name].shape))
                for part in (self, other)
            )
            factors[name] = torch.cat([each.to(entries[name].device) for each in both])
        kept = max(self.kept or self.rank, other.kept or other.rank) or None
        return LowRank(entries, factors, kept, joined((self.entries, self.sources), (other.entries, other.sources)))

    def minus(self, part: Precision) -> Precision | None:
        if not isinstance(part, Diagonal) or not set(part.entries) <= set(self.entries):
            return None
        rest = dict(self.entries)
        for name, entries in part.entries.items():
            rest[name] = require_nonnegative(rest[name] - entries, rest[name], name)
        return replace(self, entries=rest, sources=parted(self.sources, part.sources))

    def blocks(self) -> tuple[Precision, ...]:
        alone = [Diagonal({n: each}, self.sources) for n, each in self.entries.items() if n not in self.factors]
        joint = {name: self.entries[name] for name in self.factors}
        return (*alone, *([replace(self, entries=joint)] if joint else []))

    def structure(self) -> dict[str, Any]:
        return {"kept": self.kept}

    @classmethod
    def rebuilt(
        cls, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], sources: tuple[Source, ...]
    ) -> LowRank:
        parts: dict[str, dict[str, Tensor]] = {"diagonal": {}, "directions": {}}
        for key, tensor in tensors.items():
            name, _, part = key.rpartition(".")
            parts[part][name] = tensor
        return LowRank(parts["diagonal"], parts["directions"], structure["kept"], sources)

    def __repr__(self) -> str:
        return f"LowRank(rank {self.rank}, {Precision.__repr__(self).removeprefix('LowRank(')}"

    @property
    def _columns(self) -> Columns:
        return Columns(self.entries, self.factors)

    @property
    def _dtype(self) -> torch.dtype:
        dtype = torch.float32
        for entries in self.entries.values():
            dtype = torch.promote_types(dtype, entries.dtype)
        return dtype

    def _in_full_precision(self) -> torch.autocast:
        """Under autocast a matmul would run in half precision, whatever the directions are kept in."""
        return torch.autocast(self._columns.device.type, enabled=False)

    def _along(self, delta: Mapping[str, Tensor]) -> Tensor:
        """Uᵀδ: how far δ goes along each direction."""
        along = torch.zeros(self.rank, device=self._columns.device)
        for name, factors in self.factors.items():
            wide = torch.promote_types(torch.promote_types(factors.dtype, delta[name].dtype), torch.float32)
            along = along + (flat(factors).to(wide) @ delta[name].flatten().to(wide)).to(along.device)
        return along


def require_rank(rank: Any) -> int:
    """A number of directions; raises for anything else."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ArgumentError(f"a rank is a number of directions, a positive integer; got {rank!r}.")
    return rank
