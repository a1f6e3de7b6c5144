"""Orthogonal weight modification (Zeng et al. 2019): steps only where the old inputs of a layer have nothing.

An outside baseline, the strongest known without old data when classes come one after another. It holds no posterior:
each layer's gradient is multiplied by P = (1 + strength · S/α)⁻¹, S the sum over tasks of the mean of a aᵀ over the
layer's inputs (with a 1 for the bias). Where an input direction was used before, P is near zero. Zeng et al. update P
batch by batch with the batch's mean input; here S is taken over all the inputs, once a task is learned.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, HoldfastWarning
from ..params import some
from .tasks import Task
from .training import Trainer, Training

_ALPHA = 1e-3


@dataclass
class Projected:
    """Orthogonal weight modification. It trains with SGD, whose steps stay where the projected gradients point.

    The rate and the momentum are for protocols that train with Adam, and α sets where strength 1 is: orders of
    magnitude that were set once, on no data. A sweep chooses the strength.
    """

    strength: float = 1.0
    lr: float = 0.05
    momentum: float = 0.9
    moments: dict[str, Tensor] = field(default_factory=dict)

    def learn(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        if self.moments:
            _tell_what_is_free(model, self.moments)
        trainer.fit(model, task, lambda optimizer: self._attached(optimizer, model), self._training(trainer.training))

    def remember(self, model: nn.Module, task: Task, trainer: Trainer) -> None:
        for name, moment in input_moments(model, task).items():
            self.moments[name] = self.moments[name] + moment if name in self.moments else moment

    @property
    def kept(self) -> list[Tensor]:
        return list(self.moments.values())

    def _training(self, training: Training) -> Training:
        if training.optimizer == "sgd":
            return training
        return replace(training, optimizer="sgd", lr=self.lr, momentum=self.momentum)

    @contextmanager
    def _attached(self, optimizer: Optimizer, model: nn.Module) -> Iterator[None]:
        layers = _layers(model)
        projectors = {name: self._projector(moment) for name, moment in self.moments.items()}

        @torch.no_grad()
        def project(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for name, projector in projectors.items():
                weight, bias = layers[name].weight, layers[name].bias
                if weight.grad is None:
                    continue
                columns = [weight.grad.flatten(1)]
                if bias is not None and bias.grad is not None:
                    columns.append(bias.grad.unsqueeze(1))
                found = torch.cat(columns, 1) @ projector
                inputs = columns[0].shape[1]
                weight.grad.copy_(found[:, :inputs].view_as(weight))
                if len(columns) > 1:
                    bias.grad.copy_(found[:, inputs])

        hook = optimizer.register_step_pre_hook(project)
        try:
            yield
        finally:
            hook.remove()

    def _projector(self, moment: Tensor) -> Tensor:
        matrix = moment.double() * (self.strength / _ALPHA)
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        found: Tensor = torch.linalg.inv(matrix + eye)
        return found.to(moment)


@torch.no_grad()
def input_moments(model: nn.Module, task: Task, batch: int = 1000) -> dict[str, Tensor]:
    """The mean of a aᵀ over the inputs of each linear and convolutional layer, with a 1 where it has a bias."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def seen(name: str, layer: nn.Linear | nn.Conv2d, x: Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            x = F.unfold(x, layer.kernel_size, layer.dilation, _pixels(layer.padding), layer.stride).transpose(1, 2)
        rows = x.flatten(0, -2)
        if layer.bias is not None:
            rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        sums[name] = sums.get(name, 0) + rows.T @ rows
        counts[name] = counts.get(name, 0) + len(rows)

    hooks = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: seen(name, layer, args[0]))
        for name, layer in _layers(model).items()
    ]
    try:
        for x, _ in task.train.batches(batch):
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total / counts[name] for name, total in sums.items()}


def _pixels(padding: str | tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(padding, str):
        raise ArgumentError(f"a convolution padded {padding!r} is not projected: give its padding in pixels.")
    return padding


def _layers(model: nn.Module) -> dict[str, Any]:
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    }
    for name, layer in found.items():
        if not isinstance(layer.weight, nn.Parameter):
            raise ArgumentError(
                f"the weight of `{name}` is computed (a parametrization, a weight norm?), and what it is computed from "
                "has no inputs to step apart from: orthogonal weight modification cannot hold it."
            )
    return found


def _tell_what_is_free(model: nn.Module, moments: Mapping[str, Tensor]) -> None:
    """Warn of parameters that move as they like: a rival that holds half a network is no rival."""
    layers = _layers(model)
    held = {id(each) for name in moments for each in (layers[name].weight, layers[name].bias)}
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    free = [name for name, each in trained.items() if id(each) not in held]
    if free:
        warnings.warn(
            "orthogonal weight modification holds linear and 2-d convolutional layers alone, and leaves "
            f"{some(free, 3)} free.", HoldfastWarning, stacklevel=2,
        )  # fmt: skip
