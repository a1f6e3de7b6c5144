"""The exact recursion of a linear layer on frozen random features: nothing is trained, so nothing is forgotten.

It learns by squared loss and with a network of its own. Laid beside methods that train the protocol's network, it tells
what their features are worth; a fair table has its rivals learn by squared loss too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..head import LinearHead, linear_head, random_features
from .tasks import Task
from .training import Trainer


class Shell(nn.Module):
    """A model whose answers come from whatever was put in it last; zeros before that, and for classes not yet seen."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(outputs), requires_grad=False)
        self.inner: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        found = self.empty.expand(len(x), -1).clone()
        if self.inner is not None:
            scores = self.inner(x.flatten(1))
            found[:, : scores.shape[1]] = scores.to(found.dtype)
        return found


@dataclass
class ExactHead:
    """The exact Gaussian posterior of a linear head on random ReLU features, updated task by task."""

    features: int = 3000
    head: LinearHead | None = None

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        if not isinstance(model, Shell) or trainer.training.loss != "squared":
            raise ArgumentError("the exact head learns by squared loss: give --loss squared, to its rivals too.")
        first = task.outputs[0] if task.outputs else 0
        batches = [(x.flatten(1), y + first) for x, y in task.train.batches(1000)]
        x = batches[0][0]
        if self.head is None:
            self.head = linear_head(random_features(x.shape[1], self.features, seed=trainer.seed)).to(x.device)
        self.head = self.head.updated(batches)
        model.inner = self.head.module().to(x.device)

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        pass

    @property
    def kept(self) -> list[Tensor]:
        if self.head is None:
            return []
        known = self.head.statistics
        return [known.gram, known.cross, known.squares]
