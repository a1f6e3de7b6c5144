"""Inputs kept as they are: unlabeled data that stands in for the old, or text of the old model's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import ArgumentError, MismatchError, require_number
from .base import MOST, Probes, drawn_rows, require_one_amount, require_one_range


@dataclass(frozen=True, eq=False, repr=False)
class KeptInputs(Probes):
    """Rows of inputs, each standing for so many old examples (or tokens), and drawn as often."""

    inputs: Tensor
    weights: Tensor  # (rows,)
    unit: str = "example"
    layer: str = ""
    blank: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, Tensor) or self.inputs.ndim < 1 or not len(self.inputs):
            raise ArgumentError("kept inputs are a tensor with the examples first, at least one of them.")
        if self.inputs.is_floating_point() and not bool(self.inputs.isfinite().all()):
            raise ArgumentError("kept inputs must be finite.")
        sound = self.weights.is_floating_point() and self.weights.shape == self.inputs.shape[:1]
        if not sound or not bool(((self.weights > 0) & (self.weights <= MOST)).all()):
            raise ArgumentError("each kept input stands for a positive number of old ones.")

    def __repr__(self) -> str:
        return f"KeptInputs({tuple(self.inputs.shape)} for {self.num_data:g} {self.unit}s)"

    @cached_property  # read off a device once
    def num_data(self) -> float:  # type: ignore[override]
        return float(self.weights.double().sum())

    @property
    def shape(self) -> torch.Size:
        return self.inputs.shape[1:]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"inputs": self.inputs, "weights": self.weights}

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "kept", "unit": self.unit}

    @staticmethod
    def made(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> KeptInputs:
        """Those that facts and tensors describe."""
        return KeptInputs(tensors["inputs"], tensors["weights"], str(facts["unit"]))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return self.inputs[drawn_rows(self.weights, count, generator)]

    def thinned(self, factor: float) -> Self:
        return replace(self, weights=self.weights * factor)

    def require_alike(self, other: Self) -> None:
        mine, theirs = self.inputs, other.inputs
        if mine.is_floating_point() != theirs.is_floating_point():
            raise MismatchError(f"these inputs are {mine.dtype} and {theirs.dtype}: they are not of one preprocessing.")
        if mine.is_floating_point():
            require_one_range([(float(each.min()), float(each.max())) for each in (mine, theirs)])

    def plus(self, other: Self) -> Self:
        if self.inputs.shape == other.inputs.shape and torch.equal(self.inputs, other.inputs.to(self.inputs)):
            require_one_amount(self.num_data, other.num_data)
            return self  # the same evidence, come by two ways, counts once
        weights = torch.cat([self.weights, other.weights])
        return replace(self, inputs=torch.cat([self.inputs, other.inputs]), weights=weights)

    def to(self, device: torch.device | str) -> KeptInputs:
        return replace(self, inputs=self.inputs.to(device), weights=self.weights.to(device))


def kept_inputs(inputs: Tensor, *, num_data: float | None = None, unit: str = "example") -> KeptInputs:
    """Unlabeled inputs to distill on, standing for `num_data` old examples: as many as there are, if not said."""
    if not isinstance(inputs, Tensor):
        raise ArgumentError(f"kept inputs are a tensor with the examples first, got {type(inputs).__name__}.")
    if inputs.ndim < 1 or not len(inputs):
        raise ArgumentError("kept inputs are a tensor with the examples first, at least one of them.")
    total = float(len(inputs)) if num_data is None else require_number(num_data, "num_data", positive=True)
    weights = torch.full((len(inputs),), total / len(inputs), dtype=torch.float32, device=inputs.device)
    return KeptInputs(inputs, weights, unit)
