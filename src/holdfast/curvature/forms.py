"""The few forms in which the gradients of single examples come, without being written out for a whole batch.

A form stands for one gradient per example, Gₙ, of the shape of some weight. It can add Σₙ Gₙ² to a total, and write
out the gradients of a few examples at a time for those who need more than their squares.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..kernels import add_squared_products_
from .autocorrelation import Patches

CACHED = 4 << 20
# Entries below which a product is made apart from the total it is added to.
_SMALL = 1 << 16


@dataclass(frozen=True)
class Limit:
    """How many bytes the gradients of single examples may take at once."""

    bytes: int

    def examples(self, each: int, what: str) -> int:
        """How many examples fit that take `each` bytes."""
        if each > self.bytes:
            raise ArgumentError(
                f"memory={self.bytes} is too small for one example: {what} takes {each} bytes. Give as many, or more."
            )
        return self.bytes // max(1, each)


class Form(abc.ABC):
    """One gradient per example."""

    shape: torch.Size
    examples: int

    @abc.abstractmethod
    def scores(self, start: int, stop: int) -> Tensor:
        """Gₙ for start ≤ n < stop, written out: (stop − start, *shape)."""

    @abc.abstractmethod
    def only(self, example: int) -> Form:
        """The form of one example's gradient."""

    @abc.abstractmethod
    def with_more(self, others: Sequence[Form]) -> Form | None:
        """The form of the sum with others of the same weight, if it has one."""

    def add_squares_(self, total: Tensor, limit: Limit, name: str = "a parameter") -> None:
        """Add Σₙ Gₙ² to a total of the same shape; `name` is for errors."""
        step = limit.examples(self.shape.numel() * total.element_size(), f"the gradient of {name}")
        for start in range(0, self.examples, step):
            scores = self.scores(start, min(start + step, self.examples))
            total += scores.to(total.dtype).square().sum(0)


@dataclass(frozen=True)
class Rows(Form):
    """Gradients as they are: of biases, scales and other small weights."""

    rows: Tensor  # (batch, *shape)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.rows.shape[1:]

    @property
    def examples(self) -> int:  # type: ignore[override]
        return len(self.rows)

    def scores(self, start: int, stop: int) -> Tensor:
        return self.rows[start:stop]

    def only(self, example: int) -> Rows:
        return Rows(self.rows[example : example + 1].clone())

    def with_more(self, others: Sequence[Form]) -> Rows | None:
        rows = [other.rows for other in others if isinstance(other, Rows)]
        return Rows(sum(rows, self.rows)) if len(rows) == len(others) else None

    def add_squares_(self, total: Tensor, limit: Limit, name: str = "a parameter") -> None:
        total += self.rows.to(total.dtype).square().sum(0)


@dataclass(frozen=True)
class Lookup(Form):
    """Rows of a table, each used at some positions of an example."""

    indices: Tensor  # (batch, positions)
    values: Tensor  # (batch, positions, width): gradients of what was looked up
    shape: torch.Size  # (rows, width)

    @property
    def examples(self) -> int:  # type: ignore[override]
        return len(self.indices)

    def scores(self, start: int, stop: int) -> Tensor:
        count, (rows, width) = stop - start, self.shape
        values = self.values[start:stop]
        flat = self.indices[start:stop] + rows * torch.arange(count, device=values.device).unsqueeze(1)
        found = values.new_zeros(count * rows, width, dtype=wide(values))
        found.index_add_(0, flat.flatten(), values.flatten(0, 1).to(found.dtype))
        return found.view(count, rows, width)

    def only(self, example: int) -> Lookup:
        one = slice(example, example + 1)
        return replace(self, indices=self.indices[one].clone(), values=self.values[one].clone())

    def with_more(self, others: Sequence[Form]) -> Lookup | None:
        same = [other for other in others if isinstance(other, Lookup)]
        if len(same) < len(others):
            return None
        return replace(
            self,
            indices=torch.cat([self.indices, *(other.indices for other in same)], 1),
            values=torch.cat([self.values, *(other.values for other in same)], 1),
        )

    def add_squares_(self, total: Tensor, limit: Limit, name: str = "a parameter") -> None:
        rows, sums = self.summed(total.dtype)
        total.index_add_(0, rows, sums.square_())

    def summed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows of the table, and what an example's gradient has there: (bins,) and (bins, width)."""
        # A row used twice by an example has its gradients summed first: one bin per example and row that occurs. There
        # are as many as there could be, some left empty: to count them would wait for a GPU.
        batch, positions = self.indices.shape
        bins = self.indices + self.shape[0] * torch.arange(batch, device=self.indices.device).unsqueeze(1)
        ordered, order = bins.flatten().sort()
        steps = torch.diff(ordered, prepend=ordered[:1]) != 0
        places = torch.empty_like(order).scatter_(0, order, steps.cumsum(0))
        sums = self.values.new_zeros(batch * positions, self.shape[1], dtype=dtype)
        sums.index_add_(0, places, self.values.reshape(batch * positions, self.shape[1]).to(dtype))
        rows = torch.zeros_like(order).scatter_(0, places, self.indices.flatten().long())
        return rows, sums


