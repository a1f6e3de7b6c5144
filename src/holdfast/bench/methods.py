"""Ways to learn tasks in turn: each a few lines over the public names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..curvature import diagonal_fisher
from ..hold import hold
from ..likelihood import categorical
from ..posterior import Posterior, consolidate, merge, prior
from .tasks import Split, Task


@dataclass(frozen=True)
class Training:
    """How every method trains: the same for all of them.

    Label smoothing keeps the network from growing so certain that its Fisher information, p(1−p), vanishes.
    """

    epochs: int = 15
    batch_size: int = 64
    lr: float = 1e-3
    label_smoothing: float = 0.1

    def __call__(
        self, model: nn.Module, data: Split, seed: int, posterior: Posterior | None = None, strength: float = 1.0
    ) -> None:
        """Train with a fresh Adam, held to `posterior` if one is given."""
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        posterior = posterior or prior(model)
        with hold(optimizer, model, posterior, num_data=len(data), strength=strength):
            for _ in range(self.epochs):
                for x, y in data.batches(self.batch_size, generator):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y, label_smoothing=self.label_smoothing)
                    torch.autograd.backward(loss)
                    optimizer.step()


class Method(Protocol):
    """Something that learns one task after another."""

    @property
    def name(self) -> str:
        """What a table calls it."""

    def learn(self, model: nn.Module, task: Task, training: Training, seed: int) -> None:
        """Train the model on the next task."""


@dataclass
class FineTuning:
    """Train on the new task and nothing else: how much is forgotten when nothing is done."""

    name: str = "fine-tuning"

    def learn(self, model: nn.Module, task: Task, training: Training, seed: int) -> None:
        training(model, task.train, seed)


@dataclass
class Frozen:
    """Learn the first task and stop: what is kept by not learning at all."""

    name: str = "frozen after task 1"
    learned: bool = False

    def learn(self, model: nn.Module, task: Task, training: Training, seed: int) -> None:
        if not self.learned:
            training(model, task.train, seed)
        self.learned = True


@dataclass
class Joint:
    """Train on all data so far, from the start: what could be known if nothing had to be thrown away."""

    name: str = "joint, all data kept"
    seen: list[Split] = field(default_factory=list)

    def learn(self, model: nn.Module, task: Task, training: Training, seed: int) -> None:
        self.seen.append(task.train)
        everything = Split(torch.cat([part.x for part in self.seen]), torch.cat([part.y for part in self.seen]))
        training(model, everything, seed)


@dataclass
class RunningEwc:
    """EWC with J: one running penalty at the last optimum (Huszár)."""

    strength: float = 1.0
    posterior: Posterior | None = None

    @property
    def name(self) -> str:
        return f"EWC, J, strength {self.strength:g}"

    def learn(self, model: nn.Module, task: Task, training: Training, seed: int) -> None:
        posterior = self.posterior or prior(model)
        training(model, task.train, seed, posterior, self.strength)
        fisher = diagonal_fisher(model, task.train.batches(256), categorical)
        self.posterior = consolidate(posterior, model, fisher)


@dataclass
class PerTaskEwc:
    """EWC with J_original: one penalty per task (Kirkpatrick), all of them in one merged Gaussian."""

    strength: float = 1.0
    posterior: Posterior | None = None

    @property
    def name(self) -> str:
        return f"EWC, J_original, {self.strength:g}"

    def learn(self, model: nn.Module, task: Task, training: Training, seed: int) -> None:
        training(model, task.train, seed, self.posterior, self.strength)
        fisher = diagonal_fisher(model, task.train.batches(256), categorical)
        this = consolidate(prior(model), model, fisher)
        self.posterior = this if self.posterior is None else merge(self.posterior, this)
