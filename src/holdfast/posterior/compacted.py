"""A posterior in less memory: the entries of Λ in a byte each, the mean in two where nothing is lost by it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..devices import full
from ..precision import Diagonal, Logarithmic, Precision

_HALVES = (torch.bfloat16, torch.float16)


def compacted(precision: Precision) -> Precision:
    """A diagonal in codes; a prior's one number for all entries takes less as it is."""
    entries = precision.entries.values() if isinstance(precision, Diagonal) else ()
    if isinstance(precision, Diagonal) and all(_one_number(each) for each in entries):
        return precision
    return Logarithmic.of(precision)


def halved(mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A mean in half precision, if it has no more digits: a model's that is in half precision itself.

    Any other is left as it is. Rounded, it would pull at the model before it has moved, and would be no teacher, nor
    what a forecast by probes compares with.
    """
    for half in _HALVES:
        if all(_fits(value, half) for value in mean.values()):
            return {name: value.to(half) for name, value in mean.items()}
    return dict(mean)


def _fits(value: Tensor, half: torch.dtype) -> bool:
    return bool(full((value.to(half) == value).all()))


def _one_number(entries: Tensor) -> bool:
    return not any(entries.stride())
