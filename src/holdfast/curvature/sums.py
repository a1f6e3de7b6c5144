"""Signed sums of the gradients of single examples, without writing out any one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .forms import CACHED, Form, Limit, Lookup, Products, Rows, Shifted


@dataclass(frozen=True)
class Runs:
    """A batch cut into runs of examples, and a sign for each example."""

    signs: Tensor  # (batch,)
    bounds: Sequence[tuple[int, int]]

    @cached_property
    def matrix(self) -> Tensor:
        """(runs, batch): times one row per example, the sums."""
        matrix = self.signs.new_zeros(len(self.bounds), len(self.signs))
        for run, (start, stop) in enumerate(self.bounds):
            matrix[run, start:stop] = self.signs[start:stop]
        return matrix

    def of(self, rows: Tensor, start: int = 0) -> Tensor:
        """Sums of some examples' rows, from example `start` on: (runs, *shape)."""
        weights = self.matrix[:, start : start + len(rows)]
        sums: Tensor = torch.tensordot(weights.to(rows), rows, 1)
        return sums


def add_sums_(total: Tensor, form: Form, runs: Runs, limit: Limit, name: str) -> None:
    """Add Σ ±Gₙ over each run of examples to a total of (runs, *shape)."""
    if isinstance(form, Rows):
        total += runs.of(form.rows.to(total.dtype))
    elif isinstance(form, Lookup):
        for run, (start, stop) in enumerate(runs.bounds):
            values = form.values[start:stop].to(total.dtype) * runs.signs[start:stop].to(total).view(-1, 1, 1)
            total[run].index_add_(0, form.indices[start:stop].flatten(), values.flatten(0, 1))
    elif isinstance(form, Products) and form.rows * form.columns > form.positions * (form.rows + form.columns):
        for run, (start, stop) in enumerate(runs.bounds):
            step = limit.examples(form.share, f"the gradient of {name}") if form.share else stop - start
            for first in range(start, stop, step):
                _add_product_(total[run], form, runs.signs, first, min(first + step, stop))
    elif isinstance(form, Shifted):
        pieces = total.new_zeros(len(form.pieces), len(runs.bounds), *form.shape[:2])
        for sums, piece in zip(pieces, form.pieces, strict=True):
            add_sums_(sums, piece(), runs, limit, name)
        total += pieces.movedim(0, -1).reshape(total.shape)
    else:  # gradients that are smaller than what they are made of are written out
        each = form.shape.numel() * total.element_size() + (form.share if isinstance(form, Products) else 0)
        step = limit.examples(each, f"the gradient of {name}")
        if total.device.type == "cpu":  # temporaries that stay in the cache
            step = max(1, min(step, CACHED // max(each, 1)))
        for start in range(0, form.examples, step):
            scores = form.scores(start, min(start + step, form.examples))
            total += runs.of(scores.to(total.dtype), start)


def _add_product_(total: Tensor, form: Products, signs: Tensor, start: int, stop: int) -> None:
    """Σₙ ±leftₙᵀ rightₙ, as a backward pass forms a weight's gradient: one product over examples and positions."""
    left, right = form.part(start, stop)  # (examples, groups, positions, rows), (…, columns)
    sign = signs[start:stop].view(-1, 1, 1, 1)
    left, right = (left * sign.to(left), right) if left.numel() < right.numel() else (left, right * sign.to(right))
    dtype = torch.promote_types(left.dtype, right.dtype)
    left, right = (side.to(dtype).transpose(0, 1).flatten(1, 2) for side in (left, right))  # (groups, all, …)
    if form.groups == 1 and total.shape == (form.rows, form.columns) and dtype == total.dtype:
        total.addmm_(left[0].T, right[0])
    else:
        total += (left.mT @ right).reshape(total.shape).to(total.dtype)
