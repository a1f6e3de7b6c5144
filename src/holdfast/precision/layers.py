"""A layer's weight, with its bias folded in, as a matrix of outputs × inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, MismatchError
from .base import require_growth


@dataclass(frozen=True)
class Layer:
    """How a weight, and the bias beside it, are a matrix of outputs × inputs: one for each of `groups`.

    A weight is stored as (groups, rows, columns). Its inputs lie along the columns (torch's Linear), or along the rows
    where it is `turned`; a bias is what belongs to one more input, which is always 1.
    """

    weight: str
    bias: str | None
    shape: torch.Size  # of the weight
    groups: int
    rows: int
    turned: bool

    def __post_init__(self) -> None:
        sizes = (self.groups, self.rows, *self.shape)
        if min(sizes, default=0) < 1 or self.shape.numel() % (self.groups * self.rows):
            raise ArgumentError(
                f"`{self.weight}` of shape {tuple(self.shape)} is not {self.groups} matrices of {self.rows} rows."
            )

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The parameters it is made of."""
        found = {self.weight: self.shape}
        if self.bias is not None:
            found[self.bias] = torch.Size([self.groups * self.outputs])
        return found

    @property
    def _columns(self) -> int:
        return self.shape.numel() // (self.groups * self.rows)

    @property
    def outputs(self) -> int:
        """How many outputs a group has."""
        return self._columns if self.turned else self.rows

    @property
    def inputs(self) -> int:
        """How many inputs a group has, the bias's own included."""
        return (self.rows if self.turned else self._columns) + (self.bias is not None)

    def matrix(self, tensors: Mapping[str, Tensor], width: int = 0) -> Tensor:
        """Tensors of the parameters' shapes as one: (groups, outputs, inputs), with zeros behind up to a `width`."""
        matrix = tensors[self.weight].reshape(self.groups, self.rows, -1)
        parts = [matrix.mT if self.turned else matrix]
        if self.bias is not None:
            parts.append(tensors[self.bias].reshape(self.groups, -1, 1).to(matrix.device))
        if width > self.inputs:
            parts.append(matrix.new_zeros(self.groups, self.outputs, width - self.inputs))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of `matrix`."""
        weight = matrix if self.bias is None else matrix[..., :-1]
        found = {self.weight: (weight.mT if self.turned else weight).reshape(self.shape)}
        if self.bias is not None:
            found[self.bias] = matrix[..., -1].flatten()
        return found

    def places(self) -> Tensor:
        """Where the matrix's entries are among the flattened parameters, one behind the other."""
        found, start = {}, 0
        for name, shape in self.shapes.items():
            found[name] = torch.arange(start, start + shape.numel()).view(shape)
            start += shape.numel()
        return self.matrix(found)

    def unnamed(self) -> Layer:
        """What it is but for its names: the same for layers that are alike."""
        return replace(self, weight="weight", bias=None if self.bias is None else "bias")

    def renamed(self, names: Mapping[str, str]) -> Layer:
        """The same with parameters under new names."""
        bias = None if self.bias is None else names.get(self.bias, self.bias)
        return replace(self, weight=names.get(self.weight, self.weight), bias=bias)

    def expanded(self, shapes: Mapping[str, torch.Size]) -> tuple[Layer, Tensor, Tensor]:
        """The layer grown to `shapes`, and where its old outputs and inputs are among the new ones."""
        new = shapes.get(self.weight, self.shape)
        require_growth(self.shape, new)
        if new != self.shape and (self.groups > 1 or self.rows != self.shape[0]):
            alone = "Expand it as a diagonal: the precision's diagonal() has its entries."
            raise MismatchError(
                f"`{self.weight}` grew from {tuple(self.shape)} to {tuple(new)}, and is used as {self.groups}×"
                f"{self.rows}×{self._columns}: its old rows would not stay in front. "
                f"{alone if self.groups == 1 else 'Make a new memory of the grown model.'}"
            )
        rows = self.rows if new == self.shape else new[0]
        layer = replace(self, shape=new, rows=rows)
        if self.bias is not None and shapes.get(self.bias, layer.shapes[self.bias]) != layer.shapes[self.bias]:
            raise MismatchError(
                f"`{self.weight}` grew to {tuple(new)} and `{self.bias}` to {tuple(shapes[self.bias])}: they do not "
                "belong together any more."
            )
        across = torch.arange(new[1:].numel()).view(new[1:])[tuple(slice(size) for size in self.shape[1:])].flatten()
        sides = [torch.arange(self.rows), across if new != self.shape else torch.arange(self._columns)]
        inputs, outputs = sides if self.turned else reversed(sides)
        if self.bias is not None:
            inputs = torch.cat([inputs, torch.tensor([layer.inputs - 1])])
        return layer, outputs, inputs

    def described(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "weight": self.weight, "bias": self.bias, "shape": list(self.shape),
            "groups": self.groups, "rows": self.rows, "turned": self.turned,
        }  # fmt: skip

    @staticmethod
    def made(facts: Mapping[str, Any]) -> Layer:
        """The inverse of `described`."""
        bias = None if facts["bias"] is None else str(facts["bias"])
        shape = torch.Size(int(size) for size in facts["shape"])
        return Layer(str(facts["weight"]), bias, shape, int(facts["groups"]), int(facts["rows"]), bool(facts["turned"]))