@dataclass(frozen=True)
class Products(Form):
    """Sums of outer products over positions: Gₙ = Σ_t left_{n,t} right_{n,t}ᵀ, in groups that do not mix.

    `left` and `right` give a side for some examples, (examples, groups, positions, rows) and (…, columns), so that what
    is unfolded for a convolution exists for a few examples at a time.
    """

    left: Callable[[int, int], Tensor]
    right: Callable[[int, int], Tensor]
    examples: int
    groups: int
    positions: int
    rows: int
    columns: int
    shape: torch.Size
    inputs_left: bool  # whether the left side is the layer's inputs, and the right its output's gradient
    share: int = 0  # bytes per example that `right` itself takes

    @staticmethod
    def of(left: Tensor, right: Tensor, shape: torch.Size, *, inputs_left: bool) -> Products:
        """From both sides as they are."""
        batch, groups, positions, rows = left.shape
        return Products(
            lambda start, stop: left[start:stop], lambda start, stop: right[start:stop],
            batch, groups, positions, rows, right.shape[-1], shape, inputs_left,
        )  # fmt: skip

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.left(start, stop), self.right(start, stop)

    def scores(self, start: int, stop: int) -> Tensor:
        left, right = self.part(start, stop)
        return (left.mT.to(wide(left)) @ right.to(wide(right))).reshape(stop - start, *self.shape)

    def only(self, example: int) -> Products:
        left, right = self.part(example, example + 1)
        return Products.of(left.clone(), right.clone(), self.shape, inputs_left=self.inputs_left)

    def with_more(self, others: Sequence[Form]) -> Products | None:
        same = [other for other in others if isinstance(other, Products) and other.groups == self.groups]
        if len(same) < len(others):
            return None
        return _joined([self, *same])

    def add_squares_(self, total: Tensor, limit: Limit, name: str = "a parameter") -> None:
        shape = (self.groups, self.rows, self.columns)
        turned = self.groups == 1 and total.ndim == 2 and not total.is_contiguous() and total.mT.is_contiguous()
        if turned:  # the transposed products into the transposed total
            total, shape = total.mT, (1, self.columns, self.rows)
        each = self.groups * self.rows * self.columns * total.element_size() + self.share
        step = limit.examples(each, f"the gradient of {name}")
        if total.device.type == "cpu":  # temporaries that stay in the cache
            step = max(1, min(step, CACHED // each))
        into = total.view(shape) if total.is_contiguous() else total.new_zeros(shape)
        for start in range(0, self.examples, step):
            left, right = self.part(start, min(start + step, self.examples))
            if self.positions == 1:
                # Σₙ (gₙaₙᵀ)² = (g²)ᵀ(a²): one matrix product for the whole batch.
                add_outer_(
                    into, *(side.to(into.dtype).square() for side in ((right, left) if turned else (left, right)))
                )
            else:
                add_squared_products_(into, *((right, left) if turned else (left, right)))
        if not total.is_contiguous():
            total += into.view(total.shape)


@dataclass(frozen=True)
class Shifted(Form):
    """A convolution's gradients, one offset of its kernel after another: each is a product of its own."""

    pieces: tuple[Callable[[], Products], ...]  # for each entry of the kernel; made when needed, and not kept
    whole: Callable[[], Products]  # all of them at once
    examples: int
    shape: torch.Size  # (rows, columns, *kernel)
    patches: tuple[Patches, ...] = ()  # what the kernel saw, where its products need no unfolding

    def scores(self, start: int, stop: int) -> Tensor:
        scores = [piece().scores(start, stop) for piece in self.pieces]
        return torch.stack(scores, -1).view(stop - start, *self.shape)

    def only(self, example: int) -> Shifted:
        pieces = tuple(functools.partial(piece().only, example) for piece in self.pieces)
        patches = tuple(each.only(example) for each in self.patches)
        return Shifted(pieces, functools.partial(self.whole().only, example), 1, self.shape, patches)

    def with_more(self, others: Sequence[Form]) -> Shifted | None:
        same = [other for other in others if isinstance(other, Shifted)]
        if len(same) < len(others):
            return None

        def piece(place: int) -> Products:
            return _joined([each.pieces[place]() for each in (self, *same)])

        pieces = tuple(functools.partial(piece, place) for place in range(len(self.pieces)))
        return replace(self, pieces=pieces, whole=lambda: _joined([each.whole() for each in (self, *same)]), patches=())

    def add_squares_(self, total: Tensor, limit: Limit, name: str = "a parameter") -> None:
        flat = total.view(*self.shape[:2], len(self.pieces))
        for place, piece in enumerate(self.pieces):
            squares = total.new_zeros(self.shape[:2])
            piece().add_squares_(squares, limit, name)
            flat[..., place] += squares


def _joined(every: Sequence[Products]) -> Products:
    """The products of one weight, their positions one behind the other."""

    def left(start: int, stop: int) -> Tensor:
        return torch.cat([each.left(start, stop) for each in every], 2)

    def right(start: int, stop: int) -> Tensor:
        return torch.cat([each.right(start, stop) for each in every], 2)

    positions, share = sum(each.positions for each in every), sum(each.share for each in every)
    return replace(every[0], left=left, right=right, positions=positions, share=share)


def add_outer_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add Σₙ leftₙ rightₙᵀ for sides of one position: (batch, groups, 1, rows) and (…, columns)."""
    if left.shape[1] == 1 and total.ndim == 2 and total.numel() > _SMALL:
        total.addmm_(left.flatten(1).T, right.flatten(1))
    elif left.shape[1] == 1 and total.ndim == 2:  # apart: in place, a small product is rounded to the total row by row
        total += left.flatten(1).T @ right.flatten(1)
    else:
        total += torch.einsum("ngtr,ngtc->grc", left, right).reshape(total.shape)


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype to add up in: float32 at least, because half precision stops growing after a few hundred terms."""
    return torch.promote_types(tensor.dtype, torch.float32)
