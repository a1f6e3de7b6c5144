"""Gaussian probes: inputs drawn from the mean and a low-rank covariance of those that are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..curvature.batches import LABELS
from ..errors import ArgumentError, DataError, require_number
from ..params import unwrapped
from .base import MOST, Probes, drawn_rows, require_one_amount, require_one_range
from .layer import captured
from .moments import Moments, longest

RANK = 100  # as good as all directions on MNIST, where variances alone are not


@dataclass(frozen=True, eq=False)
class Component:
    """N(mean, UᵀU + diag(rest)) over flat inputs, for `num_data` of them that lay between `low` and `high`."""

    mean: Tensor  # (entries,)
    factors: Tensor  # U, (rank, entries)
    rest: Tensor  # (entries,)
    num_data: float
    low: float
    high: float

    def __post_init__(self) -> None:
        entries, dtypes = self.mean.shape, {self.mean.dtype, self.factors.dtype, self.rest.dtype}
        if len(dtypes) > 1 or not self.mean.is_floating_point():
            raise ArgumentError("a Gaussian's mean, factors and rest are floating-point numbers of one kind.")
        if (
            self.mean.ndim != 1
            or self.factors.ndim != 2
            or self.factors.shape[1:] != entries
            or self.rest.shape != entries
        ):
            raise ArgumentError("a Gaussian's mean, factors and rest do not have the same entries.")
        if not all(bool(each.isfinite().all()) for each in (self.mean, self.factors, self.rest)):
            raise ArgumentError("a Gaussian of inputs has numbers that are not finite.")
        if bool((self.rest < 0).any()) or not 0 < self.num_data <= MOST or not self.low <= self.high:
            raise ArgumentError("a Gaussian of inputs has a negative variance, stands for no data, or has no range.")


@dataclass(frozen=True, eq=False, repr=False)
class GaussianProbes(Probes):
    """A Gaussian for each part of the old data, drawn from by how much there was of each.

    Mean and covariance are all that is kept: no input, but more than nothing about them (see docs/distillation.md).
    """

    components: tuple[Component, ...]
    entries: torch.Size
    layer: str = ""
    blank: Tensor | None = None
    unit: str = "example"

    def __post_init__(self) -> None:
        if not self.components or any(len(each.mean) != self.entries.numel() for each in self.components):
            raise ArgumentError("Gaussian probes need at least one Gaussian, each over the entries of an input.")
        blank = self.blank
        if bool(self.layer) != (blank is not None) or (
            blank is not None and (blank.shape[:1] != (1,) or bool(blank.count_nonzero()))
        ):
            raise ArgumentError("probes at a layer carry a blank input of the model, and those of its inputs none.")

    def __repr__(self) -> str:
        ranks = ", ".join(str(len(each.factors)) for each in self.components)
        where = f" at `{self.layer}`" if self.layer else ""
        return f"GaussianProbes({tuple(self.shape)}{where}, rank {ranks}, {self.num_data:g} {self.unit}s)"

    @property
    def num_data(self) -> float:  # type: ignore[override]
        return sum(each.num_data for each in self.components)

    @property
    def shape(self) -> torch.Size:
        return self.entries

    @property
    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for index, each in enumerate(self.components):
            found |= {f"{index}.mean": each.mean, f"{index}.factors": each.factors, f"{index}.rest": each.rest}
        return found if self.blank is None else {**found, "blank": self.blank}

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "kind": "gaussian", "shape": list(self.shape), "layer": self.layer, "unit": self.unit,
            "parts": [[each.num_data, each.low, each.high] for each in self.components],
        }  # fmt: skip

    @staticmethod
    def made(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> GaussianProbes:
        """Those that facts and tensors describe."""
        parts = [
            Component(
                tensors[f"{index}.mean"],
                tensors[f"{index}.factors"],
                tensors[f"{index}.rest"],
                float(num_data),
                float(low),
                float(high),
            )
            for index, (num_data, low, high) in enumerate(facts["parts"])
        ]
        shape = torch.Size(int(size) for size in facts["shape"])
        return GaussianProbes(tuple(parts), shape, str(facts["layer"]), tensors.get("blank"), str(facts["unit"]))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        weights, means, deviations = self._stacked
        whose = drawn_rows(weights, count, generator)
        how = {"generator": generator, "device": means.device, "dtype": means.dtype}
        # Every row is of one Gaussian, so the same noise serves them all.
        along = torch.randn(count, max(len(each.factors) for each in self.components), **how)  # type: ignore[call-overload]
        alone = torch.randn(count, means.shape[1], **how)  # type: ignore[call-overload]
        found: Tensor = means[whose] + alone * deviations[whose]
        for index, each in enumerate(self.components):
            mine = (whose == index).unsqueeze(1)
            found = found + torch.where(mine, along[:, : len(each.factors)], 0) @ each.factors
        return found.view(count, *self.shape)

    @cached_property
    def _stacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and deviations of all, on the device: a step of training makes none of them anew."""
        means = torch.stack([each.mean for each in self.components])
        weights = torch.tensor([each.num_data for each in self.components], dtype=torch.float64, device=means.device)
        return weights, means, torch.stack([each.rest.sqrt() for each in self.components])

    def plus(self, other: Self) -> Self:
        # The same evidence, come by two ways, counts once.
        new = []
        for each in other.components:
            there = [mine for mine in self.components if _same(each, mine)]
            for mine in there:
                require_one_amount(mine.num_data, each.num_data)
            new += [] if there else [each]
        return replace(self, components=(*self.components, *new))

    def thinned(self, factor: float) -> Self:
        parts = tuple(replace(each, num_data=each.num_data * factor) for each in self.components)
        return replace(self, components=parts)

    def require_alike(self, other: Self) -> None:
        if not self.layer:  # features of one model may well differ between tasks
            require_one_range([(each.low, each.high) for each in (*self.components, *other.components)])

    def merged(self, rank: int | None = None) -> GaussianProbes:
        """One Gaussian with the mean and covariance of all of them, cut to the largest rank among them (or `rank`)."""
        if rank is not None:
            _require_rank(rank, self.entries.numel())
        if len(self.components) == 1 and rank is None:
            return self
        total = self.num_data
        weights = [each.num_data / total for each in self.components]
        means = torch.stack([each.mean for each in self.components])
        mean = torch.tensor(weights).to(means) @ means
        parts, squares = [], torch.zeros_like(mean, dtype=torch.float64)
        for w, each in zip(weights, self.components, strict=True):
            rows = torch.cat([each.factors, (each.mean - mean).unsqueeze(0)]).double() * w**0.5
            parts.append(rows)
            squares += rows.square().sum(0) + w * each.rest.double()
        kept = longest(torch.cat(parts), rank or max(len(each.factors) for each in self.components))
        rest = (squares - kept.square().sum(0)).clamp(min=0)
        low, high = min(each.low for each in self.components), max(each.high for each in self.components)
        one = Component(mean, kept.to(mean), rest.to(mean), total, low, high)
        return replace(self, components=(one,))

    def to(self, device: torch.device | str) -> GaussianProbes:
        moved = tuple(
            replace(each, mean=each.mean.to(device), factors=each.factors.to(device), rest=each.rest.to(device))
            for each in self.components
        )
        return replace(self, components=moved, blank=None if self.blank is None else self.blank.to(device))


