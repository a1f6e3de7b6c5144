"""Pieces through torch.distributed.checkpoint: its plans of who writes and who reads what, safetensors on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_pieces
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..errors import MemoryFileError
from ..file import Facts, apart, put, synced
from . import disk
from .manifest import Manifest, Piece, Spread

_LARGEST = 1 << 32  # of a file, about, in bytes: what is on the CPU at once while it is written


class _Overtaken(MemoryFileError):
    """Another job saved to the folder at the same time."""


def save(path: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Write the pieces that each process has; the first of them puts the manifest when all have vouched for theirs.

    One job saves to a folder at a time: of two, the one that finds something missing raises.
    """
    writer = _Writer(path, facts)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        save_pieces(dict(tensors), storage_writer=writer, planner=planner)
    except CheckpointException as error:  # of some process, and every one hears of it
        writer.undo()
        for cause, _ in error.failures.values():
            if isinstance(cause, _Overtaken):
                raise MemoryFileError(str(cause)) from error
        said = "; ".join(f"rank {rank}: {_said(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
        raise MemoryFileError(f"{path} could not be written: {said}. What was there before is as it was.") from error


class _Writer(StorageWriter):
    """One process's files, and on the first one the manifest of all."""

    def __init__(self, path: Path, facts: Facts) -> None:
        self._path, self._facts = path, facts
        self._made, self._data, self._began = False, "", 0

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        disk.require_free(self._path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._made = not self._path.exists()
        self._data = disk.new_data()
        self._path.mkdir(exist_ok=True)
        (self._path / self._data).mkdir()
        self._began = (self._path / self._data).stat().st_mtime_ns
        return [replace(plan, storage_data=(rank, self._data)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank, data = plan.storage_data
        folder = self._path / data
        if not folder.is_dir():
            raise MemoryFileError(
                f"{folder} is not here, though rank 0 made it: a memory in pieces needs a file system that all share, "
                "and no other job that saves there at the same time"
            )
        results: list[WriteResult] = []
        items: list[WriteItem] = []
        size = 0
        for item in plan.items:
            if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel():
                items.append(item)
                size += _bytes(item)
                if size >= _LARGEST:
                    results += _written(folder / f"{rank:05}-{len(results)}.safetensors", items, planner)
                    items, size = [], 0
        if items:
            results += _written(folder / f"{rank:05}-{len(results)}.safetensors", items, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        every = [result for each in results for result in each]
        pieces: dict[str, list[Piece]] = {}
        for result in every:
            pieces.setdefault(result.index.fqn, []).append(result.storage_data[0])
        tensors = {
            name: Spread(said.properties.dtype, tuple(said.size), tuple(pieces.get(name, ())))
            for name, said in metadata.state_dict_metadata.items()
            if isinstance(said, TensorStorageMetadata)
        }
        files = {piece.file: mark for piece, mark in (result.storage_data for result in every)}
        with contextlib.suppress(OSError):  # some file systems cannot
            synced(self._path / self._data)
        manifest = Manifest(dict(self._facts), self._data, files, tensors)
        with self._alone():
            disk.require_data(self._path, manifest, ())
        disk.put(self._path, manifest)
        with contextlib.suppress(OSError):  # the next save clears what is left
            disk.cleared(self._path, self._data, self._began)
        with self._alone():
            disk.require_whole(self._path)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Where files are looked for that only another job can have removed."""
        try:
            yield
        except MemoryFileError as error:
            raise _Overtaken(
                f"{self._path} is not what was saved: another job saved here at the same time ({error}) Save again, "
                "one job after the other, or give each a folder of its own."
            ) from error

    def undo(self) -> None:
        """Take away what this process made, unless the manifest names it."""
        if self._data and not disk.names(self._path, self._data):
            shutil.rmtree(self._path / self._data, ignore_errors=True)
            if self._made:
                with contextlib.suppress(OSError):
                    self._path.rmdir()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def fill_(tensors: dict[str, Tensor], path: str | os.PathLike[str], said: Manifest) -> None:
    """Read into tensors what this process has of them."""
    metadata = Metadata({
        name: TensorStorageMetadata(
            TensorProperties(dtype=each.dtype),
            Size(each.shape),
            [ChunkStorageMetadata(Size(piece.start), Size(piece.shape)) for piece in each.pieces],
        )
        for name, each in said.tensors.items()
    })  # fmt: skip
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    plan: LoadPlan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
    at = {(name, piece.start): piece for name, each in said.tensors.items() for piece in each.pieces}
    by_file: dict[str, list[Any]] = {}
    for item in plan.items:
        by_file.setdefault(at[item.storage_index.fqn, tuple(item.storage_index.offset or ())].file, []).append(item)
    for file, items in by_file.items():
        with safe_open(Path(path) / said.data / file, framework="pt", device="cpu") as content:
            for item in items:
                name = item.storage_index.fqn
                piece = at[name, tuple(item.storage_index.offset or ())]
                box = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
                key = piece.key(name)
                value = content.get_slice(key)[box] if box else content.get_tensor(key)
                if value.dtype != said.tensors[name].dtype:
                    raise MemoryFileError(f"{path}: `{name}` has another dtype than the manifest says.")
                planner.resolve_tensor(item).detach().copy_(value)


def _written(file: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """Some pieces in a file, and what this process vouches for: its bits, as they are on the disk."""
    tensors: dict[str, Tensor] = {}
    pieces: list[tuple[WriteItem, Piece]] = []
    for item in items:
        if item.tensor_data is None:
            raise MemoryFileError(f"`{item.index.fqn}` is no tensor, and a memory's folder has nothing else.")
        chunk = item.tensor_data.chunk
        piece = Piece(file.name, tuple(chunk.offsets), tuple(chunk.sizes))
        found: Any = planner.resolve_data(item)
        tensors[piece.key(item.index.fqn)] = found
        pieces.append((item, piece))
    put(file, apart(tensors), {})
    with open(file, "rb") as whole:
        mark = hashlib.file_digest(whole, "sha256").hexdigest()
    return [WriteResult(item.index, _bytes(item), (piece, mark)) for item, piece in pieces]


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
