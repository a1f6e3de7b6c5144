"""A memory that stays on the CPU, and comes to the parameters' device piece by piece while they are pulled at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..kernels import Codes, pieces
from ..kernels.pull import Entries, Tensors
from ..params import matched, shapes
from ..pieces import in_pieces
from ..posterior import Posterior
from ..precision import Diagonal, Logarithmic, Precision

SIZE = 2**23  # entries at a time: some milliseconds on the way, and no more than 128 MiB for two of them
_ALIGNED = 256  # bytes


class Prefetch:
    """Two buffers on a device: while one is read, the other is filled, on a GPU in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, *roles: Sequence[Any], means: Tensors, entries: Entries) -> Iterator[tuple[Any, ...]]:
        """Lots of pieces, role by role, with those of the means and entries, on the device until the next comes."""
        side, now = self._stream, None
        if side is not None:
            now = torch.cuda.current_stream(self._device)
            side.wait_stream(now)  # what was there before is done with then, and a recorded step takes it along
        read: list[Any] = [None, None]  # when each buffer had been read
        waiting: tuple[tuple[Any, ...], Any, int] | None = None
        for turn, rows in enumerate(_lots(pieces(*roles, means, entries, most=SIZE))):
            place = turn % 2
            sources = [each for *_, mean, entry in rows for each in _stored(mean, entry)]
            rooms = self._made(place, sources, now)
            if side is not None and read[place] is not None:
                side.wait_event(read[place])
            with nullcontext() if side is None else torch.cuda.stream(side):
                for room, source in zip(rooms, sources, strict=True):
                    room.copy_(source, non_blocking=True)
            there = None if side is None else side.record_event()
            if waiting is not None:
                yield from _given(waiting, now, read)
            waiting = (_with(rows, rooms), there, place)
        if waiting is not None:
            yield from _given(waiting, now, read)

    def free(self) -> None:
        """Give the buffers back; they are made again when they are needed."""
        self._rooms = [room[:0].clone() for room in self._rooms]

    def _made(self, place: int, sources: Sequence[Tensor], now: Any) -> list[Tensor]:
        """Room in one of the buffers for tensors as these are."""
        ends = [0]
        for source in sources:
            ends.append(ends[-1] + -(-source.nbytes // _ALIGNED) * _ALIGNED)
        if ends[-1] > len(self._rooms[place]):
            self._rooms[place] = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
            if self._stream is not None:  # the memory is another's before this stream's turn, and after it
                self._stream.wait_stream(now)
                self._rooms[place].record_stream(self._stream)
        room = self._rooms[place]
        return [room[at : at + source.nbytes].view(source.dtype) for source, at in zip(sources, ends[:-1], strict=True)]


def _lots(rows: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Rows together, as many as make a piece of full size: each lot is one launch on a GPU."""
    lot: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        if lot and size + row[-2].numel() > SIZE:
            yield lot
            lot, size = [], 0
        lot.append(row)
        size += row[-2].numel()
    if lot:
        yield lot


def _stored(mean: Tensor, entry: Tensor | Codes) -> list[Tensor]:
    return [mean, entry.codes, entry.tops] if isinstance(entry, Codes) else [mean, entry]


def _with(rows: Sequence[tuple[Any, ...]], rooms: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Role by role, with what was brought in the place of what is elsewhere."""
    found = iter(rooms)
    there = []
    for *ours, _, entry in rows:
        mean, values = next(found), next(found)
        brought = entry._replace(codes=values, tops=next(found)) if isinstance(entry, Codes) else values
        there.append((*ours, mean, brought))
    return tuple(list(role) for role in zip(*there, strict=True))


def _given(waiting: tuple[tuple[Any, ...], Any, int], now: Any, read: list[Any]) -> Iterator[tuple[Any, ...]]:
    """A lot when it is there; whoever goes on after it has asked for all that is to be done with it."""
    lot, there, place = waiting
    if now is not None:
        now.wait_event(there)
    yield lot
    if now is not None:
        read[place] = now.record_event()


def offloaded(posterior: Posterior, model: nn.Module) -> tuple[Posterior, Prefetch]:
    """A posterior on the CPU, in memory that a GPU can read by itself, and what brings it to the model."""
    params = matched(model, shapes(posterior.mean), ties=posterior.ties)
    devices = {parameter.device for parameter in params.values()}
    if any(in_pieces(each) for each in (*params.values(), *posterior.mean.values())):
        raise ArgumentError(
            "offload=True is for a model on one device, and this one is in pieces on several, each of which has its "
            "share of the memory: leave it out. memory.compact() makes it smaller, and fully_shard(model, "
            "offload_policy=CPUOffloadPolicy()) keeps weights and memory on the CPU."
        )
    if len(devices) != 1:
        raise ArgumentError(
            f"offload=True brings a memory to one device, and the model is on {len(devices)}. Leave it out: the memory "
            "is then used where it is."
        )
    (device,) = devices
    precision = posterior.precision
    if not isinstance(precision, (Diagonal, Logarithmic)):
        raise ArgumentError(
            f"offload=True keeps diagonals on the CPU, and this precision is {type(precision).__name__}, whose "
            "products need all of it on the device. Leave it out, or hold by holdfast.Diagonal(precision.diagonal(), "
            "precision.sources)."
        )
    pin = device.type == "cuda"
    mean = _kept(posterior.mean, pin)
    return replace(posterior, mean=mean, precision=_in_memory(precision, pin)), Prefetch(device)


def _in_memory(precision: Diagonal | Logarithmic, pin: bool) -> Precision:
    if isinstance(precision, Diagonal):
        return replace(precision, entries=_kept(precision.entries, pin))
    return replace(precision, codes=_kept(precision.codes, pin), tops=_kept(precision.tops, pin))


def _kept(tensors: Mapping[str, Tensor], pin: bool) -> dict[str, Tensor]:
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return {name: tensor.pin_memory() for name, tensor in found.items()} if pin else found
