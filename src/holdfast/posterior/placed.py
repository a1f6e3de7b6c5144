"""A posterior laid out as a model's parameters are: in pieces on several processes, where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from ..params import matched, shapes
from ..pieces import cut, in_pieces
from ..precision import Diagonal, Logarithmic, Precision, Sum
from .gaussian import Posterior


def placed(posterior: Posterior, model: nn.Module) -> Posterior:
    """The same with its mean, and the entries of diagonals, cut as the model is. Other structures stay whole."""
    params = matched(model, shapes(posterior.mean), ties=posterior.ties)
    if not any(in_pieces(value) for value in (*params.values(), *posterior.mean.values())):
        return posterior
    mean = {name: cut(value, params[name]) for name, value in posterior.mean.items()}
    return replace(posterior, mean=mean, precision=_cut(posterior.precision, params))


def _cut(precision: Precision, params: Mapping[str, Tensor]) -> Precision:
    if isinstance(precision, Diagonal):
        return replace(precision, entries={name: cut(each, params[name]) for name, each in precision.entries.items()})
    if isinstance(precision, Logarithmic):
        return precision.cut(params)
    if isinstance(precision, Sum):
        return replace(precision, terms=tuple(_cut(term, params) for term in precision.terms))
    return precision
