"""From a parameter to the weight that an operation saw: transposed, cast, split, or computed from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .graph import Graph, Value, shapes

# What an operation did that only rearranges, as a value: a name, and its arguments.
Step = tuple[Any, ...]


@dataclass(frozen=True)
class Route:
    """How a weight comes from its parameters.

    `steps` rearrange a parameter into the weight; they are None where it is computed, by more than rearranging.
    """

    place: int  # of the weight's node in the graph, and which of its outputs
    output: int
    steps: tuple[Step, ...] | None

    @property
    def key(self) -> Any:
        """Equal for the routes on which the gradients of a parameter's uses can be joined."""
        return (self.place, self.output) if self.steps is None else self.steps

    def leads_the_same_way(self, graph: Graph, weight: torch.Size) -> bool:
        """Whether in another graph of the same structure the same part of the parameter is used."""
        value = (graph.nodes[self.place], self.output)
        if shapes(value[0])[self.output] != weight:
            return False
        fixed = self.steps is None or all(step[0] in ("same", "transposed") for step in self.steps)
        return fixed or route(value, graph).steps == self.steps

    def view(self, tensors: Tensor) -> Tensor:
        """The weight's part of tensors shaped like the parameter, with one axis in front."""
        for step in self.steps or ():
            tensors = _applied(step, tensors)
        return tensors

    def pulled(self, scores: Tensor, parameter: Tensor, graph: Graph) -> Tensor:
        """Gradients of the weight, (examples, *weight), turned into gradients of the parameter."""
        if self.steps is not None:
            found = scores.new_zeros(len(scores), *parameter.shape)
            self.view(found).add_(scores)
            return found
        node = graph.nodes[self.place]
        edge, dtype = GradientEdge(node, self.output), node._input_metadata[self.output].dtype
        grads = scores.to(dtype)
        try:
            (found,) = torch.autograd.grad(
                [edge], [parameter], [grads], retain_graph=True, is_grads_batched=True, materialize_grads=True
            )
        except RuntimeError:  # an operation without a batching rule: one by one
            each = [
                torch.autograd.grad([edge], [parameter], [grad], retain_graph=True, materialize_grads=True)[0]
                for grad in grads
            ]
            found = torch.stack(each)
        return found


def route(value: Value, graph: Graph) -> Route:
    """The way from a weight back to its parameters."""
    node, output = value
    steps: list[Step] = []
    while not hasattr(node, "variable"):
        step = _step(node, output)
        if step is None:
            return Route(graph.places[value[0]], value[1], None)
        steps.append(step)
        ((node, output),) = [(source, index) for source, index in node.next_functions if source is not None]
    found = Route(graph.places[value[0]], value[1], tuple(reversed(steps)))
    try:
        found.view(torch.empty(1, *node.variable.shape, device="meta"))
    except RuntimeError:  # rearranged in a way that has no view
        return Route(found.place, found.output, None)
    return found


def _step(node: Node, output: int) -> Step | None:
    """What an operation that only rearranges did, for one of its outputs; None if it does more."""
    match node.name():
        case "ToCopyBackward0" | "AliasBackward0" | "CloneBackward0":
            return ("same",)
        case "TBackward0" if len(shapes(node)[0]) == 2:
            return ("transposed", 1, 2)
        case "TransposeBackward0" | "TransposeBackward1":
            return ("transposed", _axis(node, "dim0"), _axis(node, "dim1"))
        case "PermuteBackward0":
            axes = len(shapes(node)[0])
            return ("permuted", 0, *(_signed(dim) % axes + 1 for dim in _saved(node, "dims")))
        case (
            "ViewBackward0" | "UnsafeViewBackward0" | "ReshapeAliasBackward0" | "UnsqueezeBackward0"
            | "SqueezeBackward0" | "SqueezeBackward1" | "SqueezeBackward2"
        ):  # fmt: skip
            return ("viewed", *shapes(node)[output])
        case "SelectBackward0":
            return ("selected", _axis(node), _signed(_saved(node, "index")))
        case "SliceBackward0":
            return ("sliced", _axis(node), *(_signed(_saved(node, name)) for name in ("start", "end", "step")))
        case "SplitBackward0" | "UnsafeSplitBackward0":
            return ("split", _axis(node), int(_saved(node, "split_size")), output)
        case "SplitWithSizesBackward0" | "UnsafeSplitWithSizesBackward0":
            return ("split", _axis(node), tuple(int(size) for size in _saved(node, "split_sizes")), output)
    return None


def _applied(step: Step, tensors: Tensor) -> Tensor:
    """A step done again, as a view, on tensors with one more axis in front."""
    match step:
        case ("transposed", first, second):
            return tensors.transpose(first, second)
        case ("permuted", *order):
            return tensors.permute(order)
        case ("viewed", *shape):
            return tensors.view(len(tensors), *shape)
        case ("selected", axis, index):
            return tensors.select(axis, index)
        case ("sliced", axis, start, end, stride):
            return tensors.movedim(axis, 0)[start:end:stride].movedim(0, axis)
        case ("split", axis, sizes, output):
            return torch.split(tensors, list(sizes) if isinstance(sizes, tuple) else sizes, axis)[output]
    return tensors


def _saved(node: Node, name: str) -> Any:
    return getattr(node, f"_saved_{name}")


def _signed(value: int) -> int:
    """Negative numbers are saved as large unsigned ones."""
    return value - 2**64 if value >= 2**63 else value


def _axis(node: Node, name: str = "dim") -> int:
    """An axis that an operation saved, counted behind the one in front."""
    axis = _signed(_saved(node, name))
    return axis + 1 if axis >= 0 else axis
