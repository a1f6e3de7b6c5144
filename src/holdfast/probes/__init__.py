"""What is kept of old data in its place: values that inputs can be drawn from, and a few answers without inputs."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from .answers import Answers
from .base import Probes
from .gaussian import GaussianProbes, gaussian_probes
from .kept import KeptInputs, kept_inputs

__all__ = ["Answers", "GaussianProbes", "KeptInputs", "Probes", "gaussian_probes", "kept_inputs", "made_probes"]

_KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Tensor]], Probes]] = {
    "gaussian": GaussianProbes.made,
    "kept": KeptInputs.made,
}


def made_probes(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Probes:
    """The probes that a file describes; the values check themselves as they are made."""
    make = _KINDS.get(str(facts["kind"]))
    if make is None:
        raise ArgumentError(f"it has probes of an unknown kind, {str(facts['kind'])[:40]!r}.")
    if not all(str(facts.get(each, "")).isprintable() for each in ("unit", "layer")):
        raise ArgumentError("its probes have names that cannot be printed.")
    found = make(facts, tensors)
    if set(found.tensors) != set(tensors):
        raise ArgumentError("its tensors are not those of its probes.")
    return found
