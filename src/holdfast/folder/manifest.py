"""What a folder says of itself: the description, the files with their checksums, and where each tensor's pieces are."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import ArgumentError, MemoryFileError
from ..file import Keys, canonical, checked, unsigned

NAME = "holdfast.json"
DATA = re.compile(r"data-[0-9a-f]{16}")
_FILE = re.compile(r"[0-9]{5,9}-[0-9]{1,9}\.safetensors")
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float8_e4m3fn",
        "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64",
    )
}  # fmt: skip

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the file it is in."""

    file: str
    start: Sizes
    shape: Sizes

    def key(self, tensor: str) -> str:
        """What it is called in its file."""
        return f"{tensor}@{','.join(map(str, self.start))}"


@dataclass(frozen=True)
class Spread:
    """A tensor, and the pieces that make it up."""

    dtype: torch.dtype
    shape: Sizes
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """All that a folder holds. `data` is the folder in it that has the files."""

    facts: dict[str, Any]
    data: str
    files: dict[str, str]  # SHA-256 by name
    tensors: dict[str, Spread]

    @property
    def text(self) -> str:
        """As it is written: one line of canonical JSON, which ends in its own checksum."""
        said = {
            "memory": unsigned(self.facts),
            "data": self.data,
            "files": self.files,
            "tensors": {
                name: {
                    "dtype": str(each.dtype).removeprefix("torch."),
                    "shape": each.shape,
                    "pieces": [[piece.file, piece.start, piece.shape] for piece in each.pieces],
                }
                for name, each in self.tensors.items()
            },
        }
        return canonical({**said, "sha256": _checksum(said)})


def parsed(path: str | os.PathLike[str], text: str | bytes, kinds: Mapping[str, Keys] | None) -> Manifest:
    """A manifest as it was written, if all that it says is possible."""
    try:
        said = dict(json.loads(text))
        mark = said.pop("sha256")
        signed = mark == _checksum(said)
        facts = said["memory"]
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise MemoryFileError(f"{path}: its manifest is not valid ({type(error).__name__}: {error}).") from error
    if not signed:
        raise MemoryFileError(f"{path} is damaged: {NAME} does not match its checksum. Use another copy.")
    if kinds is not None:
        facts = checked(path, kinds, lambda: {**facts, "sha256": mark})
    try:
        found = Manifest(facts, said["data"], dict(said["files"]), _tensors(said["tensors"]))
        _require_sound(found)
    except (ArgumentError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise MemoryFileError(f"{path}: its manifest is not valid ({type(error).__name__}: {error}).") from error
    return found


def _checksum(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(said).encode()).hexdigest()


def _tensors(said: Mapping[str, Mapping[str, Any]]) -> dict[str, Spread]:
    return {
        str(name): Spread(
            _DTYPES[each["dtype"]],
            _sizes(each["shape"]),
            tuple(Piece(file, _sizes(start), _sizes(shape)) for file, start, shape in each["pieces"]),
        )
        for name, each in said.items()
    }


def _sizes(said: Any) -> Sizes:
    if not isinstance(said, (list, tuple)) or not all(type(size) is int and 0 <= size < 2**63 for size in said):
        raise ArgumentError("a shape is a list of sizes.")
    return tuple(said)


def _require_sound(manifest: Manifest) -> None:
    """Raise where a manifest says what cannot be, or leads elsewhere than into its folder."""
    if not DATA.fullmatch(manifest.data):
        raise ArgumentError("its data is not in a folder of its own.")
    if not all(_FILE.fullmatch(name) and re.fullmatch(r"[0-9a-f]{64}", mark) for name, mark in manifest.files.items()):
        raise ArgumentError("its files have other names or marks than holdfast gives.")
    if {piece.file for each in manifest.tensors.values() for piece in each.pieces} != set(manifest.files):
        raise ArgumentError("its files are not those that its tensors are in.")
    for name, each in manifest.tensors.items():
        if not _tiled(each):
            raise ArgumentError(f"the pieces of `{name}` do not make it up.")


def _tiled(tensor: Spread) -> bool:
    """Whether every entry of a tensor is in one of its pieces, and in no two."""
    axes = len(tensor.shape)
    for piece in tensor.pieces:
        if not (len(piece.start) == len(piece.shape) == axes) or not all(piece.shape):
            return False
        if any(a + n > size for a, n, size in zip(piece.start, piece.shape, tensor.shape, strict=True)):
            return False
    if sum(prod(piece.shape) for piece in tensor.pieces) != prod(tensor.shape):
        return False
    ordered = sorted(tensor.pieces, key=lambda piece: piece.start)
    for place, piece in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if axes and other.start[0] >= piece.start[0] + piece.shape[0]:
                break  # and so do all that come after it
            if all(_meet(piece, other, axis) for axis in range(axes)):
                return False
    return True


def _meet(piece: Piece, other: Piece, axis: int) -> bool:
    return (
        piece.start[axis] < other.start[axis] + other.shape[axis]
        and other.start[axis] < piece.start[axis] + piece.shape[axis]
    )
