"""What variational inference is given, checked before it begins: a likelihood, a prior, a saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ArgumentError, MismatchError
from ..likelihood import Categorical, Likelihood
from ..params import matched, shapes, some, trainable
from ..posterior import Posterior
from .divergence import require_proper


def require_distribution(likelihood: object) -> None:
    """Raise for what is no likelihood, or is one to take a Fisher with alone."""
    if not isinstance(likelihood, Likelihood):
        raise ArgumentError(f"a likelihood is needed, such as holdfast.categorical, got {likelihood!r}.")
    if isinstance(likelihood, Categorical) and likelihood.temperature != 1:
        raise ArgumentError(
            f"{likelihood.name} is to take a Fisher with, and is no distribution of labels: no posterior comes of it. "
            "Give holdfast.categorical."
        )


def fitting(model: nn.Module, prior: Posterior, unit: str) -> Posterior:
    """The prior, checked: over all that trains, proper, counting in the same unit, on the model's devices."""
    params = matched(model, shapes(prior.mean), ties=prior.ties)
    inside = {id(parameter) for parameter in params.values()}
    outside = [name for name, parameter in trainable(model).items() if id(parameter) not in inside]
    if outside:
        raise MismatchError(
            f"{some(outside)} trains, and the prior does not have it. Freeze it, or make the prior of the model as it "
            "is now: holdfast.prior(model, precision=...)."
        )
    frozen = [name for name, parameter in params.items() if not parameter.requires_grad]
    if frozen:
        raise MismatchError(f"{some(frozen)} is in the prior, and frozen in the model. Let it train.")
    if prior.unit and prior.unit != unit:
        raise MismatchError(f"the prior counts {prior.unit}s, and the likelihood {unit}s: take one that fits.")
    require_proper(prior, "the prior")
    devices = {parameter.device for parameter in params.values()}
    return prior.to(devices.pop()) if len(devices) == 1 else prior


def require_same(state: Mapping[str, Any], **own: Any) -> None:
    """Raise where a saved state is of another prior, or of another number of data."""
    for key, mine in own.items():
        if state.get(key) != mine:
            raise MismatchError(
                f"this state was saved under another {key} ({state.get(key)}, and here {mine}), which all in it is of. "
                "Make this with what it had, or start without its state."
            )
