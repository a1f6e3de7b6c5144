"""Ways to learn tasks in turn: each a few lines over the public names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..curvature import (
    RecordedPath,
    diagonal_fisher,
    hutchinson_hessian,
    kronecker_fisher,
    lowrank_fisher,
    recorded_path,
    sensitivity,
)
from ..curvature.scores import Targets
from ..errors import ArgumentError
from ..hold import hold
from ..likelihood import Likelihood, softened
from ..posterior import Posterior, consolidate, merge, prior
from ..precision import Diagonal, Kronecker, Precision, Source, Sum
from .tasks import Task
from .training import Trainer

BATCH = 1000  # of a Fisher: no number depends on it, where no numbers are drawn


class Method(Protocol):
    """Something that learns one task after another: trained on the new one first, then making a note of it."""

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        """Train the model on the next task."""

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        """Keep what the next tasks will need, while this one's data is still there."""

    @property
    def kept(self) -> list[Tensor]:
        """All the tensors it carries from task to task, besides the model."""


@dataclass
class FineTuning:
    """Train on the new task and nothing else: how much is forgotten when nothing is done.

    With `tasks=1` it stops after the first: what is kept by not learning at all.
    """

    tasks: int | None = None

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        if self.tasks is None or trainer.fits < self.tasks:
            trainer.fit(model, task)

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        pass

    @property
    def kept(self) -> list[Tensor]:
        return []


def carried(known: Posterior | None) -> list[Tensor]:
    """The tensors of what is known."""
    return [] if known is None else [*known.mean.values(), *known.precision.tensors.values()]


# How Λ is found of a task, and how what was known and it become what is known.
Curvature = Callable[[nn.Module, Task, Trainer], Precision]
Update = Callable[[Posterior, nn.Module, Precision], Posterior]


@dataclass
class Held:
    """Hold to what was known, and add to it what each task's curvature says.

    `rotate` steps in the eigenvectors of Kronecker factors, `proximal` takes the pull as a step of its own.
    """

    curvature: Curvature
    update: Update = consolidate
    strength: float = 1.0
    rotate: bool = False
    proximal: bool = False
    posterior: Posterior | None = None

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        posterior, training = self.posterior, trainer.training
        if posterior is None:
            trainer.fit(model, task)
            return
        trainer.fit(model, task, lambda optimizer: hold(
            optimizer, model, posterior, num_data=training.count(task.train.y), strength=self.strength,
            unit=training.unit, rotate=self.rotate, proximal=self.proximal, freeze_statistics=False,
        ))  # fmt: skip

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        self.posterior = self.update(self.posterior or prior(model), model, self.curvature(model, task, trainer))

    @property
    def kept(self) -> list[Tensor]:
        return carried(self.posterior)


@dataclass
class HeldByPath:
    """Synaptic intelligence (Zenke 2017): hold to what was known, with Λ from the path that training took."""

    strength: float = 1.0
    posterior: Posterior | None = None
    path: RecordedPath | None = None

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        training, posterior = trainer.training, self.posterior

        @contextmanager
        def attached(optimizer: Optimizer) -> Iterator[None]:
            held = nullcontext() if posterior is None else hold(
                optimizer, model, posterior, num_data=training.count(task.train.y), strength=self.strength,
                unit=training.unit, proximal=False, freeze_statistics=False,
            )  # fmt: skip
            with held, recorded_path(optimizer, model) as self.path:
                yield

        trainer.fit(model, task, attached)

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        if self.path is None:
            raise ArgumentError("nothing was learned, so there is no path to remember.")
        training = trainer.training
        found = self.path.precision(num_data=training.count(task.train.y), unit=training.unit)
        self.posterior, self.path = consolidate(self.posterior or prior(model), model, found), None

    @property
    def kept(self) -> list[Tensor]:
        return carried(self.posterior)


def sensitive(model: nn.Module, task: Task, trainer: Trainer) -> Precision:
    """Memory-aware synapses (Aljundi 2018): how much the outputs' length depends on each weight."""
    return sensitivity(model, Batches(model, task, trainer), forward=task.forward)


def decayed(decay: float) -> Update:
    """A share of what was known is forgotten at every task (online EWC: Schwarz 2018)."""
    return lambda posterior, model, found: consolidate(posterior, model, found, decay=decay)


def every_term(posterior: Posterior, model: nn.Module, found: Precision) -> Posterior:
    """A term for every task: the exact sum, in memory that grows."""
    return consolidate(posterior, model, found, exact=True)


def nearest(posterior: Posterior, model: nn.Module, found: Precision) -> Posterior:
    """One Kronecker term a layer, the product nearest to the sum; what has no factors (norms) adds up by itself."""
    after = consolidate(posterior, model, found, exact=True)
    terms = after.precision
    return replace(after, precision=terms.nearest() if isinstance(terms, Kronecker | Sum) else terms)


def per_task(posterior: Posterior, model: nn.Module, found: Precision) -> Posterior:
    """A penalty for every task at its own optimum (J_original: Kirkpatrick 2017), all in one merged Gaussian."""
    this = consolidate(prior(model), model, found)
    return this if not posterior.num_data else merge(posterior, this)


