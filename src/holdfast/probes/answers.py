"""What a model answered on old data, with the labels, for a few of its examples: outputs alone, and no inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import ArgumentError, MismatchError
from ..likelihood import Likelihood, bernoulli, categorical, gaussian

_GAUSSIAN = re.compile(r"gaussian\(scale=([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\)")


@dataclass(frozen=True, eq=False, repr=False)
class Answers:
    """A random sample of outputs and labels, in random order, that stands for `num_data` old examples (or tokens).

    `kind` is the name of the likelihood of a single one: of tokens, each is one of several classes. Of a head that grew
    between two tasks, `known` says how many outputs each had when it was kept; what stands behind them is nothing.
    """

    outputs: Tensor  # (rows, *output)
    labels: Tensor  # (rows,) classes, or (rows, *output) values
    kind: str
    num_data: float
    unit: str = "example"
    known: Tensor | None = None  # (rows,) where not all have as many

    def __post_init__(self) -> None:
        likelihood = self.likelihood
        if not self.outputs.is_floating_point() or self.outputs.ndim < 1 or not len(self.outputs):
            raise ArgumentError("answers are outputs of a model, floating-point numbers, at least one of them.")
        if not bool(self.outputs.isfinite().all()) or not 0 < self.num_data < float("inf"):
            raise ArgumentError("answers must be finite, and stand for a positive number of examples.")
        if self.known is None:
            likelihood.require(self.outputs, self.labels)
            return
        sound = self.outputs.ndim == 2 and self.known.dtype == torch.long and self.known.shape == self.labels.shape[:1]
        if not sound or not bool(((self.known > 0) & (self.known <= self.outputs.shape[-1])).all()):
            raise ArgumentError("answers know of one output or more each, and of no more than there are.")
        for each in self.alike:
            likelihood.require(each.outputs, each.labels)

    def __repr__(self) -> str:
        return f"Answers({tuple(self.outputs.shape)} for {self.num_data:g} {self.unit}s, {self.kind})"

    @property
    def likelihood(self) -> Likelihood:
        """Of a single answer."""
        scale = _GAUSSIAN.fullmatch(self.kind)
        if scale is not None:
            return gaussian(float(scale[1]))
        found = {each.name: each for each in (categorical, bernoulli)}.get(self.kind)
        if found is None:
            raise ArgumentError(
                f"answers are kept for categorical, bernoulli, gaussian and tokens, not for {self.kind[:60]!r}: of a "
                "likelihood of one's own, a file could not say what it is."
            )
        return found

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All it holds, by name."""
        known = {} if self.known is None else {"known": self.known}
        return {"outputs": self.outputs, "labels": self.labels, **known}

    @property
    def facts(self) -> dict[str, Any]:
        """What a file says of it besides its tensors."""
        return {"kind": self.kind, "num_data": self.num_data, "unit": self.unit}

    @staticmethod
    def made(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Answers:
        """Those that a file describes; the values check themselves."""
        found = Answers(
            tensors["outputs"], tensors["labels"], str(facts["kind"]), float(facts["num_data"]), str(facts["unit"]),
            tensors.get("known"),
        )  # fmt: skip
        if set(found.tensors) != set(tensors):
            raise ArgumentError("its tensors are not those of its answers.")
        return found

    @property
    def alike(self) -> list[Answers]:
        """The same in parts of which each has one number of outputs."""
        if self.known is None:
            return [self]
        parts = []
        for count in sorted(set(self.known.tolist())):
            rows = self.known == count
            labels = self.labels[rows] if self.labels.ndim == 1 else self.labels[rows, :count]
            share = self.num_data * float(rows.double().mean())
            parts.append(Answers(self.outputs[rows, :count], labels, self.kind, share, self.unit))
        return parts

    def __add__(self, other: Answers) -> Answers:
        """Those of both, each with as many rows as it has of the data, in no more memory than the larger one.

        So the one that has few rows for its data decides how many there are. Outputs may have been added at the end
        between them: those of the smaller head stay answers of as many outputs as it had.
        """
        for what in ("kind", "unit"):
            if getattr(self, what) != getattr(other, what):
                raise MismatchError(
                    f"these answers differ in their {what}, {getattr(self, what)!r} and {getattr(other, what)!r}."
                )
        sizes = self.outputs.shape[1:], other.outputs.shape[1:]
        if sizes[0] != sizes[1] and not len(sizes[0]) == len(sizes[1]) == 1:
            raise MismatchError(
                f"these answers have outputs of shape {tuple(sizes[0])} and {tuple(sizes[1])}: they are not of one "
                "model. Only a number of outputs may have grown between them."
            )
        total, counts = self.num_data + other.num_data, (len(self.outputs), len(other.outputs))
        if math.isinf(total):
            raise ArgumentError("together these answers would stand for more examples than there are numbers.")
        share = self.num_data / total
        enough = [
            count * (total / each.num_data) for count, each in zip(counts, (self, other), strict=True)
        ]  # rows, of which so many are its own
        rows = max(1, int(min(max(counts), *enough)))
        generator = torch.Generator().manual_seed((rows + int(total)) % 2**63)
        # Up or down by chance: always down would never let in a task that is small beside all before it.
        first = min(counts[0], int(rows * share + float(torch.rand((), generator=generator, dtype=torch.float64))))
        second = min(counts[1], rows - first)
        # Rows are in random order, so that the first ones are a sample; and must be again.
        order = torch.randperm(first + second, generator=generator)
        width = max(sizes)
        outputs, labels, known = (
            torch.cat([mine[:first], theirs[:second].to(mine.device)])[order.to(mine.device)]  # in the wider dtype
            for mine, theirs in zip(self._widened(width), other._widened(width), strict=True)
        )
        same = len(width) != 1 or bool((known == width[0]).all())
        return replace(self, outputs=outputs, labels=labels, num_data=total, known=None if same else known)

    def _widened(self, width: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs and labels with zeros up to a width, and how many of them each row knows."""
        count = self.outputs.shape[-1]
        more = (0, width[0] - count) if self.outputs.ndim == 2 else (0, 0)
        labels = pad(self.labels, more) if self.labels.ndim == 2 else self.labels
        known = torch.full((len(labels),), count, device=labels.device)
        return pad(self.outputs, more), labels, known if self.known is None else self.known

    def thinned(self, factor: float) -> Answers:
        """The same, standing for so many times as much data."""
        return replace(self, num_data=self.num_data * factor)

    def to(self, device: torch.device | str) -> Answers:
        """The same on another device."""
        known = None if self.known is None else self.known.to(device)
        return replace(self, outputs=self.outputs.to(device), labels=self.labels.to(device), known=known)
