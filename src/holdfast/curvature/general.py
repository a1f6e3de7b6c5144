"""The general path: the gradients of single examples by plain autograd, many at once where torch.func can."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..elsewhere import places
from ..params import some
from .batches import Batch
from .forms import Limit
from .graph import Graph, shapes
from .scores import Scoring, backward, tolerance

Scores = dict[str, Tensor]  # (examples, columns, *shape)


class General:
    """Scores of some parameters, a few examples at a time.

    torch.func takes as many examples at once as the limit allows. What it cannot do (control flow that looks at the
    data, operations without a batching rule), or does differently from plain autograd, is done one example at a time.
    """

    def __init__(self, scoring: Scoring, limit: Limit) -> None:
        self._scoring = scoring
        self._limit = limit
        self._at_once: dict[Any, bool] = {}

    def scores(self, batch: Batch, named: Mapping[str, Tensor], losses: Tensor, graph: Graph) -> Iterator[Scores]:
        """The scores of every example of a batch."""
        case = (batch.shapes, tuple(named))
        entries = sum(parameter.numel() for parameter in named.values())
        activations = sum(_numel(shape) for node in graph.nodes for shape in shapes(node)) // batch.size
        size = max(parameter.element_size() for parameter in named.values())
        each = size * (len(losses) * entries + 2 * activations)
        step = self._limit.examples(each, f"an example, with its gradients of {some(list(named))} and its activations,")
        if batch.size > 2 and case not in self._at_once:
            agreed = self._agreed(batch, named, losses.detach().abs().sum(0).topk(2).indices.tolist())
            if agreed is not None:
                self._at_once[case] = agreed
        start = 0
        while start < batch.size:
            found = None
            stop = min(start + step, batch.size)
            if self._at_once.get(case, False):
                found = self._many(batch, start, stop, named)
            if found is None:
                found, stop = self._one(batch.example(start), named), start + 1
            yield found
            start = stop

    def _agreed(self, batch: Batch, named: Mapping[str, Tensor], examples: list[int]) -> bool | None:
        """Whether torch.func gives what plain autograd does; None where a gradient of zero leaves it open."""
        found = self._many(batch.rows(examples), 0, len(examples), named)
        if found is None:
            return False
        alone = [self._one(batch.example(n), named) for n in examples]
        plain = {name: torch.cat([each[name] for each in alone]) for name in named}
        if not all(_agree(found[name], plain[name]) for name in named):
            return False
        return True if all(bool(each.any()) for each in plain.values()) else None

    def _one(self, example: Batch, named: Mapping[str, Tensor]) -> Scores:
        columns = self._scoring.of_example(example, list(named.values()))
        return {
            name: torch.stack(each).unsqueeze(0) for name, each in zip(named, zip(*columns, strict=True), strict=True)
        }

    def _many(self, batch: Batch, start: int, stop: int, named: Mapping[str, Tensor]) -> Scores | None:
        parts = (batch.content, batch.inputs, batch.target)
        leaves, form = tree_flatten(parts)
        rowed = [isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves]
        one = batch.example(0)
        if tree_flatten((one.content, one.inputs, one.target))[1] != form:
            return None  # lists with an element for each example
        runner = _Runner(self._scoring)
        at = places(runner)

        def losses(params: dict[str, Tensor], rows: Sequence[Tensor]) -> Tensor:
            each = iter(rows)
            filled = [next(each).unsqueeze(0) if row else leaf for leaf, row in zip(leaves, rowed, strict=True)]
            content, inputs, target = tree_unflatten(filled, form)
            example = Batch(batch.index, content, inputs, target, 1)
            tied = {place: param for name, param in params.items() for place in at[id(named[name])]}
            found: Tensor = torch.func.functional_call(runner, tied, (example,), tie_weights=False)
            return found[:, 0]

        rows = [leaf[start:stop] for leaf, row in zip(leaves, rowed, strict=True) if row]
        params = {name: parameter.detach() for name, parameter in named.items()}
        try:
            with warnings.catch_warnings(), torch.no_grad(), backward(next(iter(named.values()))):
                warnings.simplefilter("ignore")  # torch.func says which operations it batches slowly
                found: Scores = torch.func.vmap(torch.func.jacrev(losses), in_dims=(None, 0))(params, rows)
        except Exception:  # what torch.func cannot do is done one by one, and fails there if it must
            return None
        return found


class _Runner(nn.Module):
    """The model and its losses as one module, so that its parameters can be replaced in a call."""

    def __init__(self, scoring: Scoring) -> None:
        super().__init__()
        self.model = scoring.model
        self._scoring = [scoring]

    def forward(self, example: Batch) -> Tensor:
        scoring = self._scoring[0]
        return scoring.losses(scoring.output(example), example)


def _agree(many: Tensor, one: Tensor) -> bool:
    return bool((many - one).norm() <= tolerance(one) * one.norm() + torch.finfo(one.dtype).tiny)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
