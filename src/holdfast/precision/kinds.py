"""The table of structures by name, through which a file finds the one it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from .base import Precision
from .source import Source

KINDS: dict[str, type[Precision]] = {}


def described(precision: Precision) -> dict[str, Any]:
    """A precision without its tensors, as JSON can hold it."""
    kind = next((name for name, structure in KINDS.items() if structure is type(precision)), None)
    if kind is None:
        raise ArgumentError(f"{type(precision).__name__} cannot be saved: it is not among {', '.join(KINDS)}.")
    return {"kind": kind, "sources": [_facts(source) for source in precision.sources], **precision.structure()}


def made(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Precision:
    """The precision that `described` described."""
    kind = description["kind"]
    if kind not in KINDS:
        raise ArgumentError(f"its precision has an unknown structure, {kind!r}; known are {', '.join(KINDS)}.")
    sources = []
    for facts in description["sources"]:
        size, factor = float(facts["size"]), float(facts["factor"])
        if not (size >= 0 and factor >= 0):
            raise ArgumentError("it counts a negative amount of data.")
        unit, likelihood, targets = (str(facts[key]) for key in ("unit", "likelihood", "targets"))
        sources.append(Source(str(facts["id"]), size, unit, likelihood, targets, factor))
    return KINDS[kind].rebuilt(description, tensors, tuple(sources))


def _facts(source: Source) -> dict[str, Any]:
    # The weights' fingerprints, and how it was added up, have served consolidate; in a file the mean says it all.
    return {key: value for key, value in asdict(source).items() if key not in ("weights", "added")}
