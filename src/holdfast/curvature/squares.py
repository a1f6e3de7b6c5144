"""The diagonal: squares of the gradients of single examples, summed as the taps bring them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .forms import Form, Limit, Products, Rows, add_outer_
from .graph import Graph
from .plan import Plan, Site

# Rows waiting to be squared together, in entries.
_ROWS_AT_ONCE = 1 << 24


class Squares:
    """Takes the forms of batch after batch, and adds Σₙ Gₙ² to the totals.

    A parameter used at several sites has its gradients summed per example before they are squared: by one form where
    they join (steps of a recurrent cell), else written out for some examples at a time (a tied embedding).
    """

    def __init__(self, named: Mapping[str, Tensor], total: Mapping[str, Tensor], limit: Limit) -> None:
        self._named = named
        self._total = total
        self._limit = limit
        self._views: dict[tuple[str, Any], Tensor] = {}
        self._names: dict[Site, list[str]] = {}
        self._plan = Plan({}, {}, ())
        self._waiting: dict[str, dict[Site, Form]] = {}
        self._rank_one: dict[tuple[str, Any], tuple[Tensor, Tensor, Tensor]] = {}
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._entries = 0

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Everything that must stay finite."""
        return self._total

    def serves(self, site: Site) -> bool:
        """Whether it takes a site's form."""
        return site in self._names

    def begin(self, plan: Plan, graph: Graph, examples: int = 0, columns: int = 0) -> None:
        """A batch: its plan and its graph."""
        self._graph = graph
        if plan is not self._plan:
            self._plan, self._names = plan, {}
            for name, sites in plan.sites.items():
                for site in sites:
                    self._names.setdefault(site, []).append(name)

    def take(self, site: Site, form: Form) -> None:
        """A site's form, in the course of a backward pass."""
        for name in self._names[site]:
            sites = self._plan.sites[name]
            if name in self._plan.apart:
                self._add(name, site, form)
                continue
            waiting = self._waiting.setdefault(name, {})
            waiting[site] = form
            if len(waiting) == len(sites) and all(each.route.steps is not None for each in sites):
                self._add_together(name, self._waiting.pop(name))

    @torch.no_grad()
    def done(self) -> None:
        """The pass is over: what waited for a second use that no gradient reached, or for the graph to be free."""
        while self._waiting:
            self._add_together(*self._waiting.popitem())
        self._add_rows()

    @torch.no_grad()
    def finish(self) -> None:
        """A batch is through."""
        for total, left, right in self._rank_one.values():
            add_outer_(total, left, right)
        self._rank_one.clear()

    def score(self, name: str, scores: Tensor) -> None:
        """What the general path gives of a parameter: (examples, columns, *shape)."""
        # Squared per example, then summed: (Σ g)² is zero at the optimum and shrinks with the batch.
        self._total[name].add_(scores.to(self._total[name].dtype).square().sum((0, 1)))

    def _add(self, name: str, site: Site, form: Form) -> None:
        """A form whose squares stand for themselves."""
        key = (name, site.route.key)
        if key not in self._views:
            self._views[key] = site.route.view(self._total[name].unsqueeze(0))[0]
        total = self._views[key]
        if isinstance(form, Rows):
            self._rows.append((total, form.rows))
            self._entries += form.rows.numel()
            if self._entries > _ROWS_AT_ONCE:
                self._add_rows()
        elif isinstance(form, Products) and form.positions == 1:
            # The columns of an exact Fisher share their inputs, so their squared gradients are summed first.
            left, right = (side.to(total.dtype).square() for side in form.part(0, form.examples))
            if key in self._rank_one:
                _, before, after = self._rank_one[key]
                left, right = (left, right + after) if form.inputs_left else (left + before, right)
            self._rank_one[key] = (total, left, right)
        else:
            form.add_squares_(total, self._limit, f"`{name}`")

    def _add_rows(self) -> None:
        """Many small tensors, with few calls."""
        alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for total, rows in self._rows:
            alike.setdefault((total.device, total.dtype, rows.shape), []).append((total, rows.to(total.dtype)))
        self._rows.clear()
        self._entries = 0
        for pairs in alike.values():
            squares = torch.stack([rows for _, rows in pairs]).square_().sum(1)
            torch._foreach_add_([total for total, _ in pairs], list(squares.unbind()))

    def _add_together(self, name: str, forms: Mapping[Site, Form]) -> None:
        by_route: dict[Any, list[tuple[Site, Form]]] = {}
        for site, form in forms.items():
            by_route.setdefault(site.route.key, []).append((site, form))
        joined: list[tuple[Site, Form]] = []
        for (site, first), *others in by_route.values():
            whole = first.with_more([form for _, form in others])
            joined += [(site, whole)] if whole is not None else [(site, first), *others]
        if len(joined) == 1 and joined[0][0].route.steps is not None:
            self._add(name, *joined[0])
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
            total += scores.square_().sum(0)
