"""Absolute values of the gradients of single examples, summed as the taps bring them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..ranks import Ranks
from .forms import CACHED, Form, Limit, Lookup, Products, Rows, Shifted, add_outer_
from .graph import Graph
from .joined import Joined
from .plan import Plan, Site


class Magnitudes:
    """Takes the forms of batch after batch, and adds Σₙ |Gₙ| to the totals.

    A parameter used at several sites has its gradients summed per example before their signs are dropped: by one form
    where they join (steps of a recurrent cell), else written out for some examples at a time (a tied embedding).
    """

    def __init__(self, named: Mapping[str, Tensor], total: Mapping[str, Tensor], limit: Limit) -> None:
        self._total = total
        self._limit = limit
        self._joined = Joined(named, total, limit, _add_written_)

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Everything that must stay finite."""
        return self._total

    def serves(self, site: Site) -> bool:
        """Whether it takes a site's form."""
        return self._joined.serves(site)

    def begin(self, plan: Plan, graph: Graph, examples: int, columns: int) -> None:
        """A batch: its plan and its graph."""
        self._joined.begin(plan, graph)

    def take(self, site: Site, form: Form) -> None:
        """A site's form, in the course of a backward pass."""
        self._joined.take(site, form, self._add)

    def done(self) -> None:
        """The pass is over."""
        self._joined.done(self._add)

    def finish(self) -> None:
        """A batch is through."""

    def meet(self, ranks: Ranks) -> None:
        """All batches are through, of all ranks."""
        ranks.add_(*self._total.values())

    @torch.no_grad()
    def score(self, name: str, scores: Tensor) -> None:
        """What the general path gives of a parameter: (examples, columns, *shape)."""
        self._total[name].add_(scores.to(self._total[name].dtype).abs().sum((0, 1)))

    def _add(self, name: str, site: Site, form: Form) -> None:
        """A form whose magnitudes stand for themselves."""
        add_magnitudes_(site.route.view(self._total[name].unsqueeze(0))[0], form, self._limit, f"`{name}`")


def _add_written_(total: Tensor, scores: Tensor) -> None:
    total += scores.abs_().sum(0)


def add_magnitudes_(total: Tensor, form: Form, limit: Limit, name: str) -> None:
    """Add Σₙ |Gₙ| to a total of the same shape; `name` is for errors."""
    if isinstance(form, Rows):
        total += form.rows.to(total.dtype).abs().sum(0)
    elif isinstance(form, Lookup):
        rows, sums = form.summed(total.dtype)
        total.index_add_(0, rows, sums.abs_())
    elif isinstance(form, Shifted):
        flat = total.view(*form.shape[:2], len(form.pieces))
        for place, piece in enumerate(form.pieces):
            magnitudes = total.new_zeros(form.shape[:2])
            add_magnitudes_(magnitudes, piece(), limit, name)
            flat[..., place] += magnitudes
    elif isinstance(form, Products) and form.positions == 1:
        # Σₙ |gₙaₙᵀ| = |g|ᵀ|a|: one matrix product for the whole batch.
        step = limit.examples(form.share, f"the gradient of {name}") if form.share else form.examples
        for start in range(0, form.examples, step):
            left, right = form.part(start, min(start + step, form.examples))
            add_outer_(total, left.to(total.dtype).abs(), right.to(total.dtype).abs())
    else:  # the signs of a sum over positions are known when it is written out
        each = form.shape.numel() * total.element_size() + (form.share if isinstance(form, Products) else 0)
        step = limit.examples(each, f"the gradient of {name}")
        if total.device.type == "cpu":  # temporaries that stay in the cache
            step = max(1, min(step, CACHED // each))
        for start in range(0, form.examples, step):
            scores = form.scores(start, min(start + step, form.examples))
            total += scores.to(total.dtype).abs().sum(0)
