"""A precision laid out as parameters are: in pieces where they are in pieces, whole where they are whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..pieces import cut
from .base import Precision
from .diagonal import Diagonal, SignedDiagonal
from .logarithmic import Logarithmic
from .sum import Sum


def laid(precision: Precision, like: Mapping[str, Tensor]) -> Precision:
    """The same with the entries of diagonals cut as the tensors in `like` are. Other structures are whole anywhere."""
    if isinstance(precision, Sum):
        return replace(precision, terms=tuple(laid(term, like) for term in precision.terms))
    if not isinstance(precision, (Diagonal, SignedDiagonal, Logarithmic)):
        return precision
    mine = precision.codes if isinstance(precision, Logarithmic) else precision.entries
    if all(_alike(each, like.get(name, each)) for name, each in mine.items()):
        return precision
    if isinstance(precision, Logarithmic):
        return precision.cut({**mine, **like})
    return replace(precision, entries={name: cut(each, like.get(name, each)) for name, each in mine.items()})


def _alike(one: Any, other: Any) -> bool:
    layouts = [(getattr(each, "device_mesh", None), getattr(each, "placements", None)) for each in (one, other)]
    return layouts[0] == layouts[1]
