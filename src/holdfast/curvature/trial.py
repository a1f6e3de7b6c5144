"""The first batch of its kind: find out what serves which parameter, and check it on examples done the plain way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from ..errors import CheckError
from .batches import Batch
from .forms import Form, Limit
from .graph import Graph, tapped
from .plan import Plan, Site, planned
from .rules import RULES
from .scores import Scoring, accumulators, backward, differentiated, require_finite_scores, tolerance
from .squares import Squares

_CHECKPOINTED = "activation checkpointing lets the inputs of operations be seen once, by the backward pass itself"


class Trial:
    """A plan not yet checked; it keeps a few examples that were run apart, and nothing of their batch."""

    def __init__(
        self, scoring: Scoring, named: Mapping[str, Tensor], batch: Batch, losses: Tensor, graph: Graph
    ) -> None:
        self._scoring = scoring
        self._named = named
        # The two examples with most to say, in an order that no sorting or turning gives; not as many as the batch has.
        one, other = losses.detach().abs().sum(0).topk(2).indices.tolist()
        self._index = batch.index
        self._places = (0, 1, 0, 0) if batch.size != 4 else (0, 1, 1, 0, 1)
        few = batch.rows([(one, other)[place] for place in self._places])
        self._picks = _Picks()
        with self._picks:
            scoring.output(few)
        self._losses = scoring.losses(scoring.output(few), few)
        self._graph = Graph(self._losses, named)
        self._mixing = graph.mixes_rows(self._graph)
        self._plan, self._twins = planned(graph, self._graph, named, batch.size, few.size)

    def checked(self, limit: Limit) -> Plan:
        """The plan, if for a few examples it gives what plain autograd does."""
        # Unequal weights: the columns of an exact Fisher can add up to zero.
        weights = torch.arange(1, len(self._losses) + 1, dtype=self._losses.dtype, device=self._losses.device)
        plain = self._plain(weights)
        # What has a gradient, and the graph does not show it, is left to the general path.
        hidden = [name for name in self._plan.unused if plain.all[name].any()]
        plan = self._plan.without(dict.fromkeys(hidden, "it is used where the graph does not show it"))
        if self._picks.by:
            why = f"the model picks rows by their content ({self._picks.by}), so they could be any example's"
            return plan.without(dict.fromkeys(plan.sites, why))
        if self._mixing:
            why = f"{self._mixing} sums over the examples, so a row could be any example's"
            return plan.without(dict.fromkeys(plan.sites, why))
        if not plan.sites:
            return plan
        twin = replace(plan, sites={name: tuple(self._twins[s] for s in sites) for name, sites in plan.sites.items()})
        with backward(self._losses):
            loss = (weights.unsqueeze(1) * self._losses).sum()
            try:
                answers = _answers(twin, self._named, plain, loss, self._graph, limit)
            except CheckpointError:
                return plan.without(dict.fromkeys(plan.sites, _CHECKPOINTED))
        for name, answer in answers.items():
            if not answer.fine and not answer.refused:
                operations = ", ".join(sorted({site.operation for site in plan.sites[name]}))
                raise CheckError(
                    f"the taps and plain autograd disagree on `{name}`: the squares of its gradients for two examples "
                    f"differ by {answer.error:.2e}, of {answer.size:.2e} (operations: {operations}). Is there a rule "
                    "of your own in holdfast.curvature.RULES, a hook on a parameter, or an operation that treats a "
                    "batch unlike its examples? taps=False does without taps."
                )
        return plan.without({name: answer.refused for name, answer in answers.items() if answer.refused})

    def _plain(self, weights: Tensor) -> _Squared:
        """The squares of the examples' gradients by plain autograd, the columns weighted."""
        second, all_ = accumulators(self._named), accumulators(self._named)
        with backward(self._losses):
            for place in (0, 1):
                loss = torch.dot(weights, self._losses[:, place])
                grads = differentiated(loss, list(self._named.values()), self._index, retain=True)
                for name, grad in zip(self._named, grads, strict=True):
                    square = grad.to(all_[name].dtype).square()
                    all_[name] += self._places.count(place) * square
                    second[name] += square if place == 1 else 0
        require_finite_scores(all_, self._index, self._scoring.doubts)
        self._scoring.doubts.settle()
        return _Squared(second, all_)