def diagonal(targets: Targets = "expected") -> Curvature:
    """The diagonal Fisher, of labels of one's choice."""
    return lambda model, task, trainer: diagonal_fisher(
        model, Batches(model, task, trainer), trainer.training.likelihood, targets=_fitting(targets, trainer),
        seed=trainer.seed, forward=task.forward,
    )  # fmt: skip


def uniform(targets: Targets = "expected") -> Curvature:
    """The same number for every weight, their sum that of the diagonal Fisher: what its shape is worth."""

    def found(model: nn.Module, task: Task, trainer: Trainer) -> Precision:
        fisher = diagonal(targets)(model, task, trainer)
        entries = fisher.diagonal()
        mean = sum(float(each.double().sum()) for each in entries.values()) / sum(e.numel() for e in entries.values())
        return Diagonal({name: torch.full_like(each, mean) for name, each in entries.items()}, fisher.sources)

    return found


def evened(curvature: Curvature, share: float = 0.003) -> Curvature:
    """The same with so much more for every weight, and for every example: what stays of IVON's start in its own Λ.

    0.03 · 0.999ᵗ after the t = 2350 steps of ten epochs of MNIST.
    """

    def found(model: nn.Module, task: Task, trainer: Trainer) -> Precision:
        fisher, more = curvature(model, task, trainer), share * trainer.training.count(task.train.y)
        entries = {name: torch.full_like(each, more) for name, each in fisher.diagonal().items()}
        return fisher + Diagonal(entries)

    return found


def hessian(probes: int = 16) -> Curvature:
    """F′, the Hessian's diagonal in place of the Fisher's, estimated, with negative entries at zero.

    In perceptrons of ReLUs it is the exact Fisher's diagonal, and what differs is the estimate's noise.
    """
    return lambda model, task, trainer: hutchinson_hessian(
        model, Batches(model, task, trainer, 100), trainer.training.likelihood, probes=probes, seed=trainer.seed,
        forward=task.forward,
    ).clamped()  # fmt: skip


def batched(size: int = 128) -> Curvature:
    """Squares of the gradients of whole batches of mean losses, averaged: what several libraries compute.

    It is the diagonal of no Fisher information: signs cancel within a batch, more of them in larger ones.
    """

    def found(model: nn.Module, task: Task, trainer: Trainer) -> Precision:
        params = {name: each for name, each in model.named_parameters() if each.requires_grad}
        sums = {name: torch.zeros_like(each) for name, each in params.items()}
        training = trainer.training
        for x, y in task.train.batches(size):
            loss = training.mean(training.losses(task.logits(model, x), y), y)
            # Nothing comes of what has no part in the answers.
            grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            for name, grad in zip(params, grads, strict=True):
                if grad is not None:  # the mean over batches, times the number of examples
                    sums[name] += training.count(y) * grad.square()
        size_of_it = float(training.count(task.train.y))
        source = Source(f"{task.name}, {trainer.seed}", size_of_it, training.unit, training.loss, f"batches of {size}")
        return Diagonal(sums, (source,))

    return found


def kronecker(targets: Targets = "expected", exact_trace: bool = False, temperature: float = 1.0) -> Curvature:
    """G ⊗ A for each layer; with a temperature, of what the model is less sure of than it is."""
    return lambda model, task, trainer: kronecker_fisher(
        model, Batches(model, task, trainer), _softened(trainer.training.likelihood, temperature),
        targets=_fitting(targets, trainer), seed=trainer.seed, forward=task.forward, exact_trace=exact_trace,
    )  # fmt: skip


def _softened(likelihood: Likelihood, temperature: float) -> Likelihood:
    if temperature == 1:
        return likelihood
    if likelihood.name != "categorical":
        raise ArgumentError(f"a temperature is for classes: {likelihood.name} has none.")
    return softened(temperature)


def lowrank(rank: int, rows: int | None = None, targets: Targets = "expected") -> Curvature:
    """The diagonal and the largest directions."""
    return lambda model, task, trainer: lowrank_fisher(
        model, Batches(model, task, trainer), trainer.training.likelihood, rank=rank, rows=rows,
        targets=_fitting(targets, trainer), seed=trainer.seed, forward=task.forward,
    )  # fmt: skip


@dataclass(frozen=True)
class Batches:
    """A task's training data as the curvature functions read it, as often as they like."""

    model: nn.Module
    task: Task
    trainer: Trainer
    size: int = BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        training = self.trainer.training
        for x, y in self.task.train.batches(min(self.size, 50) if training.loss == "tokens" else self.size):
            with torch.no_grad():
                width = self.task.logits(self.model, x[:1]).shape[-1]
            yield x, training.targets(y, width)


def _fitting(targets: Targets, trainer: Trainer) -> Targets:
    """Of tokens, labels are drawn: there are too many to expect over."""
    return "sampled" if targets == "expected" and trainer.training.loss == "tokens" else targets
