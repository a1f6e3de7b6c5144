"""Scores: gradients of one example's negative log-likelihood, under labels of one's choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DataError, InertError
from ..identity import bit_sum, digest, fingerprints
from ..likelihood import Likelihood
from ..likelihood.base import as_tensor
from ..params import all_parameters
from ..precision import Source
from .batches import Batch, Forward, require_rows, run

Targets = Literal["expected", "sampled", "observed"]


class Scoring:
    """Whose labels the scores are for; counts the data as it goes by.

    A score is the gradient of a pseudo-loss. With observed or sampled labels there is one per example, its nll. With
    expected ones there are as many as the likelihood's root has columns, and their squares sum to the exact Fisher.
    """

    def __init__(self, likelihood: Likelihood, targets: Targets | None, seed: int) -> None:
        if not isinstance(likelihood, Likelihood):
            raise ArgumentError(
                f"a likelihood is needed, got {likelihood!r}. Give holdfast.categorical for cross-entropy, "
                "holdfast.bernoulli for binary cross-entropy, holdfast.gaussian(scale) for squared error, "
                "holdfast.tokens(shift=...) for language models, or holdfast.custom(function) for anything else."
            )
        if targets not in (None, "expected", "sampled", "observed"):
            raise ArgumentError(f"targets must be 'expected', 'sampled' or 'observed', got {targets!r}.")
        self.likelihood = likelihood
        self.targets: str | None = targets
        self.num_data = 0.0
        self._seen: Counter[int] = Counter()
        self._generator = torch.Generator().manual_seed(seed)

    def counted(self, output: Any, batch: Batch) -> tuple[Batch, Tensor]:
        """The batch with the labels to score, and its pseudo-losses, (columns, batch). Call it once per batch."""
        require_rows(output, batch)
        try:
            self.targets = self.targets or self.likelihood.default_targets(output)
            if self.targets == "observed" and batch.target is None:
                raise DataError("targets='observed' needs labels, and there are none. Give (inputs, targets).")
            if batch.target is not None:
                self.likelihood.require(output, batch.target)
            if self.targets == "sampled":
                drawn = self.likelihood.sampled(detached(output, self.likelihood), batch.target, self._generator)
                batch = replace(batch, target=drawn)
            losses = self.losses(output, batch.target)
        except DataError as error:
            raise DataError(f"batch {batch.index}: {error}") from error
        if losses.shape[1] != batch.size:
            raise DataError(
                f"batch {batch.index} has {batch.size} examples, but {self.likelihood.name} gave "
                f"{losses.shape[1]} negative log-likelihoods."
            )
        if not losses.requires_grad:
            raise InertError(
                "the model's output does not depend on its trainable parameters, so the curvature would be zero. Does "
                "its forward run under no_grad, or detach its output?"
            )
        self.num_data += self.likelihood.count(batch.size, batch.target)
        # Sums of bits, so that the data has one identity however it is cut or shuffled.
        for place, tensor in enumerate(batch.tensors):
            self._seen[place] += bit_sum(tensor)
        return batch, losses

    def losses(self, output: Any, target: Any) -> Tensor:
        """Pseudo-losses of shape (columns, batch), whose gradients are the scores."""
        if self.targets == "expected":
            root = self.likelihood.root(detached(output, self.likelihood))  # (columns, batch, *outputs)
            scores: Tensor = root * output
            return scores.reshape(*scores.shape[:2], -1).sum(-1)
        return self.likelihood.nll(output, target).unsqueeze(0)

    def source(self, model: nn.Module) -> Source:
        """Where what was computed from the batches counted, at the model's weights, came from."""
        if self.num_data <= 0:
            raise DataError("no label counts: every position of every batch is ignored.")
        weights = fingerprints(all_parameters(model))
        data = [self._seen[place] % 2**64 for place in sorted(self._seen)]
        return Source(
            id=digest(f"{data} {self.num_data} {self.likelihood.name} {sorted(weights.items())}"),
            size=self.num_data,
            unit=self.likelihood.unit,
            likelihood=self.likelihood.name,
            targets=str(self.targets),
            weights=weights,
        )


def example_scores(
    model: nn.Module, example: Batch, scoring: Scoring, forward: Forward | None, parameters: Sequence[Tensor]
) -> list[tuple[Tensor, ...]]:
    """The scores of a batch of one, by plain autograd: one tuple of gradients per column. Right for any model."""
    losses = scoring.losses(run(model, example, forward), example.target)
    last = len(losses) - 1
    return [
        torch.autograd.grad(loss.sum(), parameters, retain_graph=column < last, materialize_grads=True)
        for column, loss in enumerate(losses)
    ]


def detached(output: Any, likelihood: Likelihood) -> Tensor:
    """The output, which must be one tensor, without its graph."""
    return as_tensor(output, likelihood.name).detach()


def accumulators(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros to sum into: float32 at least, because half precision stops growing after a few hundred terms."""
    return {name: torch.zeros_like(p, dtype=accumulation(p), requires_grad=False) for name, p in named.items()}


def accumulation(tensor: Tensor) -> torch.dtype:
    """The dtype that sums over examples are kept in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def require_finite_scores(total: Mapping[str, Tensor], batch: Batch) -> None:
    """Raise if the sums are no longer finite after `batch`, naming it and the parameters."""
    finite = torch.stack([entries.sum().isfinite().cpu() for entries in total.values()])
    if not bool(finite.all()):
        broken = [f"`{name}`" for name, fine in zip(total, finite.tolist(), strict=True) if not fine]
        raise DataError(
            f"batch {batch.index}: the gradients of {', '.join(broken[:6])} are not finite (or overflow when squared). "
            "Nothing was changed."
        )
