"""A posterior laid out as a model's parameters are: in pieces on several processes, where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from ..devices import full
from ..params import matched, shapes
from ..pieces import cut, in_pieces
from ..precision.laid import laid
from .gaussian import Posterior


def placed(posterior: Posterior, model: nn.Module) -> Posterior:
    """The same with its mean, and the entries of diagonals, cut as the model is. Other structures stay whole."""
    return placed_as(posterior, matched(model, shapes(posterior.mean), ties=posterior.ties))


def placed_as(posterior: Posterior, like: Mapping[str, Tensor]) -> Posterior:
    """The same, cut as other tensors of these names are; what they do not name stays as it is."""
    if not any(in_pieces(value) for value in (*like.values(), *posterior.mean.values())):
        return posterior
    mean = {name: cut(value, like.get(name, value)) for name, value in posterior.mean.items()}
    return replace(posterior, mean=mean, precision=laid(posterior.precision, mean))


def whole(posterior: Posterior) -> Posterior:
    """The same, gathered on every process."""
    if not any(in_pieces(value) for value in posterior.mean.values()):
        return posterior
    mean = {name: full(value) for name, value in posterior.mean.items()}
    return replace(posterior, mean=mean, precision=laid(posterior.precision, mean))
