"""The memory file, or folder: a posterior, its buffers, its probes and its answers, each tensor under what it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import file, folder
from .errors import ArgumentError, HoldfastError
from .file import FORMAT, HEAD, MEMORY, believed, canonical, unsigned
from .head import LinearHead
from .head.linear import KEYS as HEAD_KEYS
from .identity import digest
from .params import all_parameters, matched, shapes
from .pieces import cut, in_pieces, resharded
from .posterior import Memory, Posterior, as_posterior
from .precision.kinds import described, made
from .probes import Answers, made_probes
from .ranks import Ranks, everyone

_KEYS: file.Keys = {
    "format": int, "precision": dict, "num_data": (int, float), "unit": str, "likelihood": list, "targets": list,
    "tasks": list, "parents": list, "id": str, "ties": dict, "model": str, "order": list, "sha256": str,
}  # fmt: skip


def save(memory: Posterior | Memory, path: str | os.PathLike[str]) -> None:
    """Write a memory to `path`: to a temporary file beside it first, which then takes its name.

    A memory in pieces (DTensors) becomes a folder: call it on all processes. Each writes the pieces it has, and the
    folder is this memory, whole, from when all are done; until then it is the one that was there before. One job saves
    to a folder at a time.
    """
    if isinstance(memory, LinearHead):
        raise ArgumentError("a linear head is not a memory of a model's parameters: write it with head.save(path).")
    memory = memory if isinstance(memory, Memory) else Memory(as_posterior(memory))
    tensors = _tensors(memory)
    if any(map(in_pieces, tensors.values())):
        folder.write(path, canonical(_said(memory)), lambda: _facts(memory), tensors, _rebuilt_but_for_id)
    else:
        file.write(path, _facts(memory), tensors, _rebuilt_but_for_id)


@torch.inference_mode(False)  # what is loaded within it must still go into a graph
def load(
    path: str | os.PathLike[str], model: nn.Module | None = None, *, device: str | torch.device | None = None
) -> Memory:
    """Read a memory, file or folder, checking its form, its checksums and its values; nothing in it is executed.

    It comes whole, on the CPU or on `device`. With a `model` it comes as the model's parameters are: on their device,
    and in pieces where they are in pieces (call it then on all processes). Of a folder each process reads the pieces
    that it has, however many processes wrote it.
    """
    if model is not None and device is not None:
        raise ArgumentError("a model says where its memory goes: give the model, or a device, and not both.")
    if model is not None:
        return _loaded_as(path, model)
    if os.path.isdir(path):
        return folder.read(path, MEMORY, _KEYS, _rebuilt, device=device or "cpu")
    return file.read(path, MEMORY, _KEYS, _rebuilt).to(device or "cpu")


def _loaded_as(path: str | os.PathLike[str], model: nn.Module) -> Memory:
    """A memory as a model's parameters are."""
    device = next(iter(all_parameters(model).values()), torch.empty(0)).device
    if device.type == "meta":
        raise ArgumentError("the model has no weights yet (its device is meta): call model.to_empty(device=...) first.")
    resharded(model)
    ranks = everyone() if any(map(in_pieces, model.parameters())) else Ranks()

    def like(facts: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        with believed(path, MEMORY):
            ties = {str(name): tuple(map(str, more)) for name, more in facts["ties"].items()}
            diagonals = _diagonals(facts["precision"], "precision.")
        mean = {key.removeprefix("mean."): shape for key, shape in shapes.items() if key.startswith("mean.")}
        try:
            params = {name: p for name, p in matched(model, mean, ties=ties).items() if in_pieces(p)}
        except HoldfastError as error:
            raise type(error)(f"{error} Without model=, the memory is loaded whole.") from error
        keys = {f"{start}{name}{end}": name for start, end in (("mean.", ""), *diagonals) for name in params}
        return {key: params[name] for key, name in keys.items() if key in shapes and shapes[key] == params[name].shape}

    is_folder, differ = lambda: os.path.isdir(path), f"{path} cannot be read: it is not the same file or folder"
    if folder.everywhere(ranks, is_folder, lambda is_folder: is_folder, differ):
        return folder.read(path, MEMORY, _KEYS, _rebuilt, like, device=device, ranks=ranks)

    def found() -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
        memory = file.read(path, MEMORY, _KEYS, _rebuilt)
        facts, tensors = _facts(memory), _tensors(memory)
        return facts, tensors, like(facts, shapes(tensors))

    facts, tensors, models = folder.everywhere(ranks, found, lambda found: found[0]["id"], f"{path} differs")
    return _made(facts, {
        key: cut(tensor.to(device), models[key]) if key in models else tensor.to(device)
        for key, tensor in tensors.items()
    })  # fmt: skip


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a memory, or a linear head's file, says of itself, and the shapes of its tensors, without loading them."""
    describe = folder.described if os.path.isdir(path) else file.described
    return describe(path, {MEMORY: _KEYS, HEAD: HEAD_KEYS})


def _facts(memory: Memory) -> dict[str, Any]:
    """What a file says of the memory it holds, all of it derived from the memory."""
    return {**_said(memory), "id": memory.posterior.id}


def _said(memory: Memory) -> dict[str, Any]:
    """The same but for the identity, which takes all the tensors' values."""
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
        "ties": {name: list(more) for name, more in posterior.ties.items()},
        "model": _model(posterior),
        "order": list(_tensors(memory)),
        **({} if memory.probes is None else {"probes": memory.probes.facts}),
        **({} if memory.answers is None else {"answers": memory.answers.facts}),
        **({"frozen": memory.frozen} if memory.frozen else {}),
    }


def _tensors(memory: Memory) -> dict[str, Tensor]:
    return {
        **memory.posterior.tensors,
        **{f"buffers.{name}": value for name, value in memory.buffers.items()},
        **{f"probes.{name}": value for name, value in (memory.probes.tensors if memory.probes else {}).items()},
        **{f"answers.{name}": value for name, value in (memory.answers.tensors if memory.answers else {}).items()},
    }


def _rebuilt(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Memory:
    """The memory that `facts` and `tensors` describe, if it says of itself what they do."""
    memory = _rebuilt_but_for_id(facts, tensors)
    if memory.posterior.id != facts["id"]:
        raise ArgumentError(
            "what it says of itself is not what it holds: its identity is another. It was changed, or written by an "
            "older holdfast; then make it anew."
        )
    return memory


def _rebuilt_but_for_id(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Memory:
    """The same without a look at all its values once more."""
    memory = _made(facts, tensors)
    if canonical({**_said(memory), "id": facts["id"]}) != canonical(unsigned(facts)):
        raise ArgumentError("what it says of itself is not what it holds.")
    return memory


def _made(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Memory:
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
    return Memory(posterior, rooms["buffers"], probes, answers, frozen)


def _diagonals(said: Mapping[str, Any], room: str) -> list[tuple[str, str]]:
    """How the names of tensors with a number, or a code, for each entry of a parameter start and end around its own."""
    if said["kind"] in ("diagonal", "logarithmic"):
        return [(room, "" if said["kind"] == "diagonal" else ".code")]
    terms = said["terms"] if said["kind"] == "sum" else ()
    return [each for place, term in enumerate(terms) for each in _diagonals(term, f"{room}{place}.")]


def _model(posterior: Posterior) -> str:
    """A fingerprint of the parameters' names and shapes."""
    return digest(json.dumps(sorted((name, list(value.shape)) for name, value in posterior.mean.items())))
