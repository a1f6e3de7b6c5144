"""Methods that hold a model by its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature import kronecker_fisher
from ..distill import Distillation, distill, new_inputs, own_text
from ..errors import ArgumentError
from ..hold import hold
from ..likelihood import gaussian
from ..posterior import Memory, Posterior, consolidate, prior
from ..precision import Precision
from ..probes import GaussianProbes, Probes, gaussian_probes, kept_inputs
from .methods import BATCH, Curvature, carried
from .tasks import Split, Task
from .training import Trainer

# Of a feature's deviation: what it may move by. Chosen on held-out training data of Fashion-MNIST.
_PART = 0.3

# What is kept of a task's inputs.
Kept = Callable[[nn.Module, Task, Trainer], Probes]


@dataclass
class Distilled:
    """Hold the answers to probes that stand for each task's inputs; with a curvature, the weights beside them.

    With `keep=None` the new data's inputs are asked about (learning without forgetting).
    """

    keep: Kept | None
    curvature: Curvature | None = None
    strength: float = 1.0
    batch: int = 128
    merge: bool = False
    known: Posterior | None = None
    # By the outputs that answer: the last task that they answer, and what is kept of all of them.
    parts: dict[Any, tuple[Task, Any]] = field(default_factory=dict)

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        if self.known is None:
            trainer.fit(model, task)
            return
        known, training = self.known, trainer.training
        terms: list[Any] = [known] if self.curvature else []
        terms += [self._term(model, olds, kept, task, trainer) for olds, kept in self._asked()]
        trainer.fit(model, task, lambda optimizer: hold(
            optimizer, model, terms, num_data=training.count(task.train.y), strength=self.strength, unit=training.unit,
            proximal=False, freeze_statistics=False,
        ))  # fmt: skip

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        before = self.known or prior(model)
        self.known = (
            consolidate(before, model, self.curvature(model, task, trainer)) if self.curvature else prior(model)
        )  # fmt: skip
        kept = self.keep(model, task, trainer) if self.keep else float(trainer.training.count(task.train.y))
        # Joined now, not when they are used: old inputs are there once, and what is merged does not grow.
        answered = None if task.grows or task.outputs is None else task.outputs
        if answered in self.parts:
            kept = self.parts[answered][1] + kept
        if self.merge and isinstance(kept, GaussianProbes):
            kept = kept.merged()
        self.parts[answered] = (_emptied(task), kept)

    @property
    def kept(self) -> list[Tensor]:
        found = [
            tensor for _, part in self.parts.values() if isinstance(part, Probes) for tensor in part.tensors.values()
        ]
        return found + carried(self.known)

    def _asked(self) -> list[tuple[list[Task], Any]]:
        """The old tasks, together where they are asked about the same inputs: one pass through the model answers for
        all heads that are alike and stand for as much data."""
        if self.keep is not None:
            return [([old], kept) for old, kept in self.parts.values()]
        alike: dict[tuple[bool, int, float], list[Task]] = {}
        for old, count in self.parts.values():
            alike.setdefault((old.grows, len(old.outputs or ()), count), []).append(old)
        return [(olds, len(olds) * count) for (*_, count), olds in alike.items()]

    def _term(self, model: nn.Module, olds: list[Task], kept: Any, task: Task, trainer: Trainer) -> Distillation:
        inputs = kept if isinstance(kept, Probes) else new_inputs(model, num_data=kept, unit=trainer.training.unit)
        latest = olds[-1]
        classes = len(latest.outputs) if latest.grows and latest.outputs else None
        return distill(
            model, Memory.of(self.known or prior(model), model), inputs, trainer.training.likelihood, batch=self.batch,
            classes=classes, seed=trainer.seed, forward=_answering([old.judged_after(task) for old in olds]),
        )  # fmt: skip


def _answering(tasks: list[Task]) -> Callable[[nn.Module, Tensor], Tensor]:
    """How a model is asked for the answers of some tasks: those of several under each other, out of one pass."""
    if len(tasks) == 1:
        return tasks[0].logits
    every = replace(tasks[0], outputs=None)

    def answers(model: nn.Module, x: Tensor) -> Tensor:
        found = every.logits(model, x)
        return torch.cat([task.own(found) for task in tasks])

    return answers


def _emptied(task: Task) -> Task:
    """The task without its data: which outputs answer it is all that may be carried on."""
    nothing = Split(torch.zeros_like(task.train.stored[:1]), torch.zeros_like(task.train.y[:1]), task.train.view)
    return replace(task, train=nothing, test=nothing)


def probes(rank: int | None = None) -> Kept:
    """Mean and a low-rank covariance of the inputs: 100 directions, if not said."""
    return lambda model, task, trainer: gaussian_probes(task.train.batches(1000), rank=rank)


def feature_probes(rank: int | None = None) -> Kept:
    """The same of the features that the first linear layer takes."""
    return lambda model, task, trainer: gaussian_probes(
        task.train.batches(1000), rank=rank, model=model, layer=features(model)
    )  # fmt: skip


def features(model: nn.Module) -> str:
    """The module right before the first linear layer, in a network that is a sequence."""
    names = [name for name, _ in model.named_children()]
    linear = next((index for index, each in enumerate(model.children()) if isinstance(each, nn.Linear)), 0)
    if not isinstance(model, nn.Sequential) or not linear:
        raise ArgumentError("there are no features before a first linear layer here: use a convolutional network.")
    return names[linear - 1]


def of_features(model: nn.Module, task: Task, trainer: Trainer) -> Precision:
    """Kronecker factors of the layers below, by what they do to the features, and not to the answers of today's head.

    A feature that moves by a third of its own deviation costs half a nat. A certain head answers the same to many
    features, so that the Fisher of its answers lets those go that its successors are asked about.
    """
    layer = features(model)
    body = nn.Sequential(*list(model.children())[: [name for name, _ in model.named_children()].index(layer) + 1])
    (moments,) = gaussian_probes(task.train.batches(BATCH), rank=1, model=model, layer=layer).components
    deviation = float((moments.factors.square().sum(0) + moments.rest).mean().sqrt())
    batches = [(x, x.new_zeros(len(x), len(moments.mean))) for x, _ in task.train.batches(BATCH)]
    return kronecker_fisher(
        model, batches, gaussian(_PART * deviation), targets="sampled", seed=trainer.seed,
        forward=lambda run, batch: body(batch[0]), only=[name for name, _ in body.named_parameters()],
    )  # fmt: skip


def own_words(count: int = 1000) -> Kept:
    """Text that the model writes, from first bytes that sequences of the task had."""

    def found(model: nn.Module, task: Task, trainer: Trainer) -> Probes:
        starts = task.train.first(count).x[:, :1]
        length, batch = task.train.first(1).x.shape[1], min(count, 250)
        size = trainer.training.count(task.train.y)
        return own_text(model, count=count, length=length, num_data=size, start=starts, batch=batch)

    return found


def true_inputs(model: nn.Module, task: Task, trainer: Trainer) -> Probes:
    """The old inputs themselves, without their labels: the most that probes could be."""
    training = trainer.training
    with torch.no_grad():
        return kept_inputs(task.train.x, num_data=training.count(task.train.y), unit=training.unit)
