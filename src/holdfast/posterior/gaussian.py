"""The Gaussian over named parameters that stands for what a model knew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, MismatchError, require_number
from ..identity import digest, fingerprint, fingerprints
from ..params import aliases, all_parameters, buffers, matched, renaming, require_shapes, shapes, trainable
from ..precision import Diagonal, Precision, SignedDiagonal, Source, Sum
from ..precision.base import grown, require_finite
from ..probes import Answers, Probes


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """p(θ | data) ≈ N(mean, precision⁻¹) over named parameters.

    `precision` may cover fewer parameters than `mean`; there it is zero, and the parameter is free. `ties` lists the
    other names of tied parameters.
    """

    mean: dict[str, Tensor]
    precision: Precision
    ties: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.mean:
            raise ArgumentError("a posterior needs at least one parameter.")
        for name, value in self.mean.items():
            require_finite(f"mean of {name}", value)
        terms = self.precision.terms if isinstance(self.precision, Sum) else (self.precision,)
        if any(isinstance(term, SignedDiagonal) for term in terms):
            raise ArgumentError("a Hessian's diagonal may be negative: give its .precision() or its .clamped().")
        require_shapes(self.precision.shapes, shapes(self.mean), what="the precision", than="the mean")

    def __repr__(self) -> str:
        return f"Posterior({self.precision!r} over {len(self.mean)} parameters)"

    @property
    def num_data(self) -> float:
        """How many old examples (or tokens) it stands for; 0 for a prior."""
        return self.precision.num_data

    @property
    def unit(self) -> str:
        """What `num_data` counts; nothing for a prior alone."""
        return self.precision.unit

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it was learned from."""
        return self.precision.sources

    @property
    def id(self) -> str:
        """A short identity, of the values."""
        return digest(f"{fingerprint(self.mean)} {fingerprint(self.precision.tensors)} {self.num_data}")

    def delta(self, params: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """δ = θ − μ for a model or for named parameters, in float32 at least, on the mean's device."""
        if isinstance(params, nn.Module):
            params = matched(params, shapes(self.mean), ties=self.ties)
        else:
            require_shapes(shapes(self.mean), shapes(params), what="the posterior", than="the parameters given")
        return {name: difference(params[name], mean) for name, mean in self.mean.items()}

    def log_prob(self, params: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """log N(θ; μ, Λ⁻¹) = −½ δᵀΛδ + ½ log det Λ − (M/2) log 2π, in nats."""
        free = [name for name in self.mean if name not in self.precision.shapes]
        if free:
            raise MismatchError(
                f"the posterior says nothing about `{free[0]}` ({len(free)} such parameters), so it has no density "
                "over all of them. Start from a proper prior: holdfast.prior(model, precision=...)."
            )
        size = sum(mean.numel() for mean in self.mean.values())
        normalizer = 0.5 * self.precision.logdet() - 0.5 * size * math.log(2 * math.pi)
        return normalizer - 0.5 * self.precision.quadratic(self.delta(params))

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Parameters drawn from the posterior; those it does not cover stay at the mean."""
        noise = self.precision.sample(generator)
        return {name: mean + noise[name] if name in noise else mean.clone() for name, mean in self.mean.items()}

    def expanded(self, model: nn.Module, precision: float = 0.0) -> Posterior:
        """The posterior for a model whose parameters grew: new entries are free, and centered where the model is.

        Growth is at the end of an axis, as when classes or tokens are added to a head or an embedding. With a
        `precision` the new entries have a prior of it, at their present values.
        """
        more = require_number(precision, "the precision of new entries")
        params = matched(model, shapes(self.mean), ties=self.ties, grown=True)
        _require_plain_growth(model, params, self.mean)
        mean = {name: grown(mean, params[name].shape, params[name].detach()) for name, mean in self.mean.items()}
        known = self.precision.expanded(shapes(params))
        if more:
            old = {name: value for name, value in self.mean.items() if value.shape != mean[name].shape}
            known = known + Diagonal({
                name: grown(torch.zeros_like(value), mean[name].shape, torch.full_like(mean[name], more))
                for name, value in old.items()
            })  # fmt: skip
        return replace(self, mean=mean, precision=known)

    def named_as(self, other: Posterior) -> Posterior:
        """The same with tied parameters under the names that `other` has for them."""
        names = renaming(self.mean, other.mean, {**self.ties, **other.ties})
        if not names:
            return self
        mean = {names.get(name, name): value for name, value in self.mean.items()}
        groups = [{name, *more} for name, more in self.ties.items()]
        ties = {name: tuple(sorted(group - {name})) for group in groups for name in group & set(mean)} | other.ties
        return replace(self, mean=mean, precision=self.precision.renamed(names), ties=ties)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Posterior:
        """The same on another device, or in another floating dtype."""
        mean = {name: value.to(device=device, dtype=dtype) for name, value in self.mean.items()}
        return replace(self, mean=mean, precision=self.precision.to(device, dtype))


@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """What is kept of a model and its data: the posterior, the buffers (BatchNorm statistics) it ran with; and, if
    there are any, probes that stand for its inputs and a few of its answers, which a forecast is made from."""

    posterior: Posterior
    buffers: dict[str, Tensor] = field(default_factory=dict)
    probes: Probes | None = None
    answers: Answers | None = None
    frozen: dict[str, str] = field(default_factory=dict)  # marks of the parameters outside the posterior

    def __post_init__(self) -> None:
        if self.answers is not None and not isinstance(self.answers, Answers):
            raise ArgumentError(f"a memory's answers are kept_answers(...), got {type(self.answers).__name__}.")
        if self.probes is not None and not isinstance(self.probes, Probes):
            raise ArgumentError(
                f"a memory's probes are gaussian_probes(...) or kept_inputs(...), got {type(self.probes).__name__}."
            )
        for name, value in self.buffers.items():
            if value.is_floating_point():
                require_finite(f"buffer {name}", value)

    def __repr__(self) -> str:
        more = "".join(f", {each!r}" for each in (self.probes, self.answers) if each is not None)
        return f"Memory({self.posterior!r}, {len(self.buffers)} buffers{more})"

    @property
    def mean(self) -> dict[str, Tensor]:
        """The posterior's."""
        return self.posterior.mean

    @property
    def precision(self) -> Precision:
        """The posterior's."""
        return self.posterior.precision

    @property
    def num_data(self) -> float:
        """The posterior's."""
        return self.posterior.num_data

    @property
    def unit(self) -> str:
        """The posterior's."""
        return self.posterior.unit

    def expanded(self, model: nn.Module, precision: float = 0.0) -> Memory:
        """The memory for a model whose parameters grew; see `Posterior.expanded`."""
        return replace(self, posterior=self.posterior.expanded(model, precision))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Memory:
        """The same on another device, the posterior in another floating dtype."""
        moved = {name: buffer.to(device) for name, buffer in self.buffers.items()}
        probes = self.probes if self.probes is None or device is None else self.probes.to(device)
        answers = self.answers if self.answers is None or device is None else self.answers.to(device)
        return replace(self, posterior=self.posterior.to(device, dtype), buffers=moved, probes=probes, answers=answers)

    def with_probes(self, probes: Probes) -> Memory:
        """The memory with probes of another task's inputs beside those it has."""
        return replace(self, probes=probes if self.probes is None else self.probes + probes)

    def with_answers(self, answers: Answers) -> Memory:
        """The memory with answers on another task's data beside those it has, in no more memory."""
        return replace(self, answers=answers if self.answers is None else self.answers + answers)

    @staticmethod
    def of(
        posterior: Posterior, model: nn.Module, probes: Probes | None = None, answers: Answers | None = None
    ) -> Memory:
        """The posterior together with the buffers the model has now, and probes and answers if they are given."""
        kept = {name: buffer.detach().clone() for name, buffer in buffers(model).items()}
        named = {*posterior.mean, *(other for more in posterior.ties.values() for other in more)}
        outside = {name: parameter for name, parameter in all_parameters(model).items() if name not in named}
        return Memory(posterior, kept, probes, answers, fingerprints(outside))


def as_posterior(memory: Posterior | Memory) -> Posterior:
    """The posterior of either."""
    if isinstance(memory, Memory):
        return memory.posterior
    if not isinstance(memory, Posterior):
        raise ArgumentError(
            f"a Posterior or a Memory is needed, got {type(memory).__name__}. A Fisher becomes one by "
            "consolidate(prior(model), model, fisher), a file by holdfast.load(path)."
        )
    return memory


def prior(model: nn.Module, precision: float = 0.0, mean: float | Mapping[str, Tensor] | None = None) -> Posterior:
    """Where learning starts: flat (it holds nothing), or ℓ₂ toward this model, a number, or a given mean.

    >>> prior(nn.Linear(2, 1), precision=0.1, mean=0.0).mean["bias"]
    tensor([0.])
    """
    precision = require_number(precision, "a prior's precision")
    params = trainable(model)
    if not (mean is None or isinstance(mean, (Real, Mapping))):
        raise ArgumentError(f"a prior's mean is a number or a dict of tensors by name, got {type(mean).__name__}.")
    if mean is None:
        means = {name: kept(p) for name, p in params.items()}
    elif isinstance(mean, Mapping):
        require_shapes(shapes(params), shapes(mean), what="the model", than="the mean given")
        means = {name: kept(mean[name]) for name in params}
    else:
        means = {name: torch.full_like(kept(p), float(mean)) for name, p in params.items()}
    known = {name: more for name, more in aliases(model).items() if name in means}
    if precision == 0:
        return Posterior(means, Diagonal({}), known)
    # One number behind every entry: a prior takes no memory until something is added to it.
    entries = {name: value.new_full((), precision).expand(value.shape) for name, value in means.items()}
    source = Source(digest(f"prior {precision} {fingerprint(means)}"), 0.0, "", f"prior(precision={precision!r})", "")
    return Posterior(means, Diagonal(entries, (source,)), known)


def restore_(model: nn.Module, memory: Posterior | Memory) -> None:
    """Put the memory's mean, and its buffers if it has any, into the model."""
    posterior = as_posterior(memory)
    params = matched(model, shapes(posterior.mean), ties=posterior.ties)
    kept_buffers = memory.buffers if isinstance(memory, Memory) else {}
    found = buffers(model)
    require_shapes(shapes(kept_buffers), shapes(found), what="the memory's buffers", than="the model")
    with torch.no_grad():
        for name, parameter in params.items():
            parameter.copy_(posterior.mean[name])
        for name, value in kept_buffers.items():
            found[name].copy_(value)


def _require_plain_growth(model: nn.Module, params: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> None:
    """Raise where old entries do not stay in front: gates, queries, keys and values are stacked in one parameter."""
    stacked = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    owned = {
        id(p): module for module in model.modules() if isinstance(module, stacked) for p in module._parameters.values()
    }
    for name, parameter in params.items():
        if parameter.shape != mean[name].shape and id(parameter) in owned:
            raise MismatchError(
                f"`{name}` of {type(owned[id(parameter)]).__name__} grew from {tuple(mean[name].shape)} to "
                f"{tuple(parameter.shape)}, but stacks several matrices, so its old entries are no longer in front. "
                "Make a new memory of the grown model."
            )


def kept(parameter: Tensor) -> Tensor:
    """A copy to keep: float32 at least."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True).contiguous()


def difference(parameter: Tensor, mean: Tensor) -> Tensor:
    """θ − μ in float32 at least: two bfloat16 numbers that are close differ by less than either can say."""
    dtype = torch.promote_types(torch.promote_types(parameter.dtype, mean.dtype), torch.float32)
    return parameter.to(mean.device, dtype) - mean.to(dtype)