def gaussian_probes(
    batches: Iterable[Any],
    *,
    rank: int | None = None,
    model: nn.Module | None = None,
    layer: str = "",
    forward: Callable[[nn.Module, Any], Any] | None = None,
    num_data: float | None = None,
) -> GaussianProbes:
    """The mean and a rank-r covariance of the inputs in `batches`, with the other variances on a diagonal: one pass.

    Batches are tensors of inputs, or tuples whose first part they are. With `layer`, the name of a module of `model`,
    they are the outputs of that module instead. The default rank is 100, or as much as the data has. `num_data` says
    how many old examples there were, where the batches are a part of them.
    """
    if not isinstance(layer, str) or bool(layer) != (model is not None):
        raise ArgumentError("probes at a layer need `model` and `layer`, its name; those of the inputs need neither.")
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise DataError(
            f"an iterable of batches is needed, such as a DataLoader, got {type(batches).__name__}: give [x] for a "
            "tensor of inputs."
        )
    model = None if model is None else unwrapped(model)
    moments, low, high = None, float("inf"), float("-inf")
    shape, blank = torch.Size(), None
    for index, batch in enumerate(batches):
        inputs = _inputs(batch, index)
        seen = inputs if model is None else captured(model, layer, batch, inputs, forward)
        _require_drawable(seen, index, layer)
        if moments is None:
            limit = RANK if rank is None else _require_rank(rank, seen[0].numel())
            moments, shape = Moments(min(limit, seen[0].numel())), seen.shape[1:]
            blank = None if model is None else torch.zeros_like(inputs[:1])
        elif seen.shape[1:] != shape:
            raise DataError(f"batch {index} has inputs of shape {tuple(seen.shape[1:])}, those before {tuple(shape)}.")
        low, high = min(low, float(seen.min())), max(high, float(seen.max()))
        moments.add(seen.flatten(1))
    if moments is None:
        raise DataError("there are no batches: nothing is known of the inputs. Is the loader empty, or used up?")
    if moments.count < 2:
        raise DataError("one example has no covariance: give more of the inputs.")
    if rank is not None and rank > moments.count - 1:
        raise ArgumentError(
            f"rank={rank}, and {moments.count} examples vary in {moments.count - 1} directions at most. Give "
            f"rank={moments.count - 1} or less, or none."
        )
    mean, factors, rest = (each.float() for each in moments.found())
    count = moments.count if num_data is None else require_number(num_data, "num_data", positive=True)
    one = Component(mean, factors, rest, float(count), low, high)
    return GaussianProbes((one,), shape, layer, blank)


def _same(one: Component, other: Component) -> bool:
    pairs = ((one.mean, other.mean), (one.rest, other.rest), (one.factors, other.factors))
    return all(torch.equal(a, b.to(a)) for a, b in pairs)


def _inputs(batch: Any, index: int) -> Tensor:
    found = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(found, Mapping):
        inputs = [each for key, each in found.items() if key not in LABELS]  # labels of a regression are floats too
        floats = [each for each in inputs if isinstance(each, Tensor) and each.is_floating_point()]
        found = floats[0] if len(floats) == 1 else found
    if not isinstance(found, Tensor) or found.ndim < 2 or not len(found):
        raise DataError(
            f"batch {index} has no inputs to take moments of: a tensor (examples, …) is needed, or a tuple that starts "
            f"with one, got {type(found).__name__}."
        )
    return found


def _require_drawable(seen: Tensor, index: int, layer: str) -> None:
    where = f"the output of `{layer}`" if layer else "the inputs"
    if not seen.is_floating_point():
        raise DataError(
            f"{where} are {seen.dtype}: numbers of words or classes have no mean. For images, convert them as the "
            "model takes them; for text, take samples of the model itself (holdfast.own_text), or probes at a layer "
            "after the embedding."
        )
    if not bool(seen.isfinite().all()):
        raise DataError(f"batch {index}: {where} are not all finite.")


def _require_rank(rank: object, entries: int) -> int:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ArgumentError(f"rank is a number of directions, 1 or more, got {rank!r}.")
    if rank > entries:
        raise ArgumentError(f"rank={rank}, and an input has {entries} entries: give rank={entries} or less.")
    return rank