class _Picks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Listens for operations whose number of rows depends on what is in them: masks, packed sequences, routing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = args[1] if func is torch.ops.aten.index.Tensor else ()
        if func.overloadpacket in _PICKING or any(
            m is not None and m.dtype in (torch.bool, torch.uint8) for m in masks
        ):
            self.by = func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


_PICKING = {
    torch.ops.aten.nonzero, torch.ops.aten.masked_select, torch.ops.aten._pack_padded_sequence,
    torch.ops.aten.repeat_interleave, torch.ops.aten._unique2, torch.ops.aten.unique_dim,
    torch.ops.aten.unique_consecutive,
}  # fmt: skip


@dataclass(frozen=True)
class _Squared:
    """The squares of the second example's gradients, and of all of them summed."""

    second: dict[str, Tensor]
    all: dict[str, Tensor]


@dataclass(frozen=True)
class _Answer:
    """How a parameter's squares compare with plain autograd's: right, or off by how much; or why no rule gives them."""

    fine: bool
    error: float
    size: float
    refused: str


def _answers(
    plan: Plan, named: Mapping[str, Tensor], plain: _Squared, loss: Tensor, graph: Graph, limit: Limit
) -> dict[str, _Answer]:
    """What the taps give for the few examples, beside what plain autograd gives."""
    served = {name: named[name] for name in plan.sites}
    ours = _Squared(accumulators(served), accumulators(served))
    sums = [Squares(named, total, limit) for total in (ours.second, ours.all)]
    for squares in sums:
        squares.begin(plan, graph)
    # Of the precisions that gradients pass through: how far apart two right answers may be, and the last digit.
    loosest, digit = tolerance(loss), torch.finfo(loss.dtype).eps
    refused: dict[Site, str] = {}

    def heard(place: int, grad: Tensor) -> None:
        nonlocal loosest, digit
        loosest, digit = max(loosest, tolerance(grad)), max(digit, torch.finfo(grad.dtype).eps)
        for site in plan.places[place]:
            call = site.call(graph)
            form = RULES[site.operation](call, call.rows(grad))
            if form is None:
                refused[site] = f"the rule for {site.operation} does not cover this use"
            elif not isinstance(form, Form) or form.shape != site.weight or form.examples != call.split.examples:
                raise CheckError(
                    f"the rule for {site.operation} must give one gradient of shape {tuple(site.weight)} for each of "
                    f"{call.split.examples} examples, as Rows, Products or Lookup."
                )
            else:
                sums[0].take(site, form.only(1))
                sums[1].take(site, form)

    tapped(loss, graph, plan.places, graph.lowest(plan.places), heard, retain=True)
    for squares in sums:
        squares.done()
        squares.finish()
    # Gradients that are zero but for rounding (of an attention's key bias) agree in nothing else.
    noise = (10 * digit) ** 2 * max(_norms(plain.all.values()))
    found: dict[str, _Answer] = {}
    for mine, theirs in ((ours.second, plain.second), (ours.all, plain.all)):
        errors, sizes = _norms(mine[name] - theirs[name] for name in mine), _norms(theirs[name] for name in mine)
        for name, error, size in zip(mine, errors, sizes, strict=True):
            why = next((refused[site] for site in plan.sites[name] if site in refused), "")
            answer = _Answer(error <= 2 * loosest * size + noise, error, size, why)
            found[name] = answer if name not in found or found[name].fine else found[name]
    return found


def _norms(tensors: Iterable[Tensor]) -> list[float]:
    by_place = [tensor.norm() for tensor in tensors]
    found: list[float] = torch.stack([norm.to(by_place[0]) for norm in by_place]).tolist()
    return found
