"""The tap engine: the gradients of single examples, at about the cost of one training pass.

An operation's inputs and its output's gradient are all that a rule needs to know the gradient of every example, and a
backward pass lets both go by. So a pass is made that forms no parameter's own gradient, and what goes by is tapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from ..errors import ArgumentError, CheckError
from ..precision import Source
from ..ranks import Ranks
from .batches import Batch, read
from .forms import Form, Limit
from .general import General, Scores
from .graph import Graph, tapped
from .plan import Plan, Site
from .rules import RULES
from .scores import Scoring, backward, require_finite_scores
from .trial import Trial

# What the gradients of single examples may take at once, in bytes: a gigabyte.
MEMORY = 1 << 30


class Collector(Protocol):
    """What becomes of the gradients of single examples, batch after batch."""

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Everything that must stay finite."""

    def begin(self, plan: Plan, graph: Graph, examples: int, columns: int) -> None:
        """A batch: its plan, its graph, and how many scores will come."""

    def serves(self, site: Site) -> bool:
        """Whether it takes a site's form."""

    def take(self, site: Site, form: Form) -> None:
        """A site's form, in the course of a backward pass."""

    def done(self) -> None:
        """A column's backward pass is over."""

    def finish(self) -> None:
        """A batch is through."""

    def meet(self, ranks: Ranks) -> None:
        """All batches are through: add what the ranks that went apart have found."""

    def score(self, name: str, scores: Tensor) -> None:
        """What the general path gives of a parameter: (examples, columns, *shape)."""


@dataclass(frozen=True)
class Pass:
    """A batch whose losses are ready to be differentiated, and the plan to do it by."""

    batch: Batch
    losses: Tensor  # (columns, batch)
    graph: Graph
    plan: Plan
    beside: bool = False  # whether the losses are of the one example twice, and only the first counts

    def sweep(self, collector: Collector) -> None:
        """Let a collector have the form of every site that it serves, column by column."""
        places = {
            place: served
            for place, sites in self.plan.places.items()
            if (served := [site for site in sites if collector.serves(site)])
        }
        size = self.losses.shape[1]
        if not places:
            return

        def heard(place: int, grad: Tensor) -> None:
            sites = places[place]
            rows = sites[0].split.rows(grad)
            for site in sites:
                form = RULES[site.operation](site.call(self.graph), rows)
                if form is None or form.examples != size or form.shape != site.weight:
                    raise CheckError(
                        f"the rule for {site.operation} gave {'nothing' if form is None else _said(form)}, where "
                        f"{size} gradients of shape {tuple(site.weight)} are due. taps=False does without."
                    )
                collector.take(site, form.only(0) if self.beside else form)

        last = len(self.losses) - 1
        with backward(self.losses):
            for column in range(len(self.losses)):
                tapped(self.losses[column].sum(), self.graph, places, self.plan.lowest, heard, retain=column < last)
                collector.done()


class Engine:
    """Passes over batches, planned once for each structure of their graphs and checked against plain autograd."""

    def __init__(
        self, scoring: Scoring, named: Mapping[str, Tensor], memory: int, *, taps: bool = True, beside: bool = False
    ) -> None:
        if not isinstance(memory, int) or isinstance(memory, bool) or memory < 1:
            raise ArgumentError(f"memory is a number of bytes, got {memory!r}.")
        self.limit = Limit(memory)
        self._general = General(scoring, self.limit)
        self._scoring = scoring
        self._named = named
        self._taps = taps
        self._beside = beside  # a batch of one is tapped too, run beside itself: the graph shows where examples are
        self._plans: dict[Any, list[Plan]] = {}

    def prepared(self, batch: Batch) -> Pass:
        """A batch, run forward and planned."""
        batch, losses = self._scoring.counted(batch)
        if batch.size == 1 and self._beside and self._taps:
            return replace(self._planned(batch.rows([0, 0]), []), batch=batch, beside=True)
        given = [losses]
        del losses
        return self._planned(batch, given)

    def collect(self, batches: Iterable[Any], collector: Collector) -> Source:
        """Let a collector have all batches, of all replicas; where the data came from."""
        ranks = self._scoring.ranks
        for batch in read(batches, self._scoring.model, empty=ranks.apart):
            made = self.prepared(batch)
            with backward(made.losses):
                collector.begin(made.plan, made.graph, made.batch.size, len(made.losses))
            made.sweep(collector)
            for scores in self._scores(made):
                for name, score in scores.items():
                    with backward(made.losses):
                        collector.score(name, score)
            with backward(made.losses):
                collector.finish()
            require_finite_scores(collector.sums, batch.index, self._scoring.doubts)
            del made
        source = self._scoring.source()  # where a rank that has stopped is heard of: from here on, all go on or none
        collector.meet(ranks)
        return source

    def _planned(self, batch: Batch, given: list[Tensor]) -> Pass:
        """The batch, its losses taken out of the list (nobody else may keep their graph alive) or made."""
        losses = given.pop() if given else self._scoring.losses(self._scoring.output(batch), batch)
        graph = Graph(losses, self._named)
        moved = graph.moves_rows(batch.size) if batch.size > 1 and self._taps else ""
        if batch.size == 1 or not self._taps or moved:
            reason = "taps=False" if batch.size > 1 else "a batch of one is done the plain way"
            reason = f"{moved} moves rows, so they could be any example's" if moved else reason
            return Pass(batch, losses, graph, Plan({}, dict.fromkeys(self._named, reason), ()))
        plans = self._plans.setdefault(graph.structure, [])
        plan = next((plan for plan in plans if plan.fits(graph, batch.size)), None)
        if plan is None and plans:
            plan = plans[0].resized(graph, self._named, batch.size)
            plans += [plan] if plan is not None else []
        if plan is None:
            trial = Trial(self._scoring, self._named, batch, losses, graph)
            del losses, graph  # a batch's graph is large: it makes room for the check, and is made again
            plan = trial.checked(self.limit)
            del trial
            losses = self._scoring.losses(self._scoring.output(batch), batch)
            graph = Graph(losses, self._named)
            plan = replace(plan, lowest=graph.lowest(plan.places))
            plans.append(plan)
        return Pass(batch, losses, graph, plan)

    def _scores(self, made: Pass) -> Iterator[Scores]:
        """What the taps leave: scores of the other parameters, a few examples at a time."""
        rest = {name: self._named[name] for name in self._named if name in made.plan.general}
        return self._general.scores(made.batch, rest, made.losses, made.graph) if rest else iter(())


def _said(form: Form) -> str:
    return f"{form.examples} gradients of shape {tuple(form.shape)}"
