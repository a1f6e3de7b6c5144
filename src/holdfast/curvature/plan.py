"""Which parameter is served by what: read off the graphs of two batches that differ in nothing but their size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .calls import Call, Split
from .graph import MOVING, Graph, Value, shapes
from .routes import Route, route
from .rules import RULES

_PARTING = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
_NO_AXIS = "its output has no one axis for the examples"


@dataclass(frozen=True)
class Site:
    """A place where a weight meets the examples; `split` says where in the operation's output they are.

    Where they are flattened with the positions, `parting` is the place, and the axis, where they are parted again.
    """

    place: int  # of the operation's node in the graph
    operation: str
    slot: int
    weight: torch.Size
    output: torch.Size
    split: Split
    parting: tuple[int, int] | None
    route: Route

    def __hash__(self) -> int:  # it is looked up at every turn
        return hash((self.place, self.slot))

    def call(self, graph: Graph) -> Call:
        """The operation as it was called in a pass."""
        return Call(graph.nodes[self.place], self.slot, self.weight, self.split, self.output)


@dataclass(frozen=True)
class Plan:
    """The sites that serve each parameter; why the others go one example at a time; those no output depends on.

    `apart` names the parameters no entry of which is seen at two sites; `lowest` are the places where a pass ends.
    """

    sites: Mapping[str, tuple[Site, ...]]
    general: Mapping[str, str]
    unused: tuple[str, ...]
    apart: frozenset[str] = frozenset()
    lowest: frozenset[int] = frozenset()

    def fits(self, graph: Graph, size: int) -> bool:
        """Whether another pass of the same structure has the same sizes where it matters."""
        return all(
            shapes(graph.nodes[place])[0] == site.output
            and site.split.examples == size
            and site.route.leads_the_same_way(graph, site.weight)
            for place, sites in self.places.items()
            for site in sites
        )

    def resized(self, graph: Graph, named: Mapping[str, Tensor], size: int) -> Plan | None:
        """The same plan for a pass of the same structure and other sizes, if those leave no question open."""
        moved: dict[Site, Site] = {}
        for site in (site for sites in self.places.values() for site in sites):
            output = torch.Size(shapes(graph.nodes[site.place])[0])
            split = _resplit(site, output, graph, size) if len(output) == len(site.output) else None
            value = (graph.nodes[site.route.place], site.route.output)
            found = route(value, graph)
            if split is None or (found.steps is None) != (site.route.steps is None):
                return None
            weight = torch.Size(shapes(value[0])[value[1]])
            moved[site] = replace(site, output=output, weight=weight, split=split, route=found)
        sites = {name: tuple(moved[site] for site in each) for name, each in self.sites.items()}
        return replace(self, sites=sites, apart=_apart(sites, named))

    @cached_property
    def places(self) -> dict[int, list[Site]]:
        """The sites at each node, once each."""
        found: dict[int, list[Site]] = {}
        for site in dict.fromkeys(site for sites in self.sites.values() for site in sites):
            found.setdefault(site.place, []).append(site)
        return found

    def without(self, reasons: Mapping[str, str]) -> Plan:
        """The plan with some parameters left to the general path."""
        sites = {name: each for name, each in self.sites.items() if name not in reasons}
        unused = tuple(name for name in self.unused if name not in reasons)
        return replace(self, sites=sites, unused=unused, general={**self.general, **reasons})


class _NotServed(Exception):
    """A use of a parameter that no rule serves; the message says which."""


def planned(
    graph: Graph, probe: Graph, named: Mapping[str, Tensor], size: int, few: int
) -> tuple[Plan, dict[Site, Site]]:
    """What the graph of a batch of `size` shows beside that of a few of its examples, and each site's twin there."""
    survey = _Survey(graph, probe, size, few)
    sites: dict[str, tuple[Site, ...]] = {}
    general: dict[str, str] = {}
    for name in named:
        if name in graph.leaves and name in probe.leaves:
            try:
                sites[name] = tuple(survey.above(graph.leaves[name], probe.leaves[name]))
            except _NotServed as error:
                general[name] = str(error)
        elif name in graph.leaves or name in probe.leaves:
            general[name] = "some examples use it, and others do not"
    unused = tuple(name for name in named if name not in sites and name not in general)
    return Plan(sites, general, unused, _apart(sites, named)), survey.twins


