"""The diagonal: squares of the gradients of single examples, summed as the taps bring them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ranks import Ranks
from .forms import Form, Limit, Products, Rows, add_outer_
from .graph import Graph
from .joined import Joined
from .plan import Plan, Site

# Rows waiting to be squared together, in entries.
_ROWS_AT_ONCE = 1 << 24


class Squares:
    """Takes the forms of batch after batch, and adds Σₙ Gₙ² to the totals.

    A parameter used at several sites has its gradients summed per example before they are squared: by one form where
    they join (steps of a recurrent cell), else written out for some examples at a time (a tied embedding).
    """

    def __init__(self, named: Mapping[str, Tensor], total: Mapping[str, Tensor], limit: Limit) -> None:
        self._total = total
        self._limit = limit
        self._views: dict[tuple[str, Any], Tensor] = {}
        self._joined = Joined(named, total, limit, _add_squares_)
        self._rank_one: dict[tuple[str, Any], tuple[Tensor, Tensor, Tensor]] = {}
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._entries = 0

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Everything that must stay finite."""
        return self._total

    def serves(self, site: Site) -> bool:
        """Whether it takes a site's form."""
        return self._joined.serves(site)

    def begin(self, plan: Plan, graph: Graph, examples: int = 0, columns: int = 0) -> None:
        """A batch: its plan and its graph."""
        self._joined.begin(plan, graph)

    def take(self, site: Site, form: Form) -> None:
        """A site's form, in the course of a backward pass."""
        self._joined.take(site, form, self._add)

    @torch.no_grad()
    def done(self) -> None:
        """The pass is over."""
        self._joined.done(self._add)
        self._add_rows()

    @torch.no_grad()
    def finish(self) -> None:
        """A batch is through."""
        for total, left, right in self._rank_one.values():
            add_outer_(total, left, right)
        self._rank_one.clear()

    def meet(self, ranks: Ranks) -> None:
        """All batches are through, of all ranks."""
        ranks.add_(*self._total.values())

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


def _add_squares_(total: Tensor, scores: Tensor) -> None:
    total += scores.square_().sum(0)
