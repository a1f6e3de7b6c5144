"""The whole Fisher of a few thousand entries: outer products of the gradients of single examples, summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..likelihood import Likelihood
from ..params import Only, shapes, trainable, unwrapped
from ..precision import Dense
from ..precision.base import require_dense
from ..ranks import Ranks
from .batches import Forward
from .engine import MEMORY, Engine
from .forms import Form, Limit, wide
from .graph import Graph
from .plan import Plan, Site
from .replicas import alike, replicas_of
from .scores import Scoring, Targets


def dense_fisher(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    targets: Targets | None = None,
    seed: int = 0,
    forward: Forward | None = None,
    only: Only = None,
    memory: int = MEMORY,
    taps: bool = True,
) -> Dense:
    """The whole Fisher information, F = Σₙ E_y[∇nll ∇nllᵀ], for heads, adapters and models of a few thousand entries.

    The arguments are those of `diagonal_fisher`; `only="head.*"` takes it of a part of a model.
    """
    with replicas_of(model) as ranks:
        model = unwrapped(model)
        named = trainable(model, only)
        require_dense(sum(parameter.numel() for parameter in named.values()))
        engine = Engine(Scoring(model, likelihood, targets, seed, forward, ranks), named, memory, taps=taps)
        outer = _OuterProducts(named, engine.limit)
        with alike(model, ranks):
            source = engine.collect(batches, outer)
    return Dense(shapes(named), (outer.total + outer.total.T) / 2, (source,))


class _OuterProducts:
    """Takes the forms of batch after batch, writes the gradients out side by side, and adds Σₙ gₙgₙᵀ to the total."""

    def __init__(self, named: Mapping[str, Tensor], limit: Limit) -> None:
        like = next(iter(named.values()))
        self._named = named
        self._limit = limit
        self._starts: dict[str, int] = {}
        size = 0
        for name, parameter in named.items():
            self._starts[name] = size
            size += parameter.numel()
        self.total = torch.zeros(size, size, dtype=wide(like), device=like.device)
        self._columns: list[Tensor] = []  # (examples, P), one for each column of the scores

    @property
    def sums(self) -> dict[str, Tensor]:
        return {"Λ": self.total}

    def begin(self, plan: Plan, graph: Graph, examples: int, columns: int) -> None:
        self._graph = graph
        self._names: dict[Site, list[str]] = {}
        for name, sites in plan.sites.items():
            for site in sites:
                self._names.setdefault(site, []).append(name)
        size = len(self.total)
        each = columns * size * self.total.element_size()
        if each * examples > self._limit.bytes:
            raise ArgumentError(
                f"memory={self._limit.bytes} is too small for a batch of {examples}, whose gradients take "
                f"{each * examples} bytes side by side. Give as many, or batches of {self._limit.bytes // each or 1}."
            )
        self._columns = [self.total.new_zeros(examples, size) for _ in range(columns)]
        self._column, self._filled = 0, dict.fromkeys(self._named, 0)

    def serves(self, site: Site) -> bool:
        return site in self._names

    @torch.no_grad()
    def take(self, site: Site, form: Form) -> None:
        scores = form.scores(0, form.examples).to(self.total.dtype)
        for name in self._names[site]:
            pulled = site.route.pulled(scores, self._named[name], self._graph)
            self._part(self._column, name).add_(pulled.reshape(len(pulled), -1))

    def done(self) -> None:
        self._column += 1

    @torch.no_grad()
    def score(self, name: str, scores: Tensor) -> None:
        start = self._filled[name]
        self._filled[name] = stop = start + len(scores)
        for column, each in enumerate(scores.reshape(*scores.shape[:2], -1).unbind(1)):
            self._part(column, name)[start:stop] = each.to(self.total.dtype)

    @torch.no_grad()
    def finish(self) -> None:
        for rows in self._columns:
            self.total.addmm_(rows.T, rows)
        self._columns.clear()

    def meet(self, ranks: Ranks) -> None:
        ranks.add_(self.total)

    def _part(self, column: int, name: str) -> Tensor:
        start = self._starts[name]
        return self._columns[column][:, start : start + self._named[name].numel()]
