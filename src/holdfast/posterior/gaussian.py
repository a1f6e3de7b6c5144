"""The Gaussian over named parameters that stands for what a model knew."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

import torch
from torch import Tensor, nn

from ..devices import full
from ..errors import ArgumentError, MismatchError, require_number
from ..identity import digest, fingerprint
from ..params import aliases, matched, renaming, require_shapes, require_values, shapes, some, told_apart, trainable
from ..pieces import cut
from ..precision import Diagonal, Precision, SignedDiagonal, Source, Sum
from ..precision.applied import applied
from ..precision.base import grown, inner, require_finite
from ..precision.laid import laid
from .compacted import compacted, halved
from .covered import Covered, covered, misfits, with_precision
from .growth import new_parameters, require_plain_growth


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
    def tensors(self) -> dict[str, Tensor]:
        """All that it consists of, under names that say what each is."""
        mean = {f"mean.{name}": value for name, value in self.mean.items()}
        return {**mean, **{f"precision.{name}": value for name, value in self.precision.tensors.items()}}

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
        require_values({name: params[name] for name in self.mean})
        return {name: difference(params[name], cut(mean, params[name])) for name, mean in self.mean.items()}

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
        delta = self.delta(params)
        return normalizer - 0.5 * inner(delta, applied(self.precision, delta))

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Parameters drawn from the posterior; those it does not cover stay at the mean."""
        noise = self.precision.sample(generator)
        return {name: mean + noise[name] if name in noise else mean.clone() for name, mean in self.mean.items()}

    def expanded(self, model: nn.Module, precision: float = 0.0, *, leave: Collection[str] = ()) -> Posterior:
        """The posterior for a model that grew: what is new is free, and centered where the model is.

        Parameters grow at the end of an axis, as when classes or tokens are added to a head or an embedding; those of
        new layers, which train and which it does not know, join it, but for those to `leave`. With a `precision` all
        that is new has a prior of it, at its present values.
        """
        more = require_number(precision, "the precision of new entries")
        params = matched(model, shapes(self.mean), ties=self.ties, grown=True)
        require_values(params)
        require_plain_growth(model, params, self.mean)
        added = {name: kept(full(parameter)) for name, parameter in new_parameters(model, params, leave).items()}
        before = {name: full(value) for name, value in self.mean.items()}  # what grows, grows whole
        mean = {name: grown(value, params[name].shape, full(params[name].detach())) for name, value in before.items()}
        known = laid(self.precision, before).expanded(shapes(params))
        if more:
            old = {name: value for name, value in before.items() if value.shape != mean[name].shape}
            entries = {
                name: grown(torch.zeros_like(value), mean[name].shape, torch.full_like(mean[name], more))
                for name, value in old.items()
            } | {name: torch.full_like(value, more) for name, value in added.items()}
            # Evidence as a prior is: two children of what this gives share it.
            center = fingerprint({name: added[name] if name in added else mean[name] for name in entries})
            said = f"prior(precision={more!r}) of what is new"
            known = known + Diagonal(entries, (Source(digest(f"{said} {self.id} {center}"), 0.0, "", said, ""),))
        ties = {**self.ties, **{name: names for name, names in aliases(model).items() if name in added}}
        return replace(self, mean={**mean, **added}, precision=known, ties=ties)

    def coverage(self, model: nn.Module) -> Covered:
        """Which parameters of a model it holds and which are free, new or frozen; what does not fit is in it, too.

        >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> known = prior(model, precision=1.0)
        >>> model[2] = nn.Linear(2, 5)
        >>> print(known.expanded(model).coverage(model))
        0.weight             6  held
        0.bias               2  held
        2.weight            10  held, but for 6 free entries
        2.bias               5  held, but for 3 free entries
        60.9 % of 23 entries that train are held
        """
        named = told_apart(model)
        named |= {other: named[name] for name, more in aliases(model).items() for other in more if name in named}
        unfit = misfits(self.mean, named)
        fit = {name: id(named[name]) for name in self.mean if name not in unfit}
        diagonal = self.precision.diagonal()
        held = {fit[name]: with_precision(entries) for name, entries in diagonal.items() if name in fit}
        known = {id(named[name]) for name in self.mean if name in named}
        return covered(model, held, known, unfit)

    def renamed(self, names: Mapping[str, str]) -> Posterior:
        """The same for a model whose parameters have new names: `names` has the new one for each old one.

        >>> prior(nn.Linear(2, 1)).renamed({"weight": "head.weight", "bias": "head.bias"}).mean.keys()
        dict_keys(['head.weight', 'head.bias'])
        """
        every = {*self.mean, *(other for more in self.ties.values() for other in more)}
        unknown = [name for name in names if name not in every]
        if unknown:
            raise MismatchError(f"the posterior has no {some(unknown)} to rename: it has {some(self.mean)}.")
        after = [names.get(name, name) for name in every]
        twice = sorted({name for name in after if after.count(name) > 1})
        if twice:
            raise ArgumentError(f"two parameters would both be called {some(twice)}: give each a name of its own.")
        ties = {names.get(name, name): tuple(names.get(n, n) for n in more) for name, more in self.ties.items()}
        mean = {names.get(name, name): value for name, value in self.mean.items()}
        return replace(self, mean=mean, precision=self.precision.renamed(names), ties=ties)

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

    def compact(self) -> Posterior:
        """The same in less memory, to hold by: Λ in 8 bits an entry (`Logarithmic`), off by 2 % at most.

        The mean of a model in half precision is kept in half precision, and any other as it is: 3 or 5 bytes a
        parameter in place of 8. Of diagonals alone. What is learned next is added in ordinary numbers: consolidate,
        save, and then make it compact again.
        """
        return replace(self, mean=halved(self.mean), precision=compacted(self.precision))


def prior(model: nn.Module, precision: float = 0.0, mean: float | Mapping[str, Tensor] | None = None) -> Posterior:
    """Where learning starts: flat (it holds nothing), or ℓ₂ toward this model, a number, or a given mean.

    >>> prior(nn.Linear(2, 1), precision=0.1, mean=0.0).mean["bias"]
    tensor([0.])
    """
    precision = require_number(precision, "a prior's precision")
    params = trainable(model)
    require_values(params)
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


def kept(parameter: Tensor) -> Tensor:
    """A copy to keep: float32 at least."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True).contiguous()


def difference(parameter: Tensor, mean: Tensor) -> Tensor:
    """θ − μ in float32 at least: two bfloat16 numbers that are close differ by less than either can say."""
    dtype = torch.promote_types(torch.promote_types(parameter.dtype, mean.dtype), torch.float32)
    return parameter.to(mean.device, dtype) - mean.to(dtype)
