"""Settings of the variational optimizer, for all parameters or for some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ArgumentError, require_number
from ..params import chosen, some

KNOWN = ("lr", "betas", "start", "radius")


def checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, each in its range."""
    found = dict(given)
    unknown = [key for key in found if key not in KNOWN]
    if unknown:
        raise ArgumentError(f"IVON has no {some(unknown)}: its settings are {', '.join(KNOWN)}.")
    if "lr" in found:
        found["lr"] = require_number(found["lr"], "a learning rate")
    if "start" in found:
        found["start"] = require_number(found["start"], "start, the curvature to start from,", positive=True)
    if "betas" in found:
        found["betas"] = tuple(found["betas"])
        if len(found["betas"]) != 2 or not all(0 <= beta < 1 for beta in found["betas"]):
            raise ArgumentError(f"betas are two numbers, 0 or more and less than 1, got {given['betas']!r}.")
    if "radius" in found and not found["radius"] > 0:
        raise ArgumentError(f"radius, the longest step before the learning rate, is > 0, got {found['radius']!r}.")
    return found


def grouped(named: Mapping[str, nn.Parameter], options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups: one for each pattern over names, with its settings, and one for all the rest."""
    rest, groups = dict(named), []
    for pattern, given in options.items():
        part = chosen(rest, pattern)
        if not part:
            raise ArgumentError(f"options for {pattern!r} fit none of the parameters that are left: {some(rest)}.")
        groups.append({"params": list(part.values()), **checked_options(given)})
        rest = {name: parameter for name, parameter in rest.items() if name not in part}
    return ([{"params": list(rest.values())}] if rest else []) + groups
