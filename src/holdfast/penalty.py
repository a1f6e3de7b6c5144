"""The quadratic penalty ½ (θ−μ)ᵀΛ(θ−μ): as a value to differentiate, and as a gradient to add."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .adapters import require_not_adapted
from .devices import full, part, tensor_cores
from .errors import InertError
from .kernels import add_pull_, half_squares, in_one_pass, in_runs
from .kernels.pull import Entries, Tensors
from .params import matched, shapes
from .pieces import in_pieces, laid_out
from .posterior import Memory, Posterior, as_posterior
from .posterior.gaussian import difference
from .posterior.placed import placed
from .precision.applied import applied
from .precision.base import inner
from .precision.logarithmic import weights
from .precision.packed import Packed, packed

# What an adapter that is not merged is held by.
IN_WEIGHT_SPACE = "Hold it in weight space: holdfast.integrations.peft.weight_space(model, memory)."


def penalty(model: nn.Module, posterior: Posterior | Memory) -> Tensor:
    """½ (θ−μ)ᵀΛ(θ−μ) in nats, differentiable in the model's parameters.

    The Bayes objective for a mean loss over N new examples (or tokens) is `loss + penalty / N`. Inside a trainer prefer
    `hold`, which is right under gradient accumulation, clipping and mixed precision too.
    """
    posterior = _of_weights_in_use(posterior, model)
    require_something_held(posterior)
    params = matched(model, shapes(posterior.mean), ties=posterior.ties)
    if not posterior.precision.shapes:  # a flat prior: zero, with a graph, so that a loop need not ask
        return sum((full(0.0 * value.sum()) for value in posterior.delta(params).values()), start=torch.zeros(()))
    delta = posterior.delta({name: laid_out(parameter) for name, parameter in params.items()})
    return (0.5 * inner(delta, applied(posterior.precision, delta))).to(next(model.parameters()).device)


def penalty_gradient(model: nn.Module, posterior: Posterior | Memory) -> dict[str, Tensor]:
    """Λ(θ−μ), the gradient of `penalty` without a graph, for the parameters that Λ covers."""
    posterior = _of_weights_in_use(posterior, model)
    with torch.no_grad():
        return applied(posterior.precision, posterior.delta(model))


def _of_weights_in_use(posterior: Posterior | Memory, model: nn.Module) -> Posterior:
    """The posterior laid out as the model is, whose weights must be what the model computes with."""
    posterior = as_posterior(posterior)
    require_not_adapted(model, posterior.precision.shapes, IN_WEIGHT_SPACE)
    return placed(posterior, model)


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


@runtime_checkable
class Resumable(Protocol):
    """A term whose steps depend on those before."""

    def state_dict(self) -> dict[str, Any]:
        """What the steps that follow depend on; nothing in it where that is the weights alone."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""


class Brought(Protocol):
    """Means and entries that are elsewhere, brought to the parameters a piece at a time."""

    def __call__(self, *roles: Sequence[Any], means: Tensors, entries: Entries) -> Iterator[tuple[Any, ...]]:
        """Lots of pieces, role by role, with those of the means and of the entries, where the roles are."""

    def free(self) -> None:
        """Give back what room it has made for them."""


@dataclass(frozen=True)
class Quadratic:
    """The posterior's penalty as a term. A flat posterior is a term that acts on nothing.

    Where the posterior is not on the parameters' device, `brought` brings it there, a piece at a time.
    """

    posterior: Posterior
    brought: Brought | None = None

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
            found = self._half_squares(self.held(model))
            if found is None:
                delta = self.posterior.delta(model)
                found = 0.5 * inner(delta, applied(self.posterior.precision, delta))
            return found

    def add_gradient_(
        self,
        model: nn.Module,
        scale: float | Tensor,
        only: Collection[int],
        *,
        value: bool = True,
        held: Mapping[str, nn.Parameter] | None = None,
    ) -> Tensor:
        """As every term's. Where the value is not asked for, zero may come in its place.

        `held` is what it holds of the model, where that was just looked up.
        """
        with torch.no_grad():
            params = self.held(model) if held is None else held
            mine = {name: parameter for name, parameter in params.items() if id(parameter) in only}
            if not mine and not (params and value):
                return torch.zeros(())
            # The value is of all that is held, whatever this optimizer has of it.
            found = self._add_by_entries_(mine, scale, value) if not value or len(mine) == len(params) else None
            if found is None:
                pull, found = self.pull(params)
                add_scaled_(params, pull, scale, only)
            return found

    def _add_by_entries_(self, params: Mapping[str, nn.Parameter], scale: float | Tensor, value: bool) -> Tensor | None:
        """The same in few passes, where Λ is nothing but entries, and all tensors are plain or in pieces alike."""
        # A sum over processes that is yet to be made, as the value in pieces and some gradients are, goes another way.
        pieces = value and any(map(in_pieces, params.values()))
        entries = None if pieces else weights(self.posterior.precision, params)
        if entries is None:
            return None
        means = [self.posterior.mean[name] for name in params]
        every = ([_gradient(parameter) for parameter in params.values()], list(params.values()), means)
        if not _alike(*every):
            return None
        grads, held, means = ([part(tensor) for tensor in role] for role in every)
        lots: Iterable[tuple[Any, ...]] = [(grads, held, means, entries)]
        if self.brought is not None:
            if not in_runs(grads, held):
                return None
            lots = self.brought(grads, held, means=means, entries=entries)
        nats = torch.zeros(())
        for mine, thetas, centers, weighed in lots:
            found = add_pull_(mine, thetas, centers, weighed, scale, value=value)
            if found is NotImplemented:  # the first one: none was pulled at
                return None
            nats = nats if found is None else nats + found
        return nats

    def _half_squares(self, params: Mapping[str, nn.Parameter]) -> Tensor | None:
        """½ δᵀΛδ without all of δ at once, where Λ is nothing but entries, and all tensors are plain."""
        held, means = list(params.values()), [self.posterior.mean[name] for name in params]
        entries = None if not held or any(map(in_pieces, held)) else weights(self.posterior.precision, params)
        if entries is None:
            return None
        if self.brought is not None:
            if not in_runs(held):
                return None
            lots = self.brought(held, means=means, entries=entries)
            return torch.stack([half_squares(*lot) for lot in lots]).sum()
        return half_squares(held, means, entries) if in_runs(held, means, entries) else None

    def pull(self, params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
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
            pull = applied(self.posterior.precision, delta)
        return pull, 0.5 * inner(delta, pull)


def require_something_held(posterior: Posterior) -> None:
    """Raise for a precision that is zero though it was computed from data: the penalty would silently do nothing."""
    if posterior.num_data > 0 and posterior.precision.is_zero():
        raise InertError(
            f"the precision is zero everywhere although it stands for {posterior.num_data:g} {posterior.unit}s: the "
            "penalty would do nothing. Is the model saturated, its output independent of its weights, or one output "
            "all there was to answer with?"
        )


def _alike(*roles: Sequence[Any]) -> bool:
    """Whether the tensors of each parameter are in pieces in one way, or all of them whole."""
    return all(len({getattr(each, "placements", None) for each in row}) == 1 for row in zip(*roles, strict=True))


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
