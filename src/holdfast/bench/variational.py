"""Methods that learn a Gaussian over the weights instead of the weights: the last one is the next one's prior."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Adam

from ..likelihood import Likelihood, custom
from ..posterior import Posterior, consolidate, prior
from ..variational import IVON, mean_field
from .methods import Curvature, carried
from .tasks import Task
from .training import Trainer, Training, Way

# The first prior: weights of about 1 around zero, which a network's are.
_PRECISION = 1.0


@dataclass
class MeanFieldChain:
    """Variational continual learning by gradient (Nguyen et al. 2018): a mean and a deviation for every weight."""

    samples: int = 1
    posterior: Posterior | None = None

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        training = trainer.training
        before = self.posterior or prior(model, _PRECISION, mean=0.0)
        q = mean_field(
            model, before, _likelihood(training), num_data=training.count(task.train.y), samples=self.samples,
            seed=trainer.seed, forward=task.forward,
        )  # fmt: skip
        q.to(next(model.parameters()).device)
        optimizer = Adam(q.parameters(), lr=training.lr, foreach=True)
        width = _width(model, task)
        trainer.fit(
            model, task, way=Way(optimizer, loss=lambda x, y: q((x, training.targets(y, width))))
        )  # fmt: skip
        self.posterior = q.posterior()

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        pass

    @property
    def kept(self) -> list[Tensor]:
        return carried(self.posterior)


@dataclass
class IvonChain:
    """Variational continual learning by natural gradients, with the settings that IVON has by itself: they were chosen
    on held-out data of ten permutations of MNIST (`vcl`), and are the same on all protocols.

    With a `curvature`, what is carried on is Λ₀ and that, at the mean that was found: Laplace in place of what was
    learned of the variance, and all else the same.
    """

    curvature: Curvature | None = None
    posterior: Posterior | None = None

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        training = trainer.training
        before = self.posterior or prior(model, _PRECISION, mean=0.0)
        optimizer = IVON(
            model, before, training.likelihood, num_data=training.count(task.train.y),
            seed=1000 * trainer.seed + trainer.fits,
        )  # fmt: skip
        way = Way(optimizer, within=optimizer.sampled)
        trainer.fit(model, task, training=replace(training, lr=optimizer.defaults["lr"]), way=way)
        self.posterior = before if self.curvature is not None else optimizer.posterior()

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        if self.curvature is not None and self.posterior is not None:
            self.posterior = consolidate(self.posterior, model, self.curvature(model, task, trainer))

    @property
    def kept(self) -> list[Tensor]:
        return carried(self.posterior)


def _likelihood(training: Training) -> Likelihood:
    """The protocol's, with its labels smoothed as for every other method."""
    if not training.label_smoothing:
        return training.likelihood

    def smoothed(output: Tensor, y: Tensor) -> Tensor:
        return training.losses(output, y, training.label_smoothing).reshape(len(y), -1).sum(1)

    counted = (lambda y: float(training.count(y))) if training.unit == "token" else None
    return custom(smoothed, name=f"{training.loss}, smoothed", unit=training.unit, count=counted)


def _width(model: nn.Module, task: Task) -> int:
    return int(task.logits(model, task.train.first(1).x).shape[-1])
