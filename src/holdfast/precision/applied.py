"""Λδ for parameters that may lie in pieces on several processes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..devices import full
from ..pieces import cut, in_pieces
from .base import Precision, added
from .sum import Sum


def applied(precision: Precision, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Λδ, in pieces as δ is: entry by entry where a diagonal is all there is, and the rest a block at a time, whole."""
    if precision.entrywise() is not None or not any(in_pieces(value) for value in delta.values()):
        return precision.matvec(delta)
    found = []
    for term in precision.terms if isinstance(precision, Sum) else (precision,):
        for block in term.blocks():
            mine = {name: delta[name] for name in block.shapes}
            if block.entrywise() is None:
                mine = {name: full(value) for name, value in mine.items()}
            found.append({name: cut(value, delta[name]) for name, value in block.matvec(mine).items()})
    return added(*found)
