"""Deviations that have left the range where sampling means anything: found, named, and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices import full
from ..errors import VarianceError

# A deviation so many times its prior's is no posterior: data never make a weight less certain by so much.
EXPLODED = 100.0


def require_sound(name: str, mean: Tensor, deviation: Tensor, prior_deviation: Tensor) -> None:
    """Raise where σ is not finite, far above the prior's, or below what the weight's own digits can show."""
    fine = _fine(mean, deviation, prior_deviation)
    if bool(fine):
        return
    if not bool(full(deviation.isfinite().all())) or not bool(full(mean.isfinite().all())):
        raise VarianceError(
            f"`{name}` is no longer finite: training has diverged. Lower the learning rate, or clip gradients."
        )
    wide = int(full((deviation > EXPLODED * prior_deviation).sum()))
    if wide:
        raise VarianceError(
            f"the deviations of {wide} of {mean.numel():,} weights of `{name}` exploded: up to "
            f"{_highest(deviation):.3g}, more than {EXPLODED:g} times their prior's, which no data can do. Lower the "
            "learning rate of the deviations, or undo a tempering far below 1."
        )
    thin = int(full((deviation <= _digits(mean)).sum()))
    raise VarianceError(
        f"the deviations of {thin} of {mean.numel():,} weights of `{name}` collapsed: down to "
        f"{_lowest(deviation):.3g}, less than the weight's own digits can show, so that samples are the mean and the "
        "precision is fiction. Give num_data its true value, lower the learning rate of the deviations, or give the "
        "gradients their true scale (a GradScaler's is undone by sampled(loss_scale=...))."
    )


def _fine(mean: Tensor, deviation: Tensor, prior_deviation: Tensor) -> Tensor:
    sound = (deviation <= EXPLODED * prior_deviation) & (deviation > _digits(mean)) & mean.isfinite()
    found: Tensor = full(sound.all())
    return found


def _digits(mean: Tensor) -> Tensor:
    """The distance from a weight to the next number its dtype has, or nearly so."""
    return torch.finfo(mean.dtype).eps * mean.abs()


def _highest(deviation: Tensor) -> float:
    return float(full(deviation.max()))


def _lowest(deviation: Tensor) -> float:
    return float(full(deviation.min()))
