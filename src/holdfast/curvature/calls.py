"""A call of an operation, with the examples brought to the front of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


@dataclass(frozen=True)
class Split:
    """Where the examples are along an axis of a tensor: it holds (outer, examples, inner), flattened."""

    axis: int
    outer: int
    examples: int
    inner: int

    def rows(self, tensor: Tensor) -> Tensor:
        """Examples first; behind them, the tensor as it would be for one example alone."""
        if self.axis == 0 and self.outer == 1:
            return torch.unflatten(tensor, 0, (self.examples, self.inner))
        parted = torch.unflatten(tensor, self.axis, (self.outer, self.examples, self.inner)).movedim(self.axis + 1, 0)
        return parted.flatten(self.axis + 1, self.axis + 2)


@dataclass(frozen=True)
class Call:
    """One call of an operation in which a weight, at input `slot`, met the examples."""

    node: Node
    slot: int
    weight: torch.Size
    split: Split
    output: torch.Size

    def saved(self, name: str) -> Any:
        """What the operation saved of its forward pass."""
        return getattr(self.node, f"_saved_{name}")

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor with the output's axes, examples first."""
        return self.split.rows(tensor)

    def rows_like_output(self, tensor: Tensor) -> Tensor:
        """A tensor that broadcasts to the output, examples first."""
        return self.split.rows(tensor.expand(self.output))
