"""Writing and reading a folder, on all processes of a memory in pieces or in one alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..errors import HoldfastError, MemoryFileError, MismatchError
from ..file import Facts, Keys, Tensors, believed
from ..identity import digest, fingerprints
from ..params import some
from ..pieces import settled
from ..ranks import Ranks, everyone
from . import disk
from .manifest import Manifest

Value = TypeVar("Value")
Shapes = Mapping[str, torch.Size]


class _Stopped(MemoryFileError):
    """A process cannot be reached."""


def write(
    path: str | os.PathLike[str],
    said: str,
    facts: Callable[[], Facts],
    tensors: Tensors,
    rebuilt: Callable[[Facts, Tensors], object],
) -> None:
    """Write a description and its tensors, on all processes at once: the folder is this memory when all are done.

    `said` is as much of the description as a process can tell by itself, and `facts` gives the whole of it.
    """
    from .checkpoint import save

    try:
        _require_one(said, tensors)
        known = facts()
        whole = {name: settled(tensor.detach()) for name, tensor in tensors.items()}
        rebuilt(known, whole)  # what could not be read again is not written
        save(Path(path), known, whole)
    except HoldfastError:
        raise
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise MemoryFileError(
            f"{path} was not written: a process stopped on the way, or cannot be reached ({reason}). A memory that was "
            "there before loads as before. Start all processes again, and save."
        ) from error


def _require_one(said: str, tensors: Tensors) -> None:
    """Raise unless all processes have one memory: what it says, what is in its tensors, and how they are cut."""
    cuts: dict[str, Any] = dict(tensors)
    ways = {name: str(getattr(each, "placements", "whole")) for name, each in cuts.items()}
    marks = {name: f"{mark} {ways[name]}" for name, mark in fingerprints(tensors).items()}
    every = everyone().gathered({**marks, "what it says of itself": said})
    for rank, other in enumerate(every):
        differ = sorted(name for name in {**every[0], **other} if every[0].get(name) != other.get(name))
        if differ:
            raise MismatchError(
                f"the processes have different memories: rank {rank} differs from rank 0 in {some(differ)}. Load one "
                "memory on all of them, or learn it on all of them from the same numbers."
            )


def read(
    path: str | os.PathLike[str],
    kind: str,
    keys: Keys,
    rebuilt: Callable[[Facts, Tensors], Value],
    like: Callable[[Facts, Shapes], Mapping[str, Tensor]] = lambda facts, shapes: {},
    *,
    device: torch.device | str = "cpu",
    ranks: Ranks | None = None,
) -> Value:
    """What a folder holds, its form, its checksums and its values checked; nothing in it is executed.

    `like` has tensors to cut others as, by name. With `ranks`, all of them read: each checks a part of the files, and
    reads the pieces it has.
    """
    ranks = ranks or Ranks()
    facts, tensors = _whole(path, {kind: keys}, like, device, ranks)
    with believed(path, kind):
        return rebuilt(facts, tensors)


def _whole(
    path: str | os.PathLike[str],
    kinds: Mapping[str, Keys],
    like: Callable[[Facts, Shapes], Mapping[str, Tensor]],
    device: torch.device | str,
    ranks: Ranks,
) -> tuple[Facts, dict[str, Tensor]]:
    """One memory's description and tensors. Should another take its place meanwhile, it is read in its stead."""
    for _ in range(disk.TURNS - 1):
        opened: list[str] = []  # which data the manifest named
        try:
            return _once(path, kinds, like, device, ranks, opened)
        except _Stopped:
            raise
        except Exception:
            replaced = any(not disk.names(Path(path), data) for data in opened)
            if not any(ranks.gathered(replaced)):
                raise
    return _once(path, kinds, like, device, ranks, [])


def _once(
    path: str | os.PathLike[str],
    kinds: Mapping[str, Keys],
    like: Callable[[Facts, Shapes], Mapping[str, Tensor]],
    device: torch.device | str,
    ranks: Ranks,
    opened: list[str],
) -> tuple[Facts, dict[str, Tensor]]:
    def found() -> tuple[Manifest, Mapping[str, Tensor]]:
        said = disk.opened(path, kinds)
        opened.append(said.data)
        return said, like(said.facts, {name: torch.Size(each.shape) for name, each in said.tensors.items()})

    said, models = everywhere(ranks, found, lambda found: digest(found[0].text), f"{path} is not the same folder")
    files = sorted(said.files)[ranks.place :: ranks.count]
    everywhere(ranks, lambda: disk.require_data(path, said, files))

    def filled() -> dict[str, Tensor]:
        from .checkpoint import fill_

        tensors: dict[str, Tensor] = {}
        try:
            for name, each in said.tensors.items():
                model = models.get(name)
                if model is None:
                    tensors[name] = torch.empty(each.shape, dtype=each.dtype, device=device)
                else:
                    tensors[name] = torch.empty_like(model.detach(), dtype=each.dtype)
            fill_(tensors, path, said)
        except (OSError, RuntimeError, ValueError) as error:
            raise MemoryFileError(f"{path} cannot be read: {error}. Is it being written? Load it again.") from error
        return tensors

    return said.facts, everywhere(ranks, filled)


def described(path: str | os.PathLike[str], kinds: Mapping[str, Keys]) -> dict[str, Any]:
    """What a folder says of itself, and the shapes of its tensors, without loading them."""
    said = disk.opened(path, kinds)
    return {**said.facts, "shapes": {name: list(each.shape) for name, each in said.tensors.items()}}


def everywhere(
    ranks: Ranks, work: Callable[[], Value], mark: Callable[[Value], object] = lambda _: None, differ: str = ""
) -> Value:
    """What `work` gives, once it is done on all ranks, with the same `mark`; where it fails on one, all raise."""
    value: Value | None = None
    failed: Exception | None = None
    try:
        value = work()
    except Exception as error:
        failed = error
    try:
        every = ranks.gathered((str(failed) if failed else "", None if failed else mark(cast(Value, value))))
    except RuntimeError as error:
        raise _Stopped("a process stopped while the memory was read, or cannot be reached.") from error
    if failed is not None:
        raise failed
    for rank, (message, _) in enumerate(every):
        if message:
            raise MemoryFileError(f"rank {rank} of {len(every)}: {message}")
    if any(each != every[0][1] for _, each in every):
        raise MemoryFileError(f"{differ} on all processes. Let them all read one, from a file system that they share.")
    return cast(Value, value)
