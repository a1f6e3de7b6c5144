"""The memory file: tensors and one JSON string in safetensors, written whole or not at all, opened without trust."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import ArgumentError, HoldfastError, MemoryFileError
from .identity import digest
from .posterior import Memory, Posterior, as_posterior
from .precision.kinds import described, made

FORMAT = 1
_KEY = "holdfast"
_KEYS: dict[str, type | tuple[type, ...]] = {
    "format": int, "precision": dict, "num_data": (int, float), "unit": str, "likelihood": list, "targets": list,
    "tasks": list, "parents": list, "id": str, "ties": dict, "model": str, "order": list, "sha256": str,
}  # fmt: skip

Taken = TypeVar("Taken")


def save(memory: Posterior | Memory, path: str | os.PathLike[str]) -> None:
    """Write a memory to `path`: to a temporary file beside it first, which then takes its name."""
    memory = memory if isinstance(memory, Memory) else Memory(as_posterior(memory))
    tensors = _apart(_tensors(memory))
    facts = _facts(memory)
    _rebuilt(facts, tensors)  # what could not be read again is not written
    description = _canonical({**facts, "sha256": _checksum(facts, tensors)})
    target = Path(path)
    if not target.name or "\0" in str(target) or os.path.isdir(target):
        raise MemoryFileError(f"{str(path)!r} is not a file to write to. Give a name such as memory.safetensors.")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        # Created here, so that the umask decides who may read it.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        save_file(tensors, temporary, {_KEY: description})  # which may put a file of its own there
        temporary.chmod(mode)
        _sync(temporary)
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        raise MemoryFileError(f"{target} could not be written: {error}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some file systems cannot; the file is in place all the same
        _sync(target.parent)


def load(path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Memory:
    """Read a memory, checking its form, its checksum and its values; nothing in it is executed."""
    # Copied: a mapping would change with the file, after it was checked.
    facts, tensors = _opened(path, lambda file, name: file.get_tensor(name).clone())
    try:
        signed = _checksum(facts, tensors) == facts["sha256"]
        memory = _rebuilt(facts, tensors) if signed else None
    except (HoldfastError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise MemoryFileError(f"{path} is not a valid memory: {type(error).__name__}: {error}") from error
    if memory is None:
        raise MemoryFileError(f"{path} is damaged: its contents do not match their checksum. Use another copy.")
    return memory.to(device)


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a memory file says of itself, and the shapes of its tensors, without loading them."""
    facts, shapes = _opened(path, lambda file, name: list(file.get_slice(name).get_shape()))
    return {**facts, "shapes": shapes}


def _opened(path: str | os.PathLike[str], take: Callable[[Any, str], Taken]) -> tuple[dict[str, Any], dict[str, Taken]]:
    """The description, and what `take` takes of each tensor."""
    try:
        with open(path, "rb") as start:
            magic = start.read(9)
        # A safetensors file starts with its header's length, in eight bytes that can be anything, and then "{".
        if magic[8:] != b"{" and (magic[:2] == b"PK" or magic[:1] == b"\x80"):
            raise MemoryFileError(
                f"{path} is a pickle or a zip archive (torch.save?). Memories are safetensors files, written by "
                "holdfast.save; pickles can run code and are never opened."
            )
        with safe_open(path, framework="pt", device="cpu") as file:
            facts = _read_facts(path, file.metadata() or {})
            return facts, {name: take(file, name) for name in file.keys()}  # noqa: SIM118
    except MemoryFileError:
        raise
    except SafetensorError as error:
        raise MemoryFileError(f"{path} cannot be read: {error}. It may be damaged, or not a memory at all.") from error
    except (OSError, ValueError) as error:
        raise MemoryFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _read_facts(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, Any]:
    if _KEY not in metadata:
        raise MemoryFileError(f"{path} is a safetensors file, but not a holdfast memory: it has no '{_KEY}' entry.")
    try:
        facts = dict(json.loads(metadata[_KEY]))
        version = int(facts["format"])
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise MemoryFileError(f"{path}: its description is not valid ({type(error).__name__}: {error}).") from error
    if version > FORMAT:
        raise MemoryFileError(
            f"{path} has format {version}; this holdfast reads up to {FORMAT}. Update holdfast to read it."
        )
    wrong = sorted(key for key, kind in _KEYS.items() if not isinstance(facts.get(key), kind))
    if wrong:
        raise MemoryFileError(f"{path}: its description is not valid (see {', '.join(wrong)}).")
    return facts


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
    }


def _tensors(memory: Memory) -> dict[str, Tensor]:
    posterior = memory.posterior
    return {
        **{f"mean.{name}": value for name, value in posterior.mean.items()},
        **{f"precision.{name}": value for name, value in posterior.precision.tensors.items()},
        **{f"buffers.{name}": value for name, value in memory.buffers.items()},
    }


def _rebuilt(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Memory:
    """The memory that `facts` and `tensors` describe; the values check themselves as they are made."""
    rooms: dict[str, dict[str, Tensor]] = {"mean": {}, "precision": {}, "buffers": {}}
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
    memory = Memory(posterior, rooms["buffers"])
    if _canonical(_facts(memory)) != _canonical(_unsigned(facts)):
        raise ArgumentError("what it says of itself is not what it holds.")
    return memory


def _model(posterior: Posterior) -> str:
    """A fingerprint of the parameters' names and shapes."""
    return digest(json.dumps(sorted((name, list(value.shape)) for name, value in posterior.mean.items())))


def _unsigned(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key != "sha256"}


def _canonical(facts: Mapping[str, Any]) -> str:
    """The one metadata entry: the same memory gives the same bytes."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the description and every tensor's own: safetensors does not notice a flipped bit."""
    total = hashlib.sha256(_canonical(_unsigned(facts)).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        values = hashlib.sha256(_memory(tensor)).hexdigest()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)} {values}\n".encode())
    return total.hexdigest()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, each in memory that is its alone."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in taken:
            tensor = tensor.clone()
        taken.add(tensor.data_ptr())
        found[name] = tensor
    return found


def _memory(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """A tensor's bytes where they are, without a copy."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else (ctypes.c_char * 0)()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
