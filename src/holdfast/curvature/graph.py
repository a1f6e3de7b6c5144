"""The graph that autograd keeps of a batch: which operation used which parameter, and where gradients can be tapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

# An output of an operation: the operation's node, and which of its outputs.
Value = tuple[Node, int]


class Graph:
    """The operations behind some losses, in the order of a walk from the losses to the parameters.

    An operation is known by its node in the backward graph, which also holds what it saved of the forward pass. Two
    passes of one model over batches of different sizes have the same walk, up to copies that a layout needs.
    """

    def __init__(self, losses: Tensor, named: Mapping[str, Tensor]) -> None:
        names = {id(parameter): name for name, parameter in named.items()}
        self.nodes: list[Node] = []
        self.leaves: dict[str, Value] = {}
        self.consumers: dict[Value, list[tuple[Node, int]]] = {}
        assert losses.grad_fn is not None
        seen, stack = {losses.grad_fn}, [losses.grad_fn]
        while stack:
            node = stack.pop()
            self.nodes.append(node)
            leaf = names.get(id(getattr(node, "variable", None)))
            if leaf is not None:
                self.leaves[leaf] = (node, 0)
            for slot, (source, output) in enumerate(node.next_functions):
                if source is None:
                    continue
                self.consumers.setdefault((source, output), []).append((node, slot))
                if source not in seen:
                    seen.add(source)
                    stack.append(source)

        self.places = {node: place for place, node in enumerate(self.nodes)}

    @property
    def form(self) -> tuple[Any, ...]:
        """What two passes must share for one's plan to serve the other."""
        return tuple((node.name(), shapes(node)) for node in self.nodes)

    def used_outputs(self, node: Node) -> list[int]:
        """Which outputs of an operation something uses."""
        return [output for output in range(len(shapes(node))) if (node, output) in self.consumers]

    def lowest(self, marked: set[Node]) -> set[Node]:
        """The marked nodes from which no other marked one is reached on the way to the parameters."""
        users: dict[Node, list[Node]] = {}
        for (source, _), consumers in self.consumers.items():
            users.setdefault(source, []).extend(node for node, _ in consumers)
        above: set[Node] = set()
        stack = list(marked)
        while stack:
            for user in users.get(stack.pop(), ()):
                if user not in above:
                    above.add(user)
                    stack.append(user)
        return marked - above


def shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    """The shapes of an operation's outputs."""
    variable = getattr(node, "variable", None)
    if variable is not None:
        return (tuple(variable.shape),)
    return tuple(tuple(meta.shape) for meta in node._input_metadata)


def tapped(loss: Tensor, graph: Graph, places: set[int], heard: Callable[[int, Tensor], None], *, retain: bool) -> None:
    """Run a backward pass that forms no parameter's gradient, and let `heard` have the output gradients at `places`.

    Gradients are heard as they pass and are not kept, but for the lowest nodes', which end the pass.
    """
    nodes = {place: graph.nodes[place] for place in places}
    lowest = graph.lowest(set(nodes.values()))
    ends = [place for place, node in nodes.items() if node in lowest]

    def listener(place: int) -> Callable[[tuple[Tensor | None, ...]], None]:
        def listen(grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None:
                heard(place, grads[0])

        return listen

    handles = [node.register_prehook(listener(place)) for place, node in nodes.items() if node not in lowest]
    try:
        edges = [GradientEdge(nodes[place], 0) for place in ends]
        found = list(torch.autograd.grad(loss, edges, retain_graph=retain, allow_unused=True))
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        while ends:
            place, grad = ends.pop(), found.pop()
            if grad is not None:
                heard(place, grad)