class _Survey:
    """Two graphs, climbed side by side from the parameters to where they meet the examples."""

    def __init__(self, graph: Graph, probe: Graph, size: int, few: int) -> None:
        self._graph, self._probe = graph, probe
        self._size, self._few = size, few
        self._known: dict[Value, list[Site] | str] = {}
        self.twins: dict[Site, Site] = {}

    def above(self, value: Value, other: Value) -> list[Site]:
        """Every site to which a value without examples leads, once, by however many ways: its route knows them all."""
        if value not in self._known:
            try:
                self._known[value] = list(dict.fromkeys(self._users(value, other)))
            except _NotServed as error:
                self._known[value] = str(error)
        found = self._known[value]
        if isinstance(found, str):
            raise _NotServed(found)
        return found

    def _users(self, value: Value, other: Value) -> list[Site]:
        ours, theirs = self._graph.consumers.get(value, []), self._probe.consumers.get(other, [])
        if [(node.name(), slot) for node, slot in ours] != [(node.name(), slot) for node, slot in theirs]:
            raise _NotServed("batches of different size use it differently")
        found = []
        for (node, slot), (twin, _) in zip(ours, theirs, strict=True):
            if shapes(node) == shapes(twin):
                outputs = zip(self._graph.used_outputs(node), self._probe.used_outputs(twin), strict=True)
                found += [site for a, b in outputs for site in self.above((node, a), (twin, b))]
            elif node.name() not in RULES:
                raise _NotServed(f"there is no rule for {node.name()}")
            else:
                if any(meta.dtype.is_complex for meta in node._input_metadata) or _dtype(value).is_complex:
                    raise _NotServed("it meets the examples as a complex number")
                split, parting = _split(self._graph, self._probe, node, twin, self._size, self._few)
                site = _site(self._graph, value, node, slot, split, parting)
                self.twins[site] = _site(self._probe, other, twin, slot, replace(split, examples=self._few), None)
                found.append(site)
        return found


def _site(graph: Graph, value: Value, node: Node, slot: int, split: Split, parting: tuple[int, int] | None) -> Site:
    weight, output = torch.Size(shapes(value[0])[value[1]]), torch.Size(shapes(node)[0])
    return Site(graph.places[node], node.name(), slot, weight, output, split, parting, route(value, graph))


def _resplit(site: Site, output: torch.Size, graph: Graph, size: int) -> Split | None:
    """Where the examples are in an output of another size; None where that is not plain."""
    share, left = divmod(output[site.split.axis], size)
    if left:
        return None
    if site.parting is None:
        same = share == 1 == site.split.inner or site.operation == "RepeatBackward0"
        return Split(site.split.axis, 1, size, share) if same else None
    place, inside = site.parting
    parted = shapes(graph.nodes[place])[0]
    outer, left = divmod(math.prod(parted[:inside]), math.prod(output[: site.split.axis]))
    if left or not outer or share % outer or parted[inside] != size:
        return None
    return Split(site.split.axis, outer, size, share // outer)


def _split(
    graph: Graph, probe: Graph, node: Node, twin: Node, size: int, few: int
) -> tuple[Split, tuple[int, int] | None]:
    """Where an output holds the examples, told by the one axis that grows with their number; and where it is parted."""
    axis, share = _grown(shapes(node)[0], shapes(twin)[0], size, few)
    if share == 1 or node.name() == "RepeatBackward0":  # whose copies stand one behind the other
        return Split(axis, 1, size, share), None
    # Flattened with the positions. Where the rows are parted again, the parts say which way they lie; rows that are
    # moved, or never parted, could be anybody's.
    before = math.prod(shapes(node)[0][:axis])
    while node.name() not in _PARTING:
        users, others = graph.consumers.get((node, 0), []), probe.consumers.get((twin, 0), [])
        if not users or [user.name() for user, _ in users] != [user.name() for user, _ in others]:
            break
        at = next((at for at, (user, _) in enumerate(users) if user.name() in _PARTING), 0)
        node, twin = users[at][0], others[at][0]
        if any(word in node.name() for word in MOVING):
            break
        sizes = (shapes(each)[0][axis : axis + 1] for each in (node, twin))
        if node.name() not in _PARTING and tuple(sizes) != ((size * share,), (few * share,)):
            break
    if node.name() in _PARTING:
        inside, rest = _grown(shapes(node)[0], shapes(twin)[0], size, few)
        outer, left = divmod(math.prod(shapes(node)[0][:inside]), before)
        if rest == 1 and not left and outer and share % outer == 0:
            return Split(axis, outer, size, share // outer), (graph.places[node], inside)
    raise _NotServed("its rows hold positions of the examples, in an order that the graph does not show")


def _grown(shape: tuple[int, ...], other: tuple[int, ...], size: int, few: int) -> tuple[int, int]:
    """The axis that holds the examples, and how much of it each has."""
    grown = [axis for axis, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
    if len(shape) != len(other) or len(grown) != 1:
        raise _NotServed(_NO_AXIS)
    share, left = divmod(shape[grown[0]], size)
    if left or other[grown[0]] != share * few:
        raise _NotServed(_NO_AXIS)
    return grown[0], share


def _dtype(value: Value) -> torch.dtype:
    variable = getattr(value[0], "variable", None)
    found: torch.dtype = value[0]._input_metadata[value[1]].dtype if variable is None else variable.dtype
    return found


def _apart(sites: Mapping[str, tuple[Site, ...]], named: Mapping[str, Tensor]) -> frozenset[str]:
    return frozenset(name for name, each in sites.items() if _disjoint(each, named[name]))


def _disjoint(sites: tuple[Site, ...], parameter: Tensor) -> bool:
    """Whether no entry of a parameter is seen at two sites."""
    if any(site.route.steps is None for site in sites):
        return False
    if len(sites) == 1:
        return True
    seen = torch.zeros(1, *parameter.shape, dtype=torch.uint8)
    for site in sites:
        part = site.route.view(seen)
        part += 1
        if bool((part > 1).any()):
            return False
    return True
