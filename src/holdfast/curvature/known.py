"""Which parameters are layers: what multiplies by a whole parameter, and what is added to each of its outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .graph import Graph
from .plan import Plan, Site

# The operations that multiply by a weight, and the inputs at which the weight and the bias enter.
_WEIGHTS = {
    "AddmmBackward0": (1, 2), "MmBackward0": (0, 1), "BmmBackward0": (0, 1), "ConvolutionBackward0": (1,),
}  # fmt: skip
_BIASES = {"AddmmBackward0": 0, "ConvolutionBackward0": 2}
Way = tuple[Any, ...]


class Known:
    """The layers met so far: each weight with its bias, or None. What was met must be met again in the same way."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.biases: dict[str, str | None] = {}  # by weight
        self.why: dict[str, str] = {}  # reasons for which other parameters are no layer's
        self._named = named
        self._ways: dict[str, set[Way]] = {}  # how each weight is used

    def meet(self, plan: Plan, graph: Graph) -> None:
        """Sort in what a plan brings that is new, and raise where it uses a layer in another way."""
        uses = Counter(site for sites in plan.sites.values() for site in sites)  # how many parameters meet at each
        self._sort(plan, graph, uses)
        lost = [name for name in self.biases if name not in plan.sites and name not in plan.unused]
        if lost:
            raise DataError(
                f"`{lost[0]}` was tapped as a layer in the first batch, and cannot be in this one: "
                f"{plan.general.get(lost[0], 'it is used differently')}. Give batches that the model treats alike, or "
                "use diagonal_fisher."
            )
        sharing: dict[str, list[str]] = {}
        for weight, bias in self.biases.items():
            if bias is not None:
                sharing.setdefault(bias, []).append(weight)
        for name, bias in self.biases.items():
            self._require_alike(name, plan, graph, uses, sharing[bias] if bias is not None else [])

    def _sort(self, plan: Plan, graph: Graph, uses: Counter[Site]) -> None:
        fresh = {name: sites for name, sites in plan.sites.items() if name not in self.biases and name not in self.why}
        at: dict[int, list[str]] = {site.place: [] for sites in fresh.values() for site in sites}
        for name, sites in fresh.items():
            why = _unfit(sites, uses, self._named[name], graph)
            if why:
                self.why[name] = why
            else:
                self.biases[name] = None
                for site in sites[:1]:
                    at[site.place].append(name)
        self.why |= {
            name: why for name, why in plan.general.items() if name not in self.biases and name not in self.why
        }
        for name, sites in fresh.items():
            for weight in {weight: None for site in sites for weight in at[site.place]}:
                if _is_bias(sites, fresh[weight], self._named[name], graph):
                    self.biases[weight] = name

    def _require_alike(self, name: str, plan: Plan, graph: Graph, uses: Counter[Site], sharing: list[str]) -> None:
        """Raise where a batch uses a layer in another way than the batch that made it one; `sharing` have its bias."""
        sites, bias = plan.sites.get(name, ()), self.biases[name]
        places = {site.place for weight in sharing for site in plan.sites.get(weight, ())}
        apart = bias is not None and {site.place for site in plan.sites.get(bias, ())} != places
        another = bool(sites) and bool(_unfit(sites, uses, self._named[name], graph))
        ways = {_way(site, self._named[name], graph) for site in sites}
        if apart or another or (ways and self._ways.setdefault(name, ways) != ways):
            raise DataError(
                f"`{name}` is a layer{f' with `{bias}`' if bias else ''} in one batch, and used in another way in a "
                "later one, so that its factors would be of two things. Give batches that the model treats alike, "
                "leave it out with `only=`, or use diagonal_fisher."
            )


def _unfit(sites: tuple[Site, ...], uses: Counter[Site], parameter: Tensor, graph: Graph) -> str:
    """Why a parameter is no layer's weight; nothing if it is."""
    if not parameter.numel():
        return "it has no entries"
    for site in sites:
        if site.slot not in _WEIGHTS.get(site.operation, ()):
            return f"it is used in {site.operation}"
        if uses[site] > 1 or site.route.steps is None:
            return "it is computed with before it is used"
        if turned(site, parameter) is None:
            return "a part of it is used, or in another order"
    if len({_way(site, parameter, graph) for site in sites}) > 1:
        return "it is used in two ways"
    return ""


def _way(site: Site, parameter: Tensor, graph: Graph) -> Way:
    """How a weight is used: which of its axes are inputs, and which outputs."""
    call = site.call(graph)
    convolves = site.operation == "ConvolutionBackward0"  # an autoencoder's kernel may go one way, and the other back
    kind = (call.saved("transposed"), call.saved("groups")) if convolves else ()
    return (site.slot, turned(site, parameter), site.weight, *kind)


def _is_bias(sites: tuple[Site, ...], weights: tuple[Site, ...], bias: Tensor, graph: Graph) -> bool:
    """Whether a parameter is added to each output of a weight, wherever the weight is used, and nowhere else."""
    by_place = {site.place: site for site in weights}
    if {site.place for site in sites} != set(by_place) or len(sites) != len(weights):
        return False
    for site in sites:
        weight = by_place[site.place]
        call = weight.call(graph)
        if site.slot != _BIASES.get(site.operation) or site.route.steps is None:
            return False
        if site.operation == "ConvolutionBackward0":
            # Transposed, an input's outputs are a whole kernel's, and the bias is one of each place.
            if call.saved("transposed"):
                return False
            outputs, seen = weight.weight[0], site.weight
        else:
            last = weight.slot == 2
            outputs = weight.weight[1 if last else 0]
            seen = torch.Size([outputs] if last else [outputs, 1])
            if call.saved("alpha") != call.saved("beta"):
                return False
        if bias.shape != (outputs,) or site.weight != seen:
            return False
    return True


def turned(site: Site, parameter: Tensor) -> bool | None:
    """Whether a weight is seen transposed; None where it is not its whole parameter, in one of the two orders."""
    seen = site.route.view(torch.empty(1, *parameter.shape, device="meta"))[0]
    if seen.numel() != parameter.numel() or seen.ndim < 2:
        return None
    plain, turned = seen.is_contiguous(), seen.mT.is_contiguous() and site.operation != "ConvolutionBackward0"
    if plain and turned:  # a single row or column, which is either
        return seen.shape[-2:] != parameter.shape[-2:]
    return turned if plain or turned else None
