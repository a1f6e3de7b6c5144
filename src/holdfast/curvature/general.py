"""The general path: the gradients of single examples by plain autograd, many at once where torch.func can."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

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

    def scores(self, batch: Batch, named: Mapping[str, Tensor], graph: Graph) -> Iterator[Scores]:
        """The scores of every example of a batch."""
        case = (batch.shapes, tuple(named))
        first = self._one(batch.example(0), named)
        columns = next(iter(first.values())).shape[1]
        entries = sum(parameter.numel() for parameter in named.values())
        activations = sum(_numel(shape) for node in graph.nodes for shape in shapes(node)) // batch.size
        step = self._limit.examples(columns * entries + 2 * activations, _named(named))
        if batch.size > 2 and self._at_once.get(case, True):
            found = self._many(batch, 0, 2, named)
            self._at_once[case] = found is not None and all(
                _agree(scores[:1], first[name]) for name, scores in found.items()
            )
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

    def _one(self, example: Batch, named: Mapping[str, Tensor]) -> Scores:
        columns = self._scoring.of_example(example, list(named.values()))
        return {
            name: torch.stack(each).unsqueeze(0) for name, each in zip(named, zip(*columns, strict=True), strict=True)
        }

    def _many(self, batch: Batch, start: int, stop: int, named: Mapping[str, Tensor]) -> Scores | None:
        parts = (batch.content, batch.inputs, batch.target)
        leaves, form = tree_flatten(parts)
        rowed = [isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves]
        if any(isinstance(leaf, str) for leaf in leaves):
            return None
        runner = _Runner(self._scoring)
        names = _runner_names(runner, named)

        def losses(params: dict[str, Tensor], rows: Sequence[Tensor]) -> Tensor:
            each = iter(rows)
            filled = [next(each).unsqueeze(0) if row else leaf for leaf, row in zip(leaves, rowed, strict=True)]
            content, inputs, target = tree_unflatten(filled, form)
            example = Batch(batch.index, content, inputs, target, 1)
            found: Tensor = torch.func.functional_call(runner, params, (example,))
            return found[:, 0]

        rows = [leaf[start:stop] for leaf, row in zip(leaves, rowed, strict=True) if row]
        params = {names[name]: parameter.detach() for name, parameter in named.items()}
        try:
            with warnings.catch_warnings(), torch.no_grad(), backward(next(iter(named.values()))):
                warnings.simplefilter("ignore")  # torch.func says which operations it batches slowly
                found = torch.func.vmap(torch.func.jacrev(losses), in_dims=(None, 0))(params, rows)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            return None
        return {name: found[names[name]] for name in named}


class _Runner(nn.Module):
    """The model and its losses as one module, so that its parameters can be replaced in a call."""

    def __init__(self, scoring: Scoring) -> None:
        super().__init__()
        self.model = scoring.model
        self._scoring = [scoring]

    def forward(self, example: Batch) -> Tensor:
        scoring = self._scoring[0]
        return scoring.losses(scoring.output(example), example)


def _runner_names(runner: nn.Module, named: Mapping[str, Tensor]) -> dict[str, str]:
    """The names that a module itself has for parameters."""
    own = {id(parameter): name for name, parameter in runner.named_parameters()}
    return {name: own[id(parameter)] for name, parameter in named.items()}


def _agree(many: Tensor, one: Tensor) -> bool:
    return bool((many - one).norm() <= tolerance(one) * one.norm() + torch.finfo(one.dtype).tiny)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _named(named: Mapping[str, Tensor]) -> str:
    first = next(iter(named))
    return f"`{first}`" + (f" and {len(named) - 1} more" if len(named) > 1 else "")
