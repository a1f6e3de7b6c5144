"""The tap engine: the gradients of single examples, at about the cost of one training pass.

An operation's inputs and its output's gradient are all that a rule needs to know the gradient of every example, and a
backward pass lets both go by. So a pass is made that forms no parameter's own gradient, and what goes by is tapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import ArgumentError, CheckError
from .batches import Batch
from .forms import Form, Limit
from .general import General, Scores
from .graph import Graph, tapped
from .plan import Plan, Site
from .rules import RULES
from .scores import Scoring, backward
from .trial import Trial

# What the gradients of single examples may take at once, in bytes: a gigabyte.
MEMORY = 1 << 30


@dataclass(frozen=True)
class Pass:
    """A batch whose losses are ready to be differentiated, and the plan to do it by."""

    batch: Batch
    losses: Tensor  # (columns, batch)
    graph: Graph
    plan: Plan

    def sweep(self, take: Callable[[Site, Form], None], done: Callable[[], None]) -> None:
        """Let `take` have every site's form, column by column; `done` is called after each."""
        places = self.plan.places
        if not places:
            return

        def heard(place: int, grad: Tensor) -> None:
            sites = places[place]
            rows = sites[0].split.rows(grad)
            for site in sites:
                form = RULES[site.operation](site.call(self.graph), rows)
                if form is None or form.examples != self.batch.size or form.shape != site.weight:
                    raise CheckError(
                        f"the rule for {site.operation} gave {'nothing' if form is None else _said(form)}, where "
                        f"{self.batch.size} gradients of shape {tuple(site.weight)} are due. taps=False does without."
                    )
                take(site, form)

        last = len(self.losses) - 1
        with backward(self.losses):
            for column in range(len(self.losses)):
                tapped(self.losses[column].sum(), self.graph, places, self.plan.lowest, heard, retain=column < last)
                done()


class Engine:
    """Passes over batches, planned once for each structure of their graphs and checked against plain autograd."""

    def __init__(self, scoring: Scoring, named: Mapping[str, Tensor], memory: int, taps: bool) -> None:
        if not isinstance(memory, int) or isinstance(memory, bool) or memory < 1:
            raise ArgumentError(f"memory is a number of bytes, got {memory!r}.")
        self.limit = Limit(memory)
        self._general = General(scoring, self.limit)
        self._scoring = scoring
        self._named = named
        self._taps = taps
        self._plans: dict[Any, list[Plan]] = {}

    def prepared(self, batch: Batch) -> Pass:
        """A batch, run forward and planned."""
        batch, losses = self._scoring.counted(batch)
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

    def scores(self, made: Pass) -> Iterator[Scores]:
        """What the taps leave: scores of the other parameters, a few examples at a time."""
        rest = {name: self._named[name] for name in self._named if name in made.plan.general}
        return self._general.scores(made.batch, rest, made.losses, made.graph) if rest else iter(())


def _said(form: Form) -> str:
    return f"{form.examples} gradients of shape {tuple(form.shape)}"
