"""The quadratic penalty ½ (θ−μ)ᵀΛ(θ−μ): as a value to differentiate, and as a gradient to add."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .devices import tensor_cores
from .errors import InertError
from .kernels import add_pull_, in_one_pass
from .params import matched, shapes
from .posterior import Memory, Posterior, as_posterior
from .posterior.gaussian import difference
from .precision.base import inner
from .precision.packed import Packed, packed


def penalty(model: nn.Module, posterior: Posterior | Memory) -> Tensor:
    """½ (θ−μ)ᵀΛ(θ−μ) in nats, differentiable in the model's parameters.

    The Bayes objective for a mean loss over N new examples (or tokens) is `loss + penalty / N`. Inside a trainer prefer
    `hold`, which is right under gradient accumulation, clipping and mixed precision too.
    """
    posterior = as_posterior(posterior)
    require_something_held(posterior)
    delta = posterior.delta(model)
    if not posterior.precision.shapes:  # a flat prior: zero, with a graph, so that a loop need not ask
        return sum((0.0 * value.sum() for value in delta.values()), start=torch.zeros(()))
    return (0.5 * posterior.precision.quadratic(delta)).to(next(model.parameters()).device)


def penalty_gradient(model: nn.Module, posterior: Posterior | Memory) -> dict[str, Tensor]:
    """Λ(θ−μ), the gradient of `penalty` without a graph, for the parameters that Λ covers."""
    posterior = as_posterior(posterior)
    with torch.no_grad():
        return posterior.precision.matvec(posterior.delta(model))


class Term(Protocol):
    """Something that holds a model: a value in nats, and its gradient. `hold` takes terms.

    Parameters are looked up in the model at every call, because trainers replace them.
    """

    @property
    def num_data(self) -> float:
        """How many old examples it stands for."""

    @property
    def unit(self) -> str:
        """What `num_data` counts; nothing if it counts nothing."""

    def held(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters it acts on, none if it holds nothing; raises where the model does not fit."""

    def value(self, model: nn.Module) -> Tensor:
        """The term in nats, without a graph."""

    def add_gradient_(self, model: nn.Module, scale: float | Tensor, only: Collection[int]) -> Tensor:
        """Add scale · ∇term to `.grad` of the parameters whose ids are in `only`; returns the term's value."""


@runtime_checkable
class Drawn(Protocol):
    """A term that is an estimate, by something drawn anew at every step."""

    def start(self) -> None:
        """A step begins. Until the next, it draws once: a closure that is called again must see the same objective."""

    @property
    def generator(self) -> torch.Generator | None:
        """What it draws with, if it has drawn. A CUDA graph must know of it (`register_generator_state`)."""


@dataclass(frozen=True)
class Quadratic:
    """The posterior's penalty as a term. A flat posterior is a term that acts on nothing."""

    posterior: Posterior

    @property
    def num_data(self) -> float:
        return self.posterior.num_data

    @property
    def unit(self) -> str:
        return self.posterior.unit

    @cached_property
    def _covered(self) -> frozenset[str]:
        require_something_held(self.posterior)
        return frozenset(() if self.posterior.precision.is_zero() else self.posterior.precision.shapes)

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return shapes(self.posterior.mean)

    @cached_property
    def _packed(self) -> Packed | None:
        return packed(self.posterior.precision, self.posterior.mean)

    def held(self, model: nn.Module) -> dict[str, nn.Parameter]:
        params = matched(model, self._shapes, ties=self.posterior.ties)
        return {name: parameter for name, parameter in params.items() if name in self._covered}

    def value(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            return 0.5 * self.posterior.precision.quadratic(self.posterior.delta(model))

    def add_gradient_(self, model: nn.Module, scale: float | Tensor, only: Collection[int]) -> Tensor:
        with torch.no_grad():
            params = self.held(model)
            if not params:
                return torch.zeros(())
            entries = self.posterior.precision.entrywise()
            if entries is not None and all(id(parameter) in only for parameter in params.values()):
                grads = [_gradient(parameter) for parameter in params.values()]
                means = [self.posterior.mean[name] for name in params]
                weights = [entries[name] for name in params]
                if in_one_pass(grads, list(params.values()), means, weights):
                    return add_pull_(grads, list(params.values()), means, weights, scale)
            pull, value = self.pull(params)
            add_scaled_(params, pull, scale, only)
            return value

    def pull(self, params: Mapping[str, nn.Parameter]) -> tuple[dict[str, Tensor], Tensor]:
        """Λδ and ½ δᵀΛδ at the parameters held. Its matrix products use a GPU's TF32, whose ten bits do for a pull."""
        if self._packed is not None and self._packed.takes(params.values()):
            with tensor_cores():
                return self._packed.pull(params)
        means = [self.posterior.mean[name] for name in params]
        if in_one_pass(list(params.values()), means) and means[0].dtype in (torch.float32, torch.float64):
            delta = dict(zip(params, torch._foreach_sub(list(params.values()), means), strict=True))
        else:
            delta = {name: difference(*pair) for name, *pair in zip(params, params.values(), means, strict=True)}
        with tensor_cores():
            pull = self.posterior.precision.matvec(delta)
        return pull, 0.5 * inner(delta, pull)


def require_something_held(posterior: Posterior) -> None:
    """Raise for a precision that is zero though it was computed from data: the penalty would silently do nothing."""
    if posterior.num_data > 0 and posterior.precision.is_zero():
        raise InertError(
            f"the precision is zero everywhere although it stands for {posterior.num_data:g} {posterior.unit}s: the "
            "penalty would do nothing. Is the model saturated, or its output independent of its weights?"
        )


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient to add to, dense, made where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def add_scaled_(
    params: Mapping[str, nn.Parameter], pull: Mapping[str, Tensor], scale: float | Tensor, only: Collection[int]
) -> None:
    """Add scale · pull to `.grad` of the parameters whose ids are in `only`."""
    names = [name for name in pull if id(params[name]) in only]
    grads, pulls = [_gradient(params[name]) for name in names], [pull[name] for name in names]
    if not _together([*grads, *pulls]):
        for grad, gradient in zip(grads, pulls, strict=True):
            factor = scale.to(gradient.device) if isinstance(scale, Tensor) else scale
            grad += (factor * gradient).to(device=grad.device, dtype=grad.dtype)
    elif isinstance(scale, Tensor):
        torch._foreach_addcmul_(grads, pulls, [scale.to(grads[0].device)] * len(grads))
    else:
        # Views that are not in one piece would keep the others from going through few launches.
        for whole in (True, False):
            part = [pair for pair in zip(grads, pulls, strict=True) if pair[1].is_contiguous() == whole]
            if part:
                torch._foreach_add_(*map(list, zip(*part, strict=True)), alpha=scale)


def _together(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors can go through one call: plain ones on one device."""
    kinds, devices = {type(tensor) for tensor in tensors}, {tensor.device for tensor in tensors}
    return kinds <= {nn.Parameter, Tensor} and len(devices) == 1
