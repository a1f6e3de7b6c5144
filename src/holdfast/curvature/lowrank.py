"""The Fisher as its diagonal and its largest directions."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, HoldfastWarning
from ..likelihood import Likelihood
from ..params import Only, trainable, unwrapped
from ..precision import LowRank
from ..precision.lowrank import require_rank
from ..precision.woodbury import COLUMNS, flat
from ..ranks import Ranks
from .batches import Forward
from .engine import MEMORY, Engine
from .forms import Form
from .graph import Graph
from .plan import Plan, Site
from .replicas import alike, replicas_of
from .scores import Scoring, Targets, accumulators, backward
from .sketch import Sketch
from .squares import Squares


def lowrank_fisher(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    *,
    rank: int,
    rows: int | None = None,
    targets: Targets | None = None,
    seed: int = 0,
    forward: Forward | None = None,
    only: Only = None,
    memory: int = MEMORY,
    taps: bool = True,
) -> LowRank:
    """The Fisher information as F ≈ D + UUᵀ: `rank` directions over all parameters jointly, and an exact diagonal.

    U holds the longest principal directions of the scores, found in one pass. While 2·rank hold all the scores they
    are exact, and with a rank for every score UUᵀ = F. Beyond that they are found among sums of scores over runs of
    examples with random signs, unbiased, `rows` of them from a batch (by default as many as cost about a third of a
    training pass): more rows are nearer to the best directions. D is what the directions leave of F's diagonal, so
    that diag Λ = diag F always.

    It takes 2·rank numbers for each parameter while it runs and keeps rank + 1. The other arguments are those of
    `diagonal_fisher`. Replicas (DistributedDataParallel) join their rows where 2·rank hold them all, and the directions
    are those of one process; else each rank cuts its own to its `rank` longest first.
    """
    require_rank(rank)
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise ArgumentError(f"rows is how many sums of scores a batch gives, a positive integer; got {rows!r}.")
    with replicas_of(model) as ranks:
        model = unwrapped(model)
        named = trainable(model, only)
        entries = sum(parameter.numel() for parameter in named.values())
        if rank > entries:
            raise ArgumentError(
                f"a rank of {rank} is more than the {entries} entries of the parameters have directions. Give a "
                "smaller one, or take dense_fisher, which is exact."
            )
        scoring = Scoring(model, likelihood, targets, seed, forward, ranks)
        engine = Engine(scoring, named, memory, taps=taps)
        total = accumulators(named)
        sketch = Sketch(named, rank, rows, ranks.seed(seed), engine.limit, scoring.doubts)
        with alike(model, ranks):
            source = engine.collect(batches, _Both(Squares(named, total, engine.limit), sketch))
            with torch.no_grad(), backward(next(iter(total.values()))):
                factors = sketch.directions()
                found = len(next(iter(factors.values())))
                if sketch.scores <= rank:
                    total = {name: torch.zeros_like(each) for name, each in total.items()}
                else:
                    total = {name: each.contiguous() for name, each in total.items()}
                    _split_(total, factors)
                ranks.share_(*total.values(), *factors.values())  # eigenvectors may turn with the last digit
    if found < rank:
        warnings.warn(
            f"rank={rank} is more than the data fills: there are {sketch.scores} scores, and the Fisher is exact with "
            f"{found} directions.",
            HoldfastWarning,
            stacklevel=2,
        )
    return LowRank(total, factors, rank, (source,))


class _Both:
    """Lets the squares and the sketch have the same gradients."""

    def __init__(self, squares: Squares, sketch: Sketch) -> None:
        self._squares, self._sketch = squares, sketch

    @property
    def sums(self) -> Mapping[str, Tensor]:
        return self._squares.sums  # what is finite squared is finite

    def begin(self, plan: Plan, graph: Graph, examples: int, columns: int) -> None:
        self._squares.begin(plan, graph)
        self._sketch.begin(plan, graph, examples, columns)

    def serves(self, site: Site) -> bool:
        return self._squares.serves(site)

    def take(self, site: Site, form: Form) -> None:
        self._squares.take(site, form)
        self._sketch.take(site, form)

    def done(self) -> None:
        self._squares.done()
        self._sketch.done()

    def score(self, name: str, scores: Tensor) -> None:
        self._squares.score(name, scores)
        self._sketch.score(name, scores)

    def finish(self) -> None:
        self._squares.finish()

    def meet(self, ranks: Ranks) -> None:
        self._squares.meet(ranks)
        self._sketch.meet(ranks)


def _split_(total: Mapping[str, Tensor], factors: Mapping[str, Tensor]) -> None:
    """Leave in `total`, the diagonal of F, what the directions do not have of it.

    Principal directions of the scores themselves never have more than there is; those of sums with random signs may,
    here and there, and are shortened in those entries.
    """
    for name, whole in total.items():
        rows, left = flat(factors[name]), whole.view(-1)
        for start in range(0, len(left), COLUMNS):
            part = slice(start, start + COLUMNS)
            mine, theirs = left[part], rows[:, part].square().sum(0)
            rows[:, part] *= (mine / theirs).sqrt().where(theirs > mine, 1)
            rest = mine - theirs
            # A rest that is rounding alone is none: the inverse would make much of it.
            left[part] = rest.where(rest > 64 * torch.finfo(rest.dtype).eps * mine, 0)
