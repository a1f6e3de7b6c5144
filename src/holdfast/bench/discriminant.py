"""Quadratic discriminant analysis: what the moments of each class are worth with no network at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..probes import gaussian_probes
from .heads import Shell
from .tasks import Task
from .training import Trainer


@dataclass
class Discriminant:
    """A Gaussian for every class of every task, mean and low-rank covariance; the likeliest answers.

    The control for probes: where this does as well, the moments know the answer and the network need not. Every class
    has as much `noise` beside its covariance as an entry of the first task's inputs varies on average: pixels that
    never change within a class would decide everything.
    """

    rank: int = 100
    noise: float | None = None
    classes: list[tuple[int, float, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        if not isinstance(model, Shell) or trainer.training.loss == "tokens":
            raise ArgumentError("the discriminant answers with classes of inputs, and has no network of a protocol's.")
        first = task.outputs[0] if task.outputs and not task.grows else 0
        x, y = task.train.x.flatten(1), task.train.y
        if self.noise is None:
            self.noise = float(x.var(0, correction=0).mean())
        for label in sorted(set(y.tolist())):
            mine = x[y == label]
            probes = gaussian_probes([mine], rank=min(self.rank, len(mine) - 1, x.shape[1]))
            (one,) = probes.components
            self.classes.append((first + label, one.num_data, one.mean, one.factors, one.rest + self.noise))
        model.inner = _Densities(self.classes)

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        pass

    @property
    def kept(self) -> list[Tensor]:
        return [tensor for _, _, *tensors in self.classes for tensor in tensors]


class Gaussian:
    """N(mean, FᵀF + diag(rest)) with F of a few rows, by the matrix inversion lemma.

    torch.distributions has it too, with a product of its own for every input, where one serves them all.
    """

    def __init__(self, mean: Tensor, factors: Tensor, rest: Tensor) -> None:
        white = factors / rest
        inner = torch.linalg.cholesky(torch.eye(len(factors)).to(white) + white @ factors.T)
        self.mean, self.rest = mean, rest
        self.known = torch.linalg.solve_triangular(inner, white, upper=False)  # (rank, size)
        self.scale = 0.5 * (len(mean) * math.log(2 * math.pi) + rest.log().sum()) + inner.diagonal().log().sum()

    def log_prob(self, x: Tensor) -> Tensor:
        """log N(x), of each row."""
        apart = x - self.mean
        far = (apart.square() @ self.rest.reciprocal()) - (apart @ self.known.T).square().sum(1)
        found: Tensor = -0.5 * far - self.scale
        return found


class _Densities(nn.Module):
    """log Σ n · N(x; class) for every class, over the tasks that have it."""

    def __init__(self, classes: list[tuple[int, float, Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self.gaussians = [
            (label, math.log(count), Gaussian(mean, factors, rest)) for label, count, mean, factors, rest in classes
        ]

    def forward(self, x: Tensor) -> Tensor:
        width = 1 + max(label for label, _, _ in self.gaussians)
        scores = x.new_full((len(x), width), -torch.inf)
        for label, weight, gaussian in self.gaussians:
            scores[:, label] = torch.logaddexp(scores[:, label], gaussian.log_prob(x) + weight)
        # Above zero, which is what a shell says of classes that were not seen.
        return scores - scores.masked_fill(scores.isinf(), torch.inf).min(1, keepdim=True).values
