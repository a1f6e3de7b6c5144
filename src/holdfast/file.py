"""A file of tensors and one JSON string, in safetensors: written whole or not at all, opened without trust."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import HoldfastError, MemoryFileError

FORMAT = 1
MEMORY, HEAD = "memory", "linear head"
_OPENED_BY = {MEMORY: "holdfast.load", HEAD: "holdfast.LinearHead.load"}
_KEY = "holdfast"
_MANY = 2**26  # bytes

Facts = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Keys = Mapping[str, type | tuple[type, ...]]  # what a description says, and in which types
Value = TypeVar("Value")
Taken = TypeVar("Taken")


def write(
    path: str | os.PathLike[str], facts: Facts, tensors: Tensors, rebuilt: Callable[[Facts, Tensors], object]
) -> None:
    """Write a description and its tensors: to a temporary file beside `path` first, which then takes its name."""
    alone = apart(tensors)
    rebuilt(facts, alone)  # what could not be read again is not written
    description = canonical({**facts, "sha256": _checksum(facts, alone)})
    target = Path(path)
    # The file takes its name: of a device, /dev/null say, nothing would be left.
    if not target.name or "\0" in str(target) or (os.path.exists(target) and not os.path.isfile(target)):
        raise MemoryFileError(f"{str(path)!r} is not a file to write to. Give a name such as memory.safetensors.")
    try:
        with replacing(target) as temporary:
            put(temporary, alone, {_KEY: description})
    except (OSError, SafetensorError) as error:
        raise MemoryFileError(f"{target} could not be written: {error}.") from error


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new name beside `target` to write to. What is there at the end takes its place, down to the disk.

    No reader ever sees half of it, and nothing is left of it if something fails.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(f"its folder {target.parent} does not exist, make it first")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        synced(temporary)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some file systems cannot; the file is in place all the same
        synced(target.parent)


def put(path: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write tensors to a new file, down to the disk."""
    # Created here, so that the umask decides who may read it.
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mode = path.stat().st_mode
    save_file(dict(tensors), path, dict(metadata))  # which may put a file of its own there
    path.chmod(mode)
    synced(path)


def read(path: str | os.PathLike[str], kind: str, keys: Keys, rebuilt: Callable[[Facts, Tensors], Value]) -> Value:
    """What a file of this kind holds, its form, its checksum and its values checked; nothing in it is executed."""
    # Copied: a mapping would change with the file, after it was checked.
    facts, tensors = _opened(path, {kind: keys}, lambda file, name: file.get_tensor(name).clone())
    with believed(path, kind):
        signed = _checksum(facts, tensors) == facts["sha256"]
        value = rebuilt(facts, tensors) if signed else None
    if value is None:
        raise MemoryFileError(f"{path} is damaged: its contents do not match their checksum. Use another copy.")
    return value


@contextlib.contextmanager
def believed(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Where values are made of what a file says: whatever goes wrong there, the file is not what it should be."""
    try:
        yield
    except (HoldfastError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise MemoryFileError(f"{path} is not a valid {kind}: {type(error).__name__}: {error}") from error


def described(path: str | os.PathLike[str], kinds: Mapping[str, Keys]) -> dict[str, Any]:
    """What a file of one of these kinds says of itself, and the shapes of its tensors, without loading them."""
    facts, shapes = _opened(path, kinds, lambda file, name: list(file.get_slice(name).get_shape()))
    return {**facts, "shapes": shapes}


def unsigned(facts: Facts) -> dict[str, Any]:
    """A description without the checksum, which is over it."""
    return {key: value for key, value in facts.items() if key != "sha256"}


def canonical(facts: Facts) -> str:
    """The one metadata entry: the same contents give the same bytes."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _opened(
    path: str | os.PathLike[str], kinds: Mapping[str, Keys], take: Callable[[Any, str], Taken]
) -> tuple[dict[str, Any], dict[str, Taken]]:
    """The description, and what `take` takes of each tensor."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise MemoryFileError(f"{path} cannot be read: it is no regular file.")  # a pipe is waited for without end
        with open(path, "rb") as start:
            magic = start.read(9)
        # A safetensors file starts with its header's length, in eight bytes that can be anything, and then "{".
        if magic[8:] != b"{" and (magic[:2] == b"PK" or magic[:1] == b"\x80"):
            raise MemoryFileError(
                f"{path} is a pickle or a zip archive (torch.save?). Memories and heads are safetensors files, written "
                "by holdfast; pickles can run code and are never opened."
            )
        with safe_open(path, framework="pt", device="cpu") as file:
            facts = _read_facts(path, kinds, file.metadata() or {})
            return facts, {name: take(file, name) for name in file.keys()}  # noqa: SIM118
    except MemoryFileError:
        raise
    except SafetensorError as error:
        raise MemoryFileError(f"{path} cannot be read: {error}. It may be damaged, or not a memory at all.") from error
    except (OSError, ValueError) as error:
        raise MemoryFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _read_facts(path: str | os.PathLike[str], kinds: Mapping[str, Keys], metadata: Mapping[str, str]) -> dict[str, Any]:
    if _KEY not in metadata:
        raise MemoryFileError(f"{path} is a safetensors file, but not a holdfast memory: it has no '{_KEY}' entry.")
    return checked(path, kinds, lambda: dict(json.loads(metadata[_KEY])))


def checked(
    path: str | os.PathLike[str], kinds: Mapping[str, Keys], said: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What `said` gives, if it is the description of one of these kinds."""
    try:
        facts = said()
        version = int(facts["format"])
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise MemoryFileError(f"{path}: its description is not valid ({type(error).__name__}: {error}).") from error
    if version > FORMAT:
        raise MemoryFileError(
            f"{path} has format {version}; this holdfast reads up to {FORMAT}. Update holdfast to read it."
        )
    kind = facts.get("kind", MEMORY)  # a memory does not say what it is: it was the first
    if not isinstance(kind, str) or kind not in kinds:
        reader = _OPENED_BY.get(kind) if isinstance(kind, str) else None
        way = f"Open it with {reader}(path)." if reader else "This holdfast does not know such files; a newer one may."
        raise MemoryFileError(f"{path} holds a {str(kind)[:40]}, not a {' or a '.join(kinds)}. {way}")
    wrong = sorted(key for key, type_ in kinds[kind].items() if not isinstance(facts.get(key), type_))
    if wrong:
        raise MemoryFileError(f"{path}: its description is not valid (see {', '.join(wrong)}).")
    return facts


def _checksum(facts: Facts, tensors: Tensors) -> str:
    """SHA-256 over the description and every tensor's own: safetensors does not notice a flipped bit."""
    total = hashlib.sha256(canonical(unsigned(facts)).encode())
    names = sorted(tensors)
    for name, values in zip(names, _digests([tensors[name] for name in names]), strict=True):
        total.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)} {values}\n".encode())
    return total.hexdigest()


def _digests(tensors: Sequence[Tensor]) -> list[str]:
    """The SHA-256 of each; of many bytes by several threads, which hashing lets run."""
    if sum(tensor.nbytes for tensor in tensors) > _MANY:
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(_digest, tensors))
    return [_digest(tensor) for tensor in tensors]  # and at the interpreter's end, when there are no threads any more


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(_memory(tensor)).hexdigest()


def apart(tensors: Tensors) -> dict[str, Tensor]:
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


def synced(path: Path) -> None:
    """Have what was written reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
