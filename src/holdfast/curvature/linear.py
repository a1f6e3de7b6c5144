"""Linear layers without inner axes: Σₙ (gₙaₙᵀ)² = (g²)ᵀ(a²), one matmul for a whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .batches import Batch
from .scores import Scoring, accumulation, backward, tolerance


@dataclass(frozen=True)
class Tap:
    """One call of one layer: its inputs, and the place in the graph where its output's gradient passes."""

    weight: str | None
    bias: str | None
    inputs: Tensor  # (batch, in)
    edge: GradientEdge

    @property
    def names(self) -> list[str]:
        return [name for name in (self.weight, self.bias) if name is not None]

    def add_squares_(self, total: Mapping[str, Tensor], grad: Tensor) -> None:
        """Add Σₙ scoreₙ² to the totals, `grad` being the gradient of the layer's output, (batch, out)."""
        squares = grad.to(accumulation(grad)).square()
        if self.weight is not None:
            total[self.weight] += squares.T @ self.inputs.to(squares.dtype).square()
        if self.bias is not None:
            total[self.bias] += squares.sum(0)

    def score(self, grad: Tensor, n: int) -> list[Tensor]:
        """Example n's gradients, in the order of `names`."""
        outer = torch.outer(grad[n], self.inputs[n].to(grad.dtype))
        return [outer] * (self.weight is not None) + [grad[n]] * (self.bias is not None)


class Taps:
    """Listens at a model's Linear layers."""

    def __init__(self, model: nn.Module, named: Mapping[str, Tensor]) -> None:
        names = {id(parameter): name for name, parameter in named.items()}
        self._named = named
        self._layers = {
            module: (names.get(id(module.weight)), names.get(id(module.bias)))
            for module in model.modules()
            if type(module) is nn.Linear and (id(module.weight) in names or id(module.bias) in names)
        }
        self._calls: list[tuple[nn.Linear, Tensor, GradientEdge | None]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the calls of one forward pass."""

        def heard(module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            # The edge and not the output: an in-place activation would turn the output into its own result.
            edge = get_gradient_edge(output) if output.requires_grad else None
            inputs = args[0] if args else kwargs["input"]
            self._calls.append((module, inputs.detach(), edge))

        self._calls.clear()
        handles = [layer.register_forward_hook(heard, with_kwargs=True) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def exact(self, losses: Tensor, batch: Batch) -> list[Tap]:
        """The calls that this path can serve exactly: of layers called once, whose parameters have no other use."""
        calls = Counter(module for module, *_ in self._calls)
        uses = _uses(losses)
        taps = []
        for module, inputs, edge in self._calls:
            weight, bias = self._layers[module]
            alone = all(uses[id(self._named[name])] == 1 for name in (weight, bias) if name is not None)
            plain = inputs.ndim == 2 and inputs.shape[0] == batch.size
            if calls[module] == 1 and alone and plain and edge is not None:
                taps.append(Tap(weight, bias, inputs, edge))
        self._calls.clear()
        return taps


def verified(taps: list[Tap], losses: Tensor, batch: Batch, scoring: Scoring, named: Mapping[str, Tensor]) -> list[Tap]:
    """The taps whose score of an example is that of the example alone, for the example each has most to say about.

    They differ where a first axis only looks like the examples (positions, when there are as many). Those parameters
    are left to the general path, which takes one example at a time.
    """
    # Unequal weights: the columns of an exact Fisher can add up to zero.
    weights = torch.arange(1, len(losses) + 1, dtype=losses.dtype, device=losses.device)
    with backward(losses):
        grads = torch.autograd.grad(
            (weights.unsqueeze(1) * losses).sum(), [tap.edge for tap in taps], retain_graph=True
        )
    examples = [int(grad.norm(dim=1).argmax()) for grad in grads]
    names = [name for tap in taps for name in tap.names]
    plain = {}
    for n in set(examples):
        columns = scoring.of_example(batch.example(n), [named[name] for name in names])
        scores = (sum(w * part for w, part in zip(weights, parts, strict=True)) for parts in zip(*columns, strict=True))
        plain[n] = dict(zip(names, scores, strict=True))

    def agrees(tap: Tap, grad: Tensor, n: int) -> bool:
        within = max(tolerance(grad), tolerance(losses))
        return all(
            bool((tapped - plain[n][name]).norm() <= within * plain[n][name].norm() + torch.finfo(tapped.dtype).tiny)
            for name, tapped in zip(tap.names, tap.score(grad, n), strict=True)
        )

    return [tap for tap, grad, n in zip(taps, grads, examples, strict=True) if agrees(tap, grad, n)]


def _uses(losses: Tensor) -> Counter[int]:
    """How often each parameter enters the graph of the losses, by id."""
    uses: Counter[int] = Counter()
    seen = {losses.grad_fn}
    stack = [losses.grad_fn]
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions if node is not None else ():
            if following is None:
                continue
            if hasattr(following, "variable"):
                uses[id(following.variable)] += 1
            elif following not in seen:
                seen.add(following)
                stack.append(following)
    return uses
