"""F against F′: squares of gradients, of one kind or another, against the Hessian's diagonal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..curvature import diagonal_fisher
from ..curvature.batches import read
from ..likelihood import Likelihood
from .derivatives import Start
from .hessian import Hessian
from .task import Task, confidence, joined

HESSIAN, LITERAL, ROW_SUMS = "Hessian diagonal F′", "(∂L/∂θ)² of the total loss", "row sums |H·1|"
# So many groups of examples by confidence, and so many entries in the picture.
_GROUPS, _SHOWN = 4, 1500


@dataclass(frozen=True)
class Compared:
    """One diagonal: its sum in nats per example, and against F′ and the best Fisher: scale and order.

    `scale` is the sum over that of F′; `rank` and `rank_fisher` are Spearman's correlations with the two.
    """

    name: str
    total: float
    scale: float
    rank: float
    rank_fisher: float


@dataclass(frozen=True)
class Group:
    """Examples of like confidence: the observed Fisher's trace over the best one's."""

    examples: int
    confidence: float
    ratio: float


@dataclass(frozen=True)
class Fishers:
    """Every diagonal beside F′, and how the observed one fades where the model is sure."""

    compared: tuple[Compared, ...]
    best: str  # the name of the best Fisher that this likelihood has
    exact_hessian: bool
    negative: float | None  # the part of F′'s entries below zero; an estimate does not tell
    confidence: float | None  # the mean probability of the model's own guess
    groups: tuple[Group, ...]  # from unsure to sure
    shown: Mapping[str, tuple[float, ...]]  # some entries of each, the same ones

    def of(self, name: str) -> Compared:
        """One of the diagonals."""
        return next(each for each in self.compared if each.name == name)

    def has(self, name: str) -> bool:
        """Whether a diagonal is among them: not every likelihood has an exact Fisher, or draws labels."""
        return any(each.name == name for each in self.compared)


@dataclass(frozen=True)
class Diagonals:
    """The Fishers' diagonals, by whose labels they take; and traces by confidence."""

    entries: Mapping[str, Tensor]  # "observed", and "sampled" and "expected" where the likelihood has them
    best: str
    groups: tuple[Group, ...]


def diagonals(task: Task, start: Start, seed: int, *, grouped: bool) -> Diagonals:
    """Σₙ gₙ² under observed, sampled and expected labels, the first and the best by groups of like confidence."""
    kinds = ["observed"]
    if type(task.likelihood).sampled is not Likelihood.sampled:
        kinds.append("sampled")
    if start.targets == "expected":
        kinds.append("expected")
    best = start.targets
    parts = _groups(task, start) if grouped else [task.batches]
    found: dict[str, Tensor] = {}
    traces: dict[str, list[float]] = {}
    for kind in kinds:
        for index, part in enumerate(parts if kind in ("observed", best) else [task.batches]):
            fisher = diagonal_fisher(
                task.model, part, task.likelihood, targets=_kind(kind), seed=seed + index, forward=task.forward
            )
            entries = joined({name: fisher.entries[name] for name in task.named})
            found[kind] = found[kind] + entries if kind in found else entries
            traces.setdefault(kind, []).append(float(entries.double().sum()))
    groups = tuple(
        Group(part.count, part.confidence, mine / theirs if theirs else float("nan"))
        for part, mine, theirs in zip(parts, traces["observed"], traces[best], strict=True)
        if isinstance(part, _Part)
    )
    return Diagonals(found, best, groups)


def fishers(task: Task, start: Start, found: Diagonals, hessian: Hessian, row_sums: Tensor, seed: int) -> Fishers:
    """Lay all diagonals beside the Hessian's; `row_sums` is H·1."""
    every = {
        HESSIAN: hessian.diagonal,
        **found.entries,
        LITERAL: start.gradient.square(),
        ROW_SUMS: row_sums.abs(),
    }
    truth = every[HESSIAN]
    trace = float(truth.double().sum())
    ranked = {name: ranks(entries) for name, entries in every.items()}
    compared = tuple(
        Compared(
            name,
            total=float(entries.double().sum()) / start.num_data,
            scale=float(entries.double().sum()) / trace if trace else float("nan"),
            rank=_correlation(ranked[name], ranked[HESSIAN]),
            rank_fisher=_correlation(ranked[name], ranked[found.best]),
        )
        for name, entries in every.items()
    )
    order = torch.randperm(task.entries, generator=torch.Generator().manual_seed(seed % 2**63))[:_SHOWN]
    shown = {
        name: tuple((entries[order.to(entries.device)] / start.num_data).tolist()) for name, entries in every.items()
    }
    below = truth < -torch.finfo(truth.dtype).eps * 64 * truth.abs().max()
    return Fishers(
        compared,
        found.best,
        hessian.exact,
        float(below.double().mean()) if hessian.exact else None,
        None if start.confidence is None else float(start.confidence.double().mean()),
        found.groups,
        shown,
    )


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks, equal values having the mean of theirs; 0 where one of them is constant.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0, 100.0])), 9)
    1.0
    """
    return _correlation(ranks(a), ranks(b))


def ranks(values: Tensor) -> Tensor:
    """The place of each entry in the order of all, from 1."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    places: Tensor = (last - (counts.double() - 1) / 2)[inverse.flatten()]
    return places


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm else 0.0


@dataclass(frozen=True)
class _Part:
    """The examples of a task whose confidence lies in a range, as batches."""

    task: Task
    low: float
    high: float
    count: int
    confidence: float

    def __iter__(self) -> Iterator[Any]:
        scoring = self.task.scoring()
        for batch in read(self.task.batches, self.task.model):
            with torch.no_grad():
                sure = confidence(self.task, batch, scoring.output(batch))
            # In float64, as the bounds were taken: an example is in one part and no other.
            inside = None if sure is None else (sure.double() >= self.low) & (sure.double() < self.high)
            rows = [] if inside is None else inside.nonzero().flatten().tolist()
            if rows:
                yield batch.rows(rows).content


def _groups(task: Task, start: Start) -> list[Any]:
    """Quarters of the data by confidence, or all of it where there is none."""
    if start.confidence is None or start.targets == "observed":
        return [task.batches]
    sure = start.confidence.double()
    cuts = sure.quantile(torch.linspace(0, 1, _GROUPS + 1, dtype=torch.float64)[1:-1]).tolist()
    bounds = [-1.0, *sorted(set(cuts)), 2.0]
    found = []
    for low, high in itertools.pairwise(bounds):
        mine = sure[(sure >= low) & (sure < high)]
        if len(mine):
            found.append(_Part(task, low, high, len(mine), float(mine.mean())))
    return found


def _kind(kind: str) -> Literal["expected", "sampled", "observed"]:
    return cast(Literal["expected", "sampled", "observed"], kind)
