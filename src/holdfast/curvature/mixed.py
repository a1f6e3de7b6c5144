"""A structure for each part of a model, chosen by the names of its parameters."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import ArgumentError, DataError
from ..likelihood import Likelihood
from ..params import chosen, some, trainable, unwrapped
from ..precision import Precision
from .batches import Forward
from .engine import MEMORY
from .replicas import replicas_of
from .scores import Targets


def mixed_fisher(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Likelihood,
    structures: Mapping[str, Callable[..., Precision]],
    *,
    targets: Targets | None = None,
    seed: int = 0,
    forward: Forward | None = None,
    memory: int = MEMORY,
) -> Precision:
    """The Fisher information of separate parts of a model, each with a structure of its own.

        mixed_fisher(model, loader, holdfast.categorical,
                     {"head.*": holdfast.dense_fisher, "*norm*": holdfast.diagonal_fisher,
                      "*": holdfast.kronecker_fisher})

    A parameter belongs to the first pattern that fits its name. A structure's own arguments are given with it:
    functools.partial(holdfast.lowrank_fisher, rank=32). The data is read once for each pattern, so a one-shot iterator
    is refused. Between parts there is no curvature.
    """
    with replicas_of(model):
        parts = _parts(model, batches, structures)
    shared = {"targets": targets, "seed": seed, "forward": forward, "memory": memory}
    found = []
    for fisher, names in parts:
        own = fisher.keywords if isinstance(fisher, functools.partial) else {}  # what is said with a structure holds
        given = {key: value for key, value in shared.items() if key not in own}
        found.append(fisher(model, batches, likelihood, only=names, **given))
    if len({source.id for each in found for source in each.sources}) > 1:
        raise DataError(
            "the batches were not the same each time they were read (once for each pattern): are they augmented, or "
            "is the last one dropped? Give batches that stay as they are, or a list."
        )
    return functools.reduce(operator.add, found)


def _parts(
    model: nn.Module, batches: Iterable[Any], structures: Mapping[str, Callable[..., Precision]]
) -> list[tuple[Callable[..., Precision], list[str]]]:
    """Each structure, and the names that fall to it."""
    if not structures:
        raise ArgumentError('mixed_fisher needs a structure for each part: {"*": holdfast.kronecker_fisher}.')
    if isinstance(batches, Iterator):
        raise DataError(
            "the data is read once for each pattern, and an iterator can be read once. Give a list, or a loader."
        )
    left, parts = trainable(unwrapped(model)), []
    for pattern, fisher in structures.items():
        _require_structure(pattern, fisher)
        mine = chosen(left, pattern)
        if not mine:
            raise ArgumentError(f"no parameter is left for `{pattern}`. Left: {some(left)}.")
        left = {name: parameter for name, parameter in left.items() if name not in mine}
        parts.append((fisher, list(mine)))
    if left:
        raise ArgumentError(f'no pattern fits {some(left)}. Add "*" as the last one, for all the rest.')
    return parts


def _require_structure(pattern: str, fisher: object) -> None:
    if not callable(fisher):
        raise ArgumentError(f"`{pattern}` needs a function such as holdfast.kronecker_fisher, got {fisher!r}.")
    takes = inspect.signature(fisher).parameters
    name = getattr(fisher, "__name__", None) or getattr(getattr(fisher, "func", None), "__name__", "the function")
    lacks = [each for each in ("only", "targets", "seed", "forward", "memory") if each not in takes]
    if lacks and not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        raise ArgumentError(
            f"`{pattern}`: {name} does not take {', '.join(lacks)}, as a part of a mixture must. Use diagonal_fisher, "
            "kronecker_fisher, lowrank_fisher or dense_fisher."
        )
    missing = [
        each.name for each in takes.values()
        if each.kind is inspect.Parameter.KEYWORD_ONLY and each.default is inspect.Parameter.empty
    ]  # fmt: skip
    if missing:
        said = ", ".join(f"{each}=..." for each in missing)
        raise ArgumentError(f"`{pattern}`: {name} needs {said}: functools.partial(holdfast.{name}, {said}).")
