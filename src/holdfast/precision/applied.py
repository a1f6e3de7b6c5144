"""Λδ for parameters that may lie in pieces on several processes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..devices import full
from ..pieces import cut, in_pieces
from .base import Precision, added
from .diagonal import Diagonal
from .laid import laid
from .logarithmic import Logarithmic
from .sum import Sum


def applied(precision: Precision, delta: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Λδ, in pieces as δ is: entry by entry where a diagonal is all there is, and the rest a block at a time, whole."""
    if not any(in_pieces(value) for value in delta.values()):
        return precision.matvec(delta)
    precision, found = laid(precision, delta), []
    if isinstance(precision, (Diagonal, Logarithmic)):
        return precision.matvec(delta)
    for term in precision.terms if isinstance(precision, Sum) else (precision,):
        for block in term.blocks():
            mine = {name: delta[name] for name in block.shapes}
            if not isinstance(block, (Diagonal, Logarithmic)):
                mine = {name: full(value) for name, value in mine.items()}
            found.append({name: cut(value, delta[name]) for name, value in block.matvec(mine).items()})
    return added(*found)
