"""One task after another: p(θ | D₁, D₂) ∝ p(D₂ | θ) p(θ | D₁), re-centered at the new optimum."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..adapters import require_not_adapted
from ..errors import ArgumentError, HoldfastWarning, MismatchError, require_number
from ..identity import fingerprints
from ..params import aliases, all_parameters, matched, renaming, shapes, some
from ..pieces import resharded
from ..precision import Diagonal, Precision
from ..precision.base import require_finite
from ..precision.laid import laid
from ..precision.source import joined, thinned
from ..precision.sum import settled
from ..ranks import require_one
from .gaussian import Posterior, kept
from .memory import Memory, as_posterior
from .moved import moved
from .placed import placed_as

Kept = TypeVar("Kept", Posterior, Memory)

_MERGE = (
    "Merge it and let the weights train, so that there is a Fisher of them: model = model.merge_and_unload(); "
    "model.requires_grad_(True). Then take the Fisher, and consolidate."
)


def consolidate(
    posterior: Kept, model: nn.Module, fisher: Precision, *, decay: float = 1.0, exact: bool = False
) -> Kept:
    """What the model knows after another task (the J of the derivation): μ ← θ*, Λ ← γΛ + F.

    `fisher` must have been taken at the weights the model has now. A strength for the task is a factor,
    `10 * fisher`; a `decay` γ below 1 forgets older tasks exponentially (online EWC). Parameters that are new in
    `fisher` join the posterior. A Memory gives a Memory, with the buffers the model has now.

    Memory does not grow with tasks: diagonals and dense precisions add up, and the terms of Kronecker and low-rank ones
    are merged into one, which is an approximation (`Kronecker.merged`, `LowRank.merged`); `exact=True` keeps them.
    """
    known, fisher = _aligned(as_posterior(posterior), model, fisher)
    params = _checked(known, model, fisher, decay)
    mean = {name: kept(parameter) for name, parameter in params.items()}
    precision = settled(decay * known.precision + fisher)
    precision = precision if exact else precision.merged()
    after = Posterior(mean, precision, _ties(known, model, params), (known.id,))
    return _remembered(posterior, after, model, decay)


def consolidate_(posterior: Kept, model: nn.Module, fisher: Precision, *, decay: float = 1.0) -> Kept:
    """`consolidate` in the memory of its arguments, one parameter at a time, for very large models. Diagonals only.

    The tensors of `posterior` and `fisher` become those of the posterior returned: use only that afterwards.
    """
    known, fisher = _aligned(as_posterior(posterior), model, fisher)
    params = _checked(known, model, fisher, decay)
    if not isinstance(known.precision, Diagonal) or not isinstance(fisher, Diagonal):
        raise MismatchError(
            f"consolidate_ works on diagonals, got {type(known.precision).__name__} and {type(fisher).__name__}. "
            "Use consolidate, which makes a new posterior."
        )
    for name, parameter in params.items():  # before anything is written
        require_finite(f"mean of {name}", parameter)
    ties, parents = _ties(known, model, params), (known.id,)
    sources = joined((known.precision.shapes, thinned(known.sources, decay)), (fisher.shapes, fisher.sources))
    mean, entries = dict(known.mean), dict(known.precision.entries)
    for name, parameter in params.items():
        mean[name] = _written(mean.get(name), parameter)
        old, new = entries.get(name), fisher.entries.get(name)
        if old is not None and old.is_contiguous() and old.dtype in (torch.float32, torch.float64):
            entries[name] = old.mul_(decay) if new is None else old.mul_(decay).add_(new.to(old))
        elif old is not None:  # a prior's one number for all entries, or half precision: the Fisher's memory takes over
            entries[name] = decay * old if new is None else new.add_(decay * old.to(new))
        elif new is not None:
            entries[name] = new
    after = Posterior(mean, Diagonal(entries, sources), ties, parents)
    return _remembered(posterior, after, model, decay)


def _written(old: Tensor | None, parameter: Tensor) -> Tensor:
    """A parameter as a mean: in the memory of the old one, if that has room for all of its digits."""
    if old is None:
        return kept(parameter)
    roomy = torch.promote_types(old.dtype, parameter.dtype) == old.dtype
    return old.copy_(parameter.detach()) if roomy else kept(parameter).to(old.device)


def _remembered(before: Kept, after: Posterior, model: nn.Module, decay: float) -> Kept:
    """What was kept beside the posterior goes on with it; what counts less, counts less there too."""
    if not isinstance(before, Memory):
        return after
    if decay == 0:  # nothing of it counts any more
        return Memory.of(after, model)
    probes = before.probes if before.probes is None or decay == 1 else before.probes.thinned(decay)
    answers = before.answers if before.answers is None or decay == 1 else before.answers.thinned(decay)
    return Memory.of(after, model, probes, answers)


def _aligned(posterior: Posterior, model: nn.Module, fisher: Precision) -> tuple[Posterior, Precision]:
    """The two on one device and with one name for each tied parameter."""
    if not isinstance(fisher, Precision):
        raise ArgumentError(
            f"consolidate takes a precision, such as diagonal_fisher(...) gives, got {type(fisher).__name__}."
        )
    devices = {tensor.device for tensor in fisher.tensors.values()}
    if len(devices) == 1:
        posterior = posterior.to(devices.pop())
    names = renaming(fisher.shapes, posterior.mean, {**posterior.ties, **aliases(model)})
    fisher = fisher.renamed(names) if names else fisher
    resharded(model)
    wanted = {**fisher.shapes, **shapes(posterior.mean)}
    layout = {name: p for name, p in all_parameters(model).items() if p.shape == wanted.get(name)}
    require_one(posterior.tensors, layout.values(), "posteriors")
    require_one(fisher.tensors, layout.values(), "Fishers")
    return placed_as(posterior, layout), laid(fisher, layout)


def _checked(posterior: Posterior, model: nn.Module, fisher: Precision, decay: float) -> dict[str, nn.Parameter]:
    """The parameters that the new posterior covers."""
    if require_number(decay, "decay") > 1:
        raise ArgumentError(f"decay is the share of the old precision that is kept, at most 1; got {decay}.")
    params = matched(model, {**fisher.shapes, **shapes(posterior.mean)}, ties=posterior.ties)
    require_not_adapted(model, {*fisher.shapes, *(posterior.precision.shapes if decay else ())}, _MERGE)
    again = {source.id for source in fisher.sources} & {source.id for source in posterior.sources}
    if again:
        raise MismatchError(
            "this Fisher is already in the posterior, and would count twice. Was the same line run again? Fishers of "
            "separate parts of one model on the same data are added first: consolidate(posterior, model, a + b)."
        )
    now = fingerprints(all_parameters(model))
    for source in fisher.sources:
        changed = [name for name, then in source.weights.items() if now.get(name) != then]
        if changed:
            raise MismatchError(
                f"the Fisher was taken at other weights than the model has now: `{changed[0]}` has changed (and "
                f"{len(changed) - 1} more). Compute it after training, just before consolidate."
            )
    for source in fisher.sources:
        if source.size and source.added > 1:
            warnings.warn(
                f"this Fisher was added to itself: {source.added} times the same {source.unit}s at the same weights, "
                f"which count as {source.num_data:g} and are {source.size:g}. An average of draws is 0.5 * (a + b), "
                "and a strength is a factor, 2 * fisher.", HoldfastWarning, stacklevel=3,
            )  # fmt: skip
    # What a prior alone holds may go anywhere; what data held goes on being held, and where it is now nobody asked.
    left = {name for name in posterior.precision.shapes if name not in fisher.shapes}
    away = moved(posterior.mean, model, left) if left and decay and posterior.num_data else []
    if away:
        warnings.warn(
            f"{some(away)} moved from the posterior's mean, and the Fisher has nothing of it: the mean follows, and of "
            "the new data, which counts as if it were known there, nothing is held. Was it frozen for the Fisher "
            "alone, as PEFT leaves weights after merge_and_unload? Let it train, requires_grad_(True), and take the "
            "Fisher anew.", HoldfastWarning, stacklevel=3,
        )  # fmt: skip
    return params


def _ties(posterior: Posterior, model: nn.Module, params: dict[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    return {**posterior.ties, **{name: more for name, more in aliases(model).items() if name in params}}
