"""The memory file: a posterior, its buffers, its probes and its answers, each tensor under what it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import file
from .errors import ArgumentError
from .file import FORMAT, HEAD, MEMORY, canonical, unsigned
from .head import LinearHead
from .head.linear import KEYS as HEAD_KEYS
from .identity import digest
from .posterior import Memory, Posterior, as_posterior
from .precision.kinds import described, made
from .probes import Answers, made_probes

_KEYS: file.Keys = {
    "format": int, "precision": dict, "num_data": (int, float), "unit": str, "likelihood": list, "targets": list,
    "tasks": list, "parents": list, "id": str, "ties": dict, "model": str, "order": list, "sha256": str,
}  # fmt: skip


def save(memory: Posterior | Memory, path: str | os.PathLike[str]) -> None:
    """Write a memory to `path`: to a temporary file beside it first, which then takes its name."""
    if isinstance(memory, LinearHead):
        raise ArgumentError("a linear head is not a memory of a model's parameters: write it with head.save(path).")
    memory = memory if isinstance(memory, Memory) else Memory(as_posterior(memory))
    file.write(path, _facts(memory), _tensors(memory), _rebuilt)


def load(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Memory:
    """Read a memory, checking its form, its checksum and its values; nothing in it is executed."""
    return file.read(path, MEMORY, _KEYS, _rebuilt).to(device)


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a memory file, or a linear head's, says of itself, and the shapes of its tensors, without loading them."""
    return file.described(path, {MEMORY: _KEYS, HEAD: HEAD_KEYS})


def _facts(memory: Memory) -> dict[str, Any]:
    """What a file says of the memory it holds, all of it derived from the memory."""
    posterior = memory.posterior
    return {
        "format": FORMAT,
        "precision": described(posterior.precision),
        "num_data": posterior.num_data,
        "unit": posterior.unit,
        "likelihood": sorted({source.likelihood for source in posterior.sources}),
        "targets": sorted({source.targets for source in posterior.sources if source.targets}),
        "tasks": [str(source) for source in posterior.sources],
        "parents": list(posterior.parents),
        "id": posterior.id,
        "ties": {name: list(more) for name, more in posterior.ties.items()},
        "model": _model(posterior),
        "order": list(_tensors(memory)),
        **({} if memory.probes is None else {"probes": memory.probes.facts}),
        **({} if memory.answers is None else {"answers": memory.answers.facts}),
        **({"frozen": memory.frozen} if memory.frozen else {}),
    }


def _tensors(memory: Memory) -> dict[str, Tensor]:
    posterior = memory.posterior
    return {
        **{f"mean.{name}": value for name, value in posterior.mean.items()},
        **{f"precision.{name}": value for name, value in posterior.precision.tensors.items()},
        **{f"buffers.{name}": value for name, value in memory.buffers.items()},
        **{f"probes.{name}": value for name, value in (memory.probes.tensors if memory.probes else {}).items()},
        **{f"answers.{name}": value for name, value in (memory.answers.tensors if memory.answers else {}).items()},
    }


def _rebuilt(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Memory:
    """The memory that `facts` and `tensors` describe; the values check themselves as they are made."""
    rooms: dict[str, dict[str, Tensor]] = {"mean": {}, "precision": {}, "buffers": {}, "probes": {}, "answers": {}}
    if sorted(facts["order"]) != sorted(tensors):
        raise ArgumentError("its tensors are not those it names.")
    for key in facts["order"]:
        room, _, name = key.partition(".")
        if room not in rooms:
            raise ArgumentError(f"it has an unknown tensor `{key}`.")
        rooms[room][name] = tensors[key]
    precision = made(facts["precision"], rooms["precision"])
    if set(precision.tensors) != set(rooms["precision"]):
        raise ArgumentError("its tensors are not those of its precision.")
    ties = {str(name): tuple(str(other) for other in more) for name, more in facts["ties"].items()}
    posterior = Posterior(rooms["mean"], precision, ties, tuple(str(parent) for parent in facts["parents"]))
    probes = made_probes(facts["probes"], rooms["probes"]) if "probes" in facts else None
    answers = Answers.made(facts["answers"], rooms["answers"]) if "answers" in facts else None
    frozen = {str(name): str(mark) for name, mark in dict(facts.get("frozen", {})).items()}
    memory = Memory(posterior, rooms["buffers"], probes, answers, frozen)
    if canonical(_facts(memory)) != canonical(unsigned(facts)):
        raise ArgumentError("what it says of itself is not what it holds.")
    return memory


def _model(posterior: Posterior) -> str:
    """A fingerprint of the parameters' names and shapes."""
    return digest(json.dumps(sorted((name, list(value.shape)) for name, value in posterior.mean.items())))
