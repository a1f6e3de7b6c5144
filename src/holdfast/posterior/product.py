"""Posteriors of one model, made apart, multiplied into one."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError, HoldfastWarning, MismatchError
from ..params import require_shapes, shapes, some
from ..precision.base import added
from ..ranks import require_one
from .gaussian import Posterior
from .memory import STATISTICS, Memory, as_posterior
from .placed import placed_as, whole


def merge(*posteriors: Posterior | Memory, base: Posterior | Memory | None = None) -> Posterior:
    """The product of Gaussians: Λ = ΣΛₜ, μ = Λ⁺ΣΛₜμₜ (J_original, and Fisher-weighted model merging).

    ½ Σₜ (θ−μₜ)ᵀΛₜ(θ−μₜ) is the merged penalty plus a constant, so one Gaussian does for any number of tasks. Where ΣΛ
    is zero the mean is that of the last posterior given. Children of one posterior share what it knew: name it as
    `base` and it is counted once, Λ = ΣΛₜ − (n−1)Λ_base, and likewise for Λμ. Buffers are not parameters and have no
    product: merging memories gives a Posterior, and leaves probes and answers out, which is said.
    """
    left = [each for each in posteriors if isinstance(each, Memory) and (each.probes or each.answers)]
    if left:
        warnings.warn(
            "probes and answers are not in what merging gives: join them with `+`, and keep them beside it with "
            "Memory.of(merged, model, probes, answers).", HoldfastWarning, stacklevel=2,
        )  # fmt: skip
    if any(name.endswith(STATISTICS) for each in posteriors if isinstance(each, Memory) for name in each.buffers):
        warnings.warn(
            "statistics, such as BatchNorm's, have no product, and are not in what merging gives: with its mean in the "
            "model, restore_(model, merged), count them anew with data, and keep them with Memory.of(merged, model).",
            HoldfastWarning, stacklevel=2,
        )  # fmt: skip
    if len(posteriors) < 2:
        raise ArgumentError(
            f"merging takes at least two posteriors, got {len(posteriors)}. Unpack a list: merge(*list)."
        )
    last = as_posterior(posteriors[-1])
    device = next(iter(last.mean.values())).device
    parts = [as_posterior(posterior).to(device).named_as(last) for posterior in posteriors]
    shared = None if base is None else as_posterior(base).to(device).named_as(last)
    layout = parts[-1].mean
    cuts = [value for part in parts for value in part.mean.values()]
    for each in (*parts, *([] if shared is None else [shared])):
        require_one(each.tensors, cuts, "posteriors")
    # Entries add up where they are; what is more is multiplied whole, and cut again.
    apart = any(part.precision.entrywise() is None for part in (*parts, *([] if shared is None else [shared])))
    parts = [whole(part) if apart else placed_as(part, layout) for part in parts]
    shared = shared if shared is None else whole(shared) if apart else placed_as(shared, layout)
    require_counted_once(parts, shared)

    # The last word on what is free; everything else is counted from here, so that it stays there exactly.
    wide = functools.reduce(torch.promote_types, (v.dtype for part in parts for v in part.mean.values()), torch.float32)
    mean = {name: value.to(wide) for part in parts for name, value in part.mean.items()}
    for part in parts:
        _require_same_model(part, parts[-1])
        require_shapes(shapes(part.mean), shapes(mean), what="one posterior", than="another")
    precision = parts[0].precision
    for part in parts[1:]:
        precision = precision + part.precision
    pulls = [_pull(part, mean) for part in parts]
    if shared is not None:
        require_shapes(
            shapes(shared.mean), shapes(mean), what="the base, which must be expanded too,", than="the others"
        )
        repeats = len(parts) - 1
        for _ in range(repeats):  # one by one, as a Kronecker sum keeps them
            precision = precision - shared.precision
        pulls.append({name: -repeats * value for name, value in _pull(shared, mean).items()})
    shift = precision.solve(added(*pulls, {name: torch.zeros_like(value) for name, value in mean.items()}))
    moved = {name: value + shift[name] if name in shift else value.clone() for name, value in mean.items()}
    ties = {name: more for part in parts for name, more in part.ties.items()}
    return placed_as(Posterior(moved, precision, ties, tuple(part.id for part in parts)), layout)


def _pull(part: Posterior, center: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Λₜ(μₜ − center)."""
    return part.precision.matvec({name: value - center[name] for name, value in part.mean.items()})


def _require_same_model(part: Posterior, last: Posterior) -> None:
    """Raise unless two posteriors share a parameter; one may cover parameters that the other lacks (a new head)."""
    if not set(part.mean) & set(last.mean):
        raise MismatchError(
            f"these posteriors are of different models: one has {some(part.mean)}, the other {some(last.mean)}."
        )


def require_counted_once(parts: Sequence[Posterior], base: Posterior | None = None) -> None:
    """Raise where the same evidence would enter the product twice, or the base is not what the parts came from."""
    seen = Counter(source.id for part in parts for source in part.sources)
    known = {} if base is None else {source.id: source for source in base.sources}
    repeated = [source for part in parts for source in part.sources if seen[source.id] > 1 and source.id not in known]
    if repeated:
        cure = (
            "If they started from one posterior, name it: merge(a, b, base=that_posterior), on the command line --base."
            if base is None
            else "The base given is not the last posterior they have in common."
        )
        raise MismatchError(
            f"these posteriors share evidence ({repeated[0]}), which the product would count twice. {cure}"
        )
    for part in parts:
        held = {source.id: source.factor for source in part.sources}
        for source in known.values():
            if abs(held.get(source.id, -1.0) - source.factor) > 1e-9:
                state = "was decayed or rescaled in" if source.id in held else "is not in"
                raise MismatchError(
                    f"the base's evidence ({source}) {state} one of the posteriors, so it cannot be divided out. Name "
                    "the posterior that all of them started from."
                )
