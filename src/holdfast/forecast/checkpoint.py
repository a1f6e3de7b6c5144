"""The weights of a memory's model, found in what training programs save of theirs."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..posterior import Posterior

_AROUND = ("state_dict", "model_state_dict", "model")  # under which names checkpoints have the weights


def in_checkpoint(
    found: object, known: Posterior, inside: str | None = None, *, where: str = "what was given"
) -> dict[str, Tensor]:
    """The weights under the names that a posterior has for them, and what else is beside them there.

    Without the step, the optimizer and the like; without what stands before the names, of a wrapper or a module around
    the model (several would do: `inside` says which); and where a tied one has another name there.
    """
    weights = _named(found, where)
    fitting = {prefix: mine for prefix in _prefixes(weights, known) if (mine := _fitting(weights, known, prefix))}
    if inside is None and "" not in fitting and len(fitting) > 1:
        raise ArgumentError(
            f"the checkpoint has this model several times, inside {', '.join(sorted(fitting))}. Say which: --inside "
            f"{min(fitting)} (in Python, give that part alone)."
        )
    if inside is not None and inside not in fitting:
        raise ArgumentError(f"the checkpoint has no such model inside {inside!r}.")
    prefix = inside if inside is not None else "" if "" in fitting or not fitting else next(iter(fitting))
    beside = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
    chosen = {**beside, **fitting.get(prefix, {})}
    for name, each in chosen.items():
        if name in known.mean and (each.is_meta or each.element_size() < 2):
            what = "has no values there (meta)" if each.is_meta else f"is in {each.dtype}, which needs scales"
            raise ArgumentError(
                f"`{name}` of {where} {what}. Save them in bfloat16 or wider: model.bfloat16().state_dict()."
            )
    return chosen


def _named(found: object, where: str) -> dict[str, Tensor]:
    """The floating tensors by name."""
    if isinstance(found, (str, os.PathLike)):
        raise ArgumentError(
            f"a model or its named weights are needed, got the path {os.fspath(found)!r}: torch.load(path, "
            "weights_only=True) opens it, and `holdfast forecast MEMORY CHECKPOINT` takes paths."
        )
    for key in _AROUND:
        found = found[key] if isinstance(found, Mapping) and isinstance(found.get(key), Mapping) else found
    tensors = (
        {str(name): each for name, each in found.items() if _is_weight(each)} if isinstance(found, Mapping) else {}
    )
    if not tensors:
        kind = "" if isinstance(found, Mapping) else f", a {type(found).__name__},"
        raise ArgumentError(f"{where}{kind} holds no named weights: model.state_dict() has them.")
    return tensors


def _is_weight(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided


def _prefixes(weights: Mapping[str, Tensor], known: Posterior) -> set[str]:
    """What may stand before the names that a posterior has, by the first of them."""
    name = next(iter(known.mean))
    names = (name, *known.ties.get(name, ()))
    found = {key.removesuffix(each) for key in weights for each in names if key.endswith(each)}
    return {prefix for prefix in found if not prefix or prefix.endswith(".")}


def _fitting(weights: Mapping[str, Tensor], known: Posterior, prefix: str) -> dict[str, Tensor]:
    """What is there for each name of a posterior, in the same shape; nothing where that is not all of it."""
    found = {}
    for name, mean in known.mean.items():
        there = next((each for each in (name, *known.ties.get(name, ())) if prefix + each in weights), None)
        if there is None or weights[prefix + there].shape != mean.shape:
            return {}
        found[name] = weights[prefix + there]
    return found
