"""The directions in which scores are largest, from one pass over them in constant memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..devices import sent
from ..ranks import Ranks
from .doubts import Doubts
from .forms import Form, Limit, Products, Shifted, wide
from .graph import Graph
from .plan import Plan, Site
from .sums import Runs, add_sums_

_COLUMNS = 4096  # turned at once
_CHEAP = 1 << 24  # rank × entries × rows that are cut in a few milliseconds


class Sketch:
    """Rows whose outer products sum to the Fisher on average, cut again and again to the longest directions in them.

    A row is a sum over a run of examples with random signs, r = Σ ±gₙ: cross terms vanish on average, E[rrᵀ] =
    Σ gₙgₙᵀ. Scores that fit have rows of their own. Rows gather until there are twice as many as are kept, and are
    turned into their principal directions, of which the longest stay as they are and the others go.

    Frequent Directions (Liberty 2013) would also shorten what stays, by as much as the longest that goes, for a bound
    that holds for rows in any order. Here what goes is made up for on the diagonal, and what stays is not shortened.
    """

    def __init__(
        self, named: Mapping[str, Tensor], rank: int, rows: int | None, seed: int, limit: Limit, doubts: Doubts
    ) -> None:
        self.scores = 0  # how many there were; up to the rank, each has a row of its own
        self._named = named
        self._rank = rank
        self._per_batch = rows
        self._limit = limit
        self._doubts = doubts
        self._coins = torch.Generator().manual_seed(seed)
        self._capacity = rank + max(rank, rows or 0)
        self._entries = sum(parameter.numel() for parameter in named.values())
        self._products = 0  # multiplications that the last batch's weights took
        self._rows = {name: p.new_empty(self._capacity, *p.shape, dtype=wide(p)) for name, p in named.items()}
        self._filled = 0
        self._lengths = torch.zeros(0, dtype=torch.float64)  # squared, of the first rows: those turned already
        self._waiting: list[tuple[str, Site, Tensor]] = []

    def begin(self, plan: Plan, graph: Graph, size: int, columns: int) -> None:
        """A batch: how its scores are summed, and into which rows."""
        # Until the rows are first cut there is room for more of them, and rows of fewer scores are nearer to the truth.
        room = 0 if len(self._lengths) else self._capacity - self._filled
        if columns * size > room:  # not one each: as many as are kept, and no cut so soon
            room = max(0, min(room, self._rank - self._filled))
        budget = max(self._per_batch or self._affordable(size), room)
        runs, groups = min(size, budget), min(columns, max(1, budget // size))
        count = runs * groups
        bounds = [(run * size // runs, (run + 1) * size // runs) for run in range(runs)]
        starts = [column % groups * runs for column in range(columns)]
        signs = 2.0 * torch.randint(0, 2, (columns, size), generator=self._coins) - 1
        self.scores += columns * size
        if self._filled + count > self._capacity:
            self._cut()
        signs = sent(signs, next(iter(self._rows.values())).device)
        self._graph, self._column, self._products = graph, 0, 0
        self._given = dict.fromkeys(self._named, 0)  # examples whose untapped scores came
        self._runs = [Runs(each, bounds) for each in signs]
        self._places = [slice(self._filled + start, self._filled + start + len(bounds)) for start in starts]
        self._names: dict[Site, list[str]] = {}
        for name, sites in plan.sites.items():
            for site in sites:
                self._names.setdefault(site, []).append(name)
        for rows in self._rows.values():
            rows[self._filled : self._filled + count] = 0
        self._filled += count

    def take(self, site: Site, form: Form) -> None:
        """A site's form, in the course of a backward pass."""
        runs, place = self._runs[self._column], self._places[self._column]
        self._products += _multiplications(form) if self._column == 0 else 0
        for name in self._names[site]:
            rows = self._rows[name][place]
            if site.route.steps is not None:
                add_sums_(site.route.view(rows), form, runs, self._limit, f"`{name}`")
            else:
                sums = rows.new_zeros(len(rows), *form.shape)
                add_sums_(sums, form, runs, self._limit, f"`{name}`")
                self._waiting.append((name, site, sums))  # until the graph is free

    @torch.no_grad()
    def done(self) -> None:
        """A column is through."""
        for name, site, sums in self._waiting:
            rows = self._rows[name][self._places[self._column]]
            rows += site.route.pulled(sums, self._named[name], self._graph).to(rows.dtype)
        self._waiting.clear()
        self._column += 1

    def score(self, name: str, scores: Tensor) -> None:
        """Scores that were not tapped, (examples, columns, *shape), of the next examples of the batch."""
        start = self._given[name]
        self._given[name] += len(scores)
        for column, (runs, place) in enumerate(zip(self._runs, self._places, strict=True)):
            rows = self._rows[name][place]
            rows += runs.of(scores[:, column].to(rows.dtype), start)

    @torch.no_grad()
    def meet(self, ranks: Ranks) -> None:
        """Join the rows of ranks that went apart, one rank's after another's: the longest of each, unless all fit."""
        if not ranks.apart:
            return
        if sum(ranks.gathered(self._filled)) > self._capacity and self._filled > self._rank:
            self._cut()
        said = ranks.gathered((self._filled, self.scores))
        mine = {name: rows[: self._filled].clone() for name, rows in self._rows.items()}
        self._filled, self._lengths = 0, torch.zeros(0, dtype=torch.float64)
        for place, (count, _) in enumerate(said):
            if self._filled + count > self._capacity:
                self._cut()
            for name, rows in self._rows.items():
                theirs = rows[self._filled : self._filled + count]
                if place == ranks.place:
                    theirs.copy_(mine.pop(name))
                ranks.share_(theirs, place=place)
            self._filled += count
        self.scores = sum(scores for _, scores in said)

    def directions(self) -> dict[str, Tensor]:
        """The rows that are kept, (rank or fewer, *shape). The sketch ends with it."""
        turn = self._turn() if self._filled > self._rank else None
        found: dict[str, Tensor] = {}
        for name in list(self._rows):
            rows = self._rows.pop(name)[: self._filled]
            found[name] = rows.clone() if turn is None else rows.new_empty(len(turn), *rows.shape[1:])
            if turn is not None:
                _turn_(rows, turn, found[name])
        return found

    def _affordable(self, size: int) -> int:
        """How many rows of a batch cost a third of a training pass.

        The pass takes six operations for each multiplication of a weight, and a cut 8 · rank for each entry of a new
        row, at a third of the speed; at a twentieth on a GPU, whose matrix units wait for its memory there.
        """
        products = max(self._products, size * self._entries)
        slow = 8 if next(iter(self._rows.values())).is_cuda else 1
        third = products // (12 * slow * self._rank * self._entries)
        # A small model's rows cost next to nothing, whatever its pass costs.
        return max(1, min(self._rank, max(third, _CHEAP // (self._rank * self._entries))))

    def _cut(self) -> None:
        """Keep the longest principal directions of the rows, and make room."""
        turn = self._turn()
        for rows in self._rows.values():
            _turn_(rows[: self._filled], turn, rows[: len(turn)])
        self._filled = len(turn)

    def _turn(self) -> Tensor:
        """What turns the rows into their longest principal directions, (rank, rows)."""
        self._doubts.settle()
        old, every = len(self._lengths), self._filled
        gram = torch.zeros(every, every, dtype=torch.float64)
        for each in self._rows.values():
            rows = each[:every].view(every, -1)
            gram[old:] += (rows[old:] @ rows.T).to(gram)
        gram[:old] = gram[:, :old].T.clone()
        gram[:old, :old] = self._lengths.diag()  # those turned before are orthogonal
        values, vectors = torch.linalg.eigh(gram)
        self._lengths = values[-self._rank :].clamp(min=0)
        longest: Tensor = vectors[:, -self._rank :].T
        return longest


def _multiplications(form: Form) -> int:
    """What a form's weight takes in a forward pass; small ones count for nothing."""
    if isinstance(form, Shifted):
        return len(form.pieces) * _multiplications(form.pieces[0]())
    if isinstance(form, Products):
        return form.examples * form.groups * form.positions * form.rows * form.columns
    return 0


def _turn_(rows: Tensor, turn: Tensor, into: Tensor) -> None:
    """Write turn · rows, into the first of the rows themselves maybe."""
    rows, into = rows.view(len(rows), -1), into.view(len(into), -1)
    step = _COLUMNS if rows.device.type == "cpu" else rows.shape[1]  # temporaries that stay in the cache
    for start in range(0, rows.shape[1], step):
        part = slice(start, start + step)
        into[:, part] = turn.to(rows) @ rows[:, part]
