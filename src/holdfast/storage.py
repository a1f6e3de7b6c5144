"""The memory file: tensors and one JSON string in safetensors, written whole or not at all, opened without trust."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import HoldfastError, MemoryFileError
from .params import digest
from .posterior import Memory, Posterior
from .precision import Dense, Diagonal, Precision, Source, Sum

FORMAT = 1
_KEY = "holdfast"


def save(memory: Posterior | Memory, path: str | os.PathLike[str]) -> None:
    """Write a memory to `path`: to a temporary file beside it first, which then takes its name."""
    memory = memory if isinstance(memory, Memory) else Memory(memory)
    tensors = {name: _apart(tensor) for name, tensor in _tensors(memory).items()}
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        # Created here, so that the umask decides who may read it.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            save_file(tensors, temporary, {_KEY: _described(memory, tensors)})
            _sync(temporary)
            os.replace(temporary, target)
            _sync(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, SafetensorError) as error:
        raise MemoryFileError(f"{target} could not be written: {error}. What was there before is unchanged.") from error


def load(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Memory:
    """Read a memory, checking its form, its checksum and its values; nothing in it is executed."""
    facts, _ = _opened(path)
    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _checksum(facts, tensors) != facts.get("sha256"):
        raise MemoryFileError(f"{path} is damaged: its contents do not match their checksum. Use another copy.")
    try:
        memory = _rebuilt(facts, tensors)
    except (HoldfastError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise MemoryFileError(f"{path} is not a valid memory: {error}") from error
    posterior = memory.posterior.to(device)
    return Memory(posterior, {name: buffer.to(device) for name, buffer in memory.buffers.items()})


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a memory file says of itself, and the shapes of its tensors, without loading them."""
    facts, shapes = _opened(path)
    return {**facts, "shapes": shapes}


def _opened(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The description and the tensors' shapes, from the header alone."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
        if start[:2] == b"PK" or start[:1] == b"\x80":
            raise MemoryFileError(
                f"{path} is a pickle or a zip archive (torch.save?). Memories are safetensors files, written by "
                "holdfast.save; pickles can run code and are never opened."
            )
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        if isinstance(error, MemoryFileError):
            raise
        raise MemoryFileError(f"{path} cannot be read: {error}. It may be damaged, or not a memory at all.") from error
    if _KEY not in metadata:
        raise MemoryFileError(f"{path} is a safetensors file, but not a holdfast memory: it has no '{_KEY}' entry.")
    try:
        facts = json.loads(metadata[_KEY])
        version = int(facts["format"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MemoryFileError(f"{path}: its description is not valid ({error}).") from error
    if version > FORMAT:
        raise MemoryFileError(
            f"{path} has format {version}; this holdfast reads up to {FORMAT}. Update it: pip install -U holdfast."
        )
    return facts, shapes


def _described(memory: Memory, tensors: Mapping[str, Tensor]) -> str:
    """The one metadata entry, as canonical JSON: the same memory gives the same bytes."""
    posterior = memory.posterior
    model = sorted((name, list(value.shape)) for name, value in posterior.mean.items())
    facts = {
        "format": FORMAT,
        "structure": posterior.precision.structure(),
        "num_data": posterior.num_data,
        "unit": posterior.unit,
        "likelihood": sorted({source.likelihood for source in posterior.sources}),
        "targets": sorted({source.targets for source in posterior.sources if source.targets}),
        "tasks": [{k: v for k, v in asdict(source).items() if k != "weights"} for source in posterior.sources],
        "parents": list(posterior.parents),
        "id": posterior.id,
        "ties": {name: list(more) for name, more in posterior.ties.items()},
        "model": digest(json.dumps(model)),
    }
    return _canonical({**facts, "sha256": _checksum(facts, tensors)})


def _tensors(memory: Memory) -> dict[str, Tensor]:
    posterior = memory.posterior
    return {
        **{f"mean.{name}": value for name, value in posterior.mean.items()},
        **{f"precision.{name}": value for name, value in posterior.precision.tensors.items()},
        **{f"buffers.{name}": value for name, value in memory.buffers.items()},
    }


def _rebuilt(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Memory:
    """The memory that `facts` and `tensors` describe; the values check themselves as they are made."""
    sources = tuple(
        Source(str(t["id"]), float(t["num_data"]), str(t["unit"]), str(t["likelihood"]), str(t["targets"]))
        for t in facts["tasks"]
    )
    rooms: dict[str, dict[str, Tensor]] = {"mean": {}, "precision": {}, "buffers": {}}
    for key, tensor in tensors.items():
        room, _, name = key.partition(".")
        if room not in rooms:
            raise ValueError(f"it has an unknown tensor `{key}`")
        rooms[room][name] = tensor
    precision = _structured(facts["structure"], rooms["precision"]).attributed(sources)
    ties = {str(name): tuple(str(other) for other in more) for name, more in facts["ties"].items()}
    posterior = Posterior(rooms["mean"], precision, ties, tuple(str(parent) for parent in facts["parents"]))
    if any(not source.num_data >= 0 for source in sources):
        raise ValueError("it counts a negative amount of data")
    return Memory(posterior, rooms["buffers"])


def _structured(structure: Mapping[str, Any], tensors: dict[str, Tensor]) -> Precision:
    kind = structure["kind"]
    if kind == "diagonal":
        return Diagonal(tensors)
    if kind == "dense":
        if set(tensors) != {"matrix"}:
            raise ValueError("a dense precision has one matrix")
        return Dense({str(name): torch.Size(shape) for name, shape in structure["shapes"]}, tensors["matrix"])
    if kind == "sum":
        terms = []
        for index, inner in enumerate(structure["terms"]):
            mark = f"{index}."
            mine = {key.removeprefix(mark): value for key, value in tensors.items() if key.startswith(mark)}
            terms.append(_structured(inner, mine))
        return Sum(tuple(terms), ())
    raise ValueError(f"its precision has an unknown structure, {kind!r}")


def _canonical(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the description, names, shapes, dtypes and bytes: safetensors does not notice a flipped bit."""
    total = hashlib.sha256(_canonical({key: value for key, value in facts.items() if key != "sha256"}).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {_dtype(tensor)} {list(tensor.shape)}\n".encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def _apart(tensor: Tensor) -> Tensor:
    """On the CPU, in memory that is this tensor's alone."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
