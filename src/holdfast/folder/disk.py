"""The folder on the disk: what is put there, what is cleared away, and whether it is what its manifest says."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import MemoryFileError
from ..file import Keys, replacing
from .manifest import DATA, NAME, Manifest, parsed

_LONGEST = 1 << 28  # of a manifest, in bytes: a million pieces take half of it
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
TURNS = 10  # to find a memory whole that others replace meanwhile


def new_data() -> str:
    """A name that no data had before."""
    return f"data-{secrets.token_hex(8)}"


def put(path: Path, manifest: Manifest) -> None:
    """Let the manifest take the place of the one before; from here on, the folder is this memory."""
    parsed(path, manifest.text, None)  # what could not be read again is not written
    with replacing(path / NAME) as temporary, open(temporary, "x", encoding="utf-8") as file:
        file.write(manifest.text)


def cleared(path: Path, keep: str, began: int) -> None:
    """Remove the data of memories that were here before, and what interrupted saves left; nothing else.

    One job saves to a folder at a time. Should there be another, what the manifest names by now is left, and what was
    changed since this save `began`, in nanoseconds on the disk's own clock.
    """
    for entry in os.scandir(path):
        with contextlib.suppress(OSError):
            if entry.name == keep or entry.stat(follow_symlinks=False).st_mtime_ns >= began:
                continue
            if DATA.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and not names(path, entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def names(path: Path, data: str) -> bool:
    """Whether the manifest may name this data: where it cannot be told, it may."""
    try:
        return data in (path / NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def require_free(path: Path) -> None:
    """Raise where a memory in pieces cannot be written."""
    if not path.name or "\0" in str(path):
        raise MemoryFileError(f"{str(path)!r} is not a folder to write to. Give a name such as memory.")
    if not path.exists():
        return
    if not path.is_dir():
        raise MemoryFileError(
            f"{path} is a file, and a memory in pieces (DTensors) is written as a folder. Give another name."
        )
    others = [entry for entry in os.listdir(path) if not (DATA.fullmatch(entry) or _TEMPORARY.fullmatch(entry))]
    if others and NAME not in others:
        raise MemoryFileError(
            f"{path} is a folder with other things in it ({sorted(others)[0]}). Give the memory a folder of its own."
        )


def opened(path: str | os.PathLike[str], kinds: Mapping[str, Keys] | None) -> Manifest:
    """The manifest of a folder, its form and its checksum checked, and where `kinds` are given its description."""
    where = Path(path) / NAME
    try:
        with open(where, "rb") as file:
            text = file.read(_LONGEST + 1)
    except FileNotFoundError as error:
        raise MemoryFileError(
            f"{path} cannot be read: it is a folder without {NAME}, so that it is no memory, or one whose saving was "
            "never finished. Save it again, or use another copy."
        ) from error
    except OSError as error:
        raise MemoryFileError(f"{where} cannot be read: {error.strerror or error}.") from error
    if len(text) > _LONGEST:
        raise MemoryFileError(f"{where} is longer than any manifest. Use another copy.")
    return parsed(path, text, kinds)


def require_whole(path: Path) -> None:
    """Raise unless a manifest and the files that it names are there, whoever put them."""
    for turn in range(TURNS):
        said = opened(path, None)
        try:
            return require_data(path, said, ())
        except MemoryFileError:
            if turn == TURNS - 1 or names(path, said.data):
                raise


def require_data(path: str | os.PathLike[str], manifest: Manifest, files: Iterable[str]) -> None:
    """Raise unless the data is what the manifest says: no file more or less, and these files bit for bit."""
    folder = Path(path) / manifest.data
    try:
        there = set(os.listdir(folder))
    except OSError:
        there = set()
    missing, extra = sorted(set(manifest.files) - there), sorted(there - set(manifest.files))
    if missing:
        raise MemoryFileError(
            f"{path} lacks {missing[0]} ({len(missing)} of {len(manifest.files)} files in {manifest.data}): it was not "
            "copied whole, or is being written. Copy it again, or use another copy."
        )
    if extra:
        raise MemoryFileError(
            f"{path} has {extra[0]} in {manifest.data}, which is no part of the memory: it may be of an older one, or "
            "of another. Remove it, or use another copy."
        )
    for name in files:
        _require_file(path, folder / name, manifest)


def _require_file(path: str | os.PathLike[str], file: Path, manifest: Manifest) -> None:
    try:
        with open(file, "rb") as whole:
            same = hashlib.file_digest(whole, "sha256").hexdigest() == manifest.files[file.name]
        if not same:
            raise MemoryFileError(
                f"{path} is damaged: {file.name} does not match its checksum, or is another memory's. Use another copy."
            )
        with safe_open(file, framework="pt", device="cpu") as content:
            there = {name: list(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    except MemoryFileError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise MemoryFileError(f"{file} cannot be read: {error}. Use another copy.") from error
    said = {
        piece.key(name): list(piece.shape)
        for name, each in manifest.tensors.items()
        for piece in each.pieces
        if piece.file == file.name
    }
    if there != said:
        raise MemoryFileError(f"{path}: {file.name} does not hold what the manifest says. Use another copy.")
