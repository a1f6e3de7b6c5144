"""The graph that autograd keeps of a batch: which operation used which parameter, and where gradients can be tapped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

# An output of an operation: the operation's node, and which of its outputs.
Value = tuple[Node, int]

_LEAF = "torch::autograd::AccumulateGrad"
MOVING = ("Index", "Gather", "Scatter", "MaskedSelect", "Sort", "Topk", "Flip", "Roll", "Take")
# Matrix products, and the first of the two inputs that they multiply.
_PRODUCTS = {"MmBackward0": 0, "BmmBackward0": 0, "AddmmBackward0": 1}


class Graph:
    """The operations behind some losses, in the order of a walk from the losses to the parameters.

    An operation is known by its node in the backward graph, which also holds what it saved of the forward pass. Two
    passes of one model over batches of different sizes have the same walk, up to copies that a layout needs.
    """

    def __init__(self, losses: Tensor, named: Mapping[str, Tensor]) -> None:
        self._named = named
        self.nodes: list[Node] = []
        roots = [losses.grad_fn] if losses.grad_fn is not None else []
        order, stack, wiring = dict.fromkeys(roots, 0), list(roots), []
        while stack:
            node = stack.pop()
            self.nodes.append(node)
            for source, _ in node.next_functions:
                if source is None:
                    wiring.append(-1)
                    continue
                if source not in order:
                    order[source] = len(order)
                    stack.append(source)
                wiring.append(order[source])
        self._names = tuple(node.name() for node in self.nodes)
        self._wiring = tuple(wiring)

    def moves_rows(self, size: int) -> str:
        """The first operation that moves, picks or repeats rows along an axis of `size` examples, if there is one.

        Whose gradient a row then carries is for the data to say. Examples that stay in their places (the last position
        of each, say, taken by index) are not moved.
        """
        moving = {name for name in set(self._names) if any(word in name for word in MOVING)}
        for node, name in zip(self.nodes, self._names, strict=True) if moving else ():
            if name in moving and _moves(node, size):
                return name
        return ""

    def mixes_rows(self, other: Graph) -> str:
        """The first matrix product that sums over more entries than in a graph of fewer examples, if there is one.

        It may send each example to a row of its own (an expert's places, by a one-hot matrix) and another's gradient
        then stands where an example's own should be.
        """
        ours, theirs = ([node for node in graph.nodes if node.name() in _PRODUCTS] for graph in (self, other))
        differ = (mine.name() for mine, its in zip(ours, theirs, strict=False) if _terms(mine) != _terms(its))
        return next(differ, "") if len(ours) == len(theirs) else ""

    @property
    def structure(self) -> tuple[Any, ...]:
        """The operations, how they hang together, and the parameters at their ends: all of the graph but its sizes."""
        return self._names, self._wiring, tuple(self.leaves)

    @cached_property
    def places(self) -> dict[Node, int]:
        """Where each node is in the walk."""
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def consumers(self) -> dict[Value, list[tuple[Node, int]]]:
        """The operations that used each value, and as which of their inputs."""
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for slot, (source, output) in enumerate(node.next_functions):
                if source is not None:
                    found.setdefault((source, output), []).append((node, slot))
        return found

    @cached_property
    def leaves(self) -> dict[str, Value]:
        """The parameters that the losses depend on."""
        names = {id(parameter): name for name, parameter in self._named.items()}
        leaves = [node for node, kind in zip(self.nodes, self._names, strict=True) if kind == _LEAF]
        return {names[id(leaf.variable)]: (leaf, 0) for leaf in leaves if id(leaf.variable) in names}  # type: ignore[attr-defined]

    def used_outputs(self, node: Node) -> list[int]:
        """Which outputs of an operation something uses."""
        return [output for output in range(len(shapes(node))) if (node, output) in self.consumers]

    def lowest(self, places: Collection[int]) -> frozenset[int]:
        """The places from which no other of them is reached on the way to the parameters."""
        users: dict[Node, list[Node]] = {}
        for (source, _), consumers in self.consumers.items():
            users.setdefault(source, []).extend(node for node, _ in consumers)
        above: set[Node] = set()
        stack = [self.nodes[place] for place in places]
        while stack:
            for user in users.get(stack.pop(), ()):
                if user not in above:
                    above.add(user)
                    stack.append(user)
        return frozenset(place for place in places if self.nodes[place] not in above)


def _moves(node: Node, size: int) -> bool:
    """Whether an operation puts what belongs to examples, along the first axis, in other places."""
    rows = getattr(node, "_saved_self_sym_sizes", None) or shapes(node)[0]
    if not rows or (rows[0] != size and shapes(node)[0][:1] != (size,)):
        return False
    indices = getattr(node, "_saved_indices", None)
    if isinstance(indices, (tuple, list)):
        first = indices[0] if indices else None
    else:
        axes = getattr(node, "_saved_dims", None) or (getattr(node, "_saved_dim", 0),)
        if all(int(axis) % 2**64 not in (0, 2**64 - len(rows)) for axis in axes):
            return False
        first = getattr(node, "_saved_index", None)
        if first is None:
            return True
    if first is None:
        return False
    places = torch.arange(size, device=first.device)
    return first.dtype in (torch.bool, torch.uint8) or not torch.equal(first.flatten().to(places.dtype), places)


def _terms(node: Node) -> int:
    """Over how many entries a matrix product sums; zero where no gradient goes through it."""
    first = _PRODUCTS[node.name()]
    for slot, axis in ((first, -1), (first + 1, -2)):
        source, output = node.next_functions[slot]
        if source is not None:
            return shapes(source)[output][axis]
    return 0


def shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    """The shapes of an operation's outputs."""
    variable = getattr(node, "variable", None)
    if variable is not None:
        return (tuple(variable.shape),)
    return tuple(tuple(meta.shape) for meta in node._input_metadata)


def tapped(
    loss: Tensor,
    graph: Graph,
    places: Collection[int],
    lowest: Collection[int],
    heard: Callable[[int, Tensor], None],
    *,
    retain: bool,
) -> None:
    """Run a backward pass that forms no parameter's gradient, and let `heard` have the output gradients at `places`.

    Gradients are heard as they pass and are not kept, but for those at the lowest places, where the pass ends.
    """

    def listener(place: int) -> Callable[[tuple[Tensor | None, ...]], None]:
        def listen(grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None:
                heard(place, grads[0])

        return listen

    ends = list(lowest)
    handles = [graph.nodes[place].register_prehook(listener(place)) for place in places if place not in lowest]
    try:
        edges = [GradientEdge(graph.nodes[place], 0) for place in ends]
        found = list(torch.autograd.grad(loss, edges, retain_graph=retain, allow_unused=True))
    finally:
        for handle in handles:
            handle.remove()
    with torch.no_grad():
        while ends:
            place, grad = ends.pop(), found.pop()
            if grad is not None:
                heard(place, grad)
