"""The gradients of parameters that are used at several sites: waited for, and summed per example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .forms import Form, Limit
from .graph import Graph
from .plan import Plan, Site

# What takes a form that stands for itself. It is told each time, and not kept: a cycle would keep a batch's graph.
Alone = Callable[[str, Site, Form], None]


class Joined:
    """Takes the forms of batch after batch, and gives each parameter's on when all of its sites have brought theirs.

    A form that stands for itself goes to `alone`; so does one that the forms of several sites join to (steps of a
    recurrent cell). What has no one form (a tied embedding) is written out for some examples at a time, (examples,
    *shape), and goes to `written` with the total it is for.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        total: Mapping[str, Tensor],
        limit: Limit,
        written: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._named, self._total, self._limit, self._written = named, total, limit, written
        self._names: dict[Site, list[str]] = {}
        self._plan = Plan({}, {}, ())
        self._waiting: dict[str, dict[Site, Form]] = {}

    def serves(self, site: Site) -> bool:
        """Whether it takes a site's form."""
        return site in self._names

    def begin(self, plan: Plan, graph: Graph) -> None:
        """A batch: its plan and its graph."""
        self._graph = graph
        if plan is not self._plan:
            self._plan, self._names = plan, {}
            for name, sites in plan.sites.items():
                for site in sites:
                    self._names.setdefault(site, []).append(name)

    def take(self, site: Site, form: Form, alone: Alone) -> None:
        """A site's form, in the course of a backward pass."""
        for name in self._names[site]:
            sites = self._plan.sites[name]
            if name in self._plan.apart:
                alone(name, site, form)
                continue
            waiting = self._waiting.setdefault(name, {})
            waiting[site] = form
            if len(waiting) == len(sites) and all(each.route.steps is not None for each in sites):
                self._add_together(name, self._waiting.pop(name), alone)

    @torch.no_grad()
    def done(self, alone: Alone) -> None:
        """The pass is over: what waited for a second use that no gradient reached, or for the graph to be free."""
        while self._waiting:
            self._add_together(*self._waiting.popitem(), alone)

    def _add_together(self, name: str, forms: Mapping[Site, Form], alone: Alone) -> None:
        by_route: dict[Any, list[tuple[Site, Form]]] = {}
        for site, form in forms.items():
            by_route.setdefault(site.route.key, []).append((site, form))
        joined: list[tuple[Site, Form]] = []
        for (site, first), *others in by_route.values():
            whole = first.with_more([form for _, form in others])
            joined += [(site, whole)] if whole is not None else [(site, first), *others]
        if len(joined) == 1 and joined[0][0].route.steps is not None:
            alone(name, *joined[0])
            return
        parameter, total = self._named[name], self._total[name]
        size = joined[0][1].examples
        entries = parameter.numel() + sum(form.shape.numel() for _, form in joined)
        step = self._limit.examples(entries * total.element_size(), f"the gradient of `{name}`, used more than once,")
        for start in range(0, size, step):
            stop = min(start + step, size)
            scores = total.new_zeros(stop - start, *total.shape)
            for site, form in joined:
                scores += site.route.pulled(form.scores(start, stop).to(total.dtype), parameter, self._graph)
            self._written(total, scores)
