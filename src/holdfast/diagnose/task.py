"""What is diagnosed: a model with its old data, and the old loss at its weights and away from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import Batch, Forward, read, require_batches
from ..curvature.forms import wide
from ..curvature.scores import Scoring
from ..errors import ArgumentError, DataError
from ..likelihood import Bernoulli, Categorical, Likelihood, Tokens
from ..params import some, trainable, unwrapped


@dataclass(frozen=True)
class Task:
    """A model, the old data as batches to be read several times, and what the outputs mean."""

    model: nn.Module
    batches: Iterable[Any]
    likelihood: Likelihood
    forward: Forward | None
    named: Mapping[str, nn.Parameter]

    @property
    def entries(self) -> int:
        """How many numbers can move."""
        return sum(parameter.numel() for parameter in self.named.values())

    @property
    def layers(self) -> dict[str, list[str]]:
        """The parameters of each module that has any."""
        found: dict[str, list[str]] = {}
        for name in self.named:
            found.setdefault(name.rpartition(".")[0] or "the model itself", []).append(name)
        return found

    @property
    def weights(self) -> Tensor:
        """μ, as one vector."""
        return joined({name: parameter.detach() for name, parameter in self.named.items()})

    def scoring(self) -> Scoring:
        """A fresh count over the data, with its own labels."""
        return Scoring(self.model, self.likelihood, "observed", 0, self.forward)

    def parted(self, flat: Tensor) -> dict[str, Tensor]:
        """A vector over all entries, by parameter."""
        pieces = torch.split(flat, [parameter.numel() for parameter in self.named.values()])
        return {name: piece.view(p.shape) for (name, p), piece in zip(self.named.items(), pieces, strict=True)}

    def places(self, names: Iterable[str]) -> Tensor:
        """Where some parameters lie in a vector over all entries, as a mask."""
        wanted = set(names)
        return torch.cat([torch.full((p.numel(),), name in wanted) for name, p in self.named.items()])


def task(model: nn.Module, batches: Iterable[Any], likelihood: Likelihood, forward: Forward | None) -> Task:
    """What is to be diagnosed, checked."""
    require_batches(batches)
    if isinstance(batches, Iterator):
        raise DataError(
            "a diagnosis reads the data several times, and an iterator gives it once. Give a DataLoader or a list."
        )
    model = unwrapped(model)
    named = trainable(model)
    short = [name for name, parameter in named.items() if torch.finfo(parameter.dtype).bits < 32]
    if short:
        raise ArgumentError(
            f"{some(short)} is in {named[short[0]].dtype}, whose two or three digits cannot hold the difference of two "
            "losses, let alone a second derivative. Diagnose a copy in float32: copy.deepcopy(model).float()."
        )
    broken = [name for name, parameter in named.items() if not bool(parameter.isfinite().all())]
    if broken:
        raise ArgumentError(f"{some(broken)} has values that are not finite, so there is no loss to diagnose.")
    return Task(model, batches, likelihood, forward, named)


def joined(tensors: Mapping[str, Tensor]) -> Tensor:
    """Named tensors as one vector."""
    return torch.cat([tensor.flatten().to(wide(tensor)) for tensor in tensors.values()])


def confidence(task: Task, batch: Batch, output: Any) -> Tensor | None:
    """The mean probability that the model gives its own best guess, for each example; None where it guesses none."""
    if isinstance(task.likelihood, Categorical):
        return output.softmax(-1).amax(-1)  # type: ignore[no-any-return]
    if isinstance(task.likelihood, Bernoulli):
        return output.abs().sigmoid().reshape(len(output), -1).mean(1)  # type: ignore[no-any-return]
    if isinstance(task.likelihood, Tokens):
        labels = batch.target[:, 1:] if task.likelihood.shift else batch.target
        counted = (labels != task.likelihood.ignore_index).to(output.dtype)
        best = output[:, : labels.shape[1]].softmax(-1).amax(-1)
        return (best * counted).sum(1) / counted.sum(1).clamp(min=1)  # type: ignore[no-any-return]
    return None


@torch.no_grad()
def rises(task: Task, paths: Sequence[Tensor], distances: Sequence[float]) -> Tensor:
    """L(μ + sδ) − L(μ) for each direction δ and distance s, summed over the data in nats: (paths, distances)."""
    scoring = task.scoring()
    total = torch.zeros(len(paths), len(distances), dtype=torch.float64)
    for batch in read(task.batches, task.model):

        def losses(batch: Batch = batch) -> Tensor:
            return scoring.losses(scoring.output(batch), batch).double()

        # Differences of single examples, then their sum: the sums themselves agree in most of their digits.
        before = losses()
        for row, path in zip(total, paths, strict=True):
            for column, distance in enumerate(distances):
                row[column] += float(_at(task, distance * path, losses).sub_(before).sum())
    return total


def _at(task: Task, delta: Tensor, measured: Callable[[], Tensor]) -> Tensor:
    with displaced(task.named, task.parted(delta)):
        return measured()


@contextmanager
def displaced(named: Mapping[str, nn.Parameter], delta: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the parameters are at μ + δ; afterwards they are the tensors that they were, untouched."""
    own = {name: parameter.data for name, parameter in named.items()}
    try:
        for name, parameter in named.items():
            parameter.data = own[name] + delta[name].to(own[name])
        yield
    finally:
        for name, parameter in named.items():
            parameter.data = own[name]
