"""Methods that hold a model by its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..distill import Distillation, distill, new_inputs
from ..hold import hold
from ..posterior import Posterior, consolidate, prior
from ..probes import GaussianProbes, Probes, gaussian_probes, kept_inputs
from .methods import Curvature
from .tasks import Task
from .training import Trainer

# What is kept of a task's inputs.
Kept = Callable[[nn.Module, Task], Probes]


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
    parts: list[tuple[Task, Any]] = field(default_factory=list)

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        if self.known is None:
            trainer.fit(model, task)
            return
        known, training = self.known, trainer.training
        terms: list[Any] = [known] if self.curvature else []
        terms += [self._term(model, old, kept, task, trainer) for old, kept in self._groups(task)]
        trainer.fit(model, task, lambda optimizer: hold(
            optimizer, model, terms, num_data=training.count(task.train), strength=self.strength, unit=training.unit,
        ))  # fmt: skip

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        before = self.known or prior(model)
        self.known = (
            consolidate(before, model, self.curvature(model, task, trainer)) if self.curvature else prior(model)
        )  # fmt: skip
        kept = self.keep(model, task) if self.keep else float(trainer.training.count(task.train))
        self.parts.append((task, kept))

    @property
    def kept(self) -> list[Tensor]:
        found = [tensor for _, part in self.parts if isinstance(part, Probes) for tensor in part.tensors.values()]
        if self.known is not None:
            found += [*self.known.mean.values(), *self.known.precision.tensors.values()]
        return found

    def _groups(self, task: Task) -> list[tuple[Task, Any]]:
        """The old tasks that are answered by the same outputs, together."""
        groups: dict[Any, tuple[Task, Any]] = {}
        for old, part in self.parts:
            key = None if old.grows or old.outputs is None else old.outputs
            groups[key] = (old, groups[key][1] + part if key in groups else part)
        if not self.merge:
            return list(groups.values())
        return [(old, part.merged() if isinstance(part, GaussianProbes) else part) for old, part in groups.values()]

    def _term(self, model: nn.Module, old: Task, kept: Any, task: Task, trainer: Trainer) -> Distillation:
        inputs = kept if isinstance(kept, Probes) else new_inputs(model, num_data=kept, unit=trainer.training.unit)
        answers = old.judged_after(task)
        classes = len(old.outputs) if old.grows and old.outputs else None
        return distill(
            model, self.known or prior(model), inputs, trainer.training.likelihood, batch=self.batch,
            classes=classes, seed=trainer.seed, forward=answers.logits,
        )  # fmt: skip


def probes(rank: int = 100) -> Kept:
    """Mean and a low-rank covariance of the inputs."""
    return lambda model, task: gaussian_probes(task.train.batches(1000), rank=min(rank, len(task.train) - 1))


def true_inputs(model: nn.Module, task: Task) -> Probes:
    """The old inputs themselves, without their labels: the most that probes could be."""
    with torch.no_grad():
        return kept_inputs(task.train.x, num_data=len(task.train))
