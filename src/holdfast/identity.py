"""Short names for values: two things with the same bits have the same identity, on whatever device they are."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .devices import full, part
from .pieces import box, layout, settled, summed

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 14  # places whose weights are kept
# Entries at once: on the CPU few enough for temporaries to stay in each core's cache, elsewhere many for few calls.
_FOR_A_CORE = 1 << 16
_AT_ONCE = 1 << 24


def digest(text: str) -> str:
    """A short name for a text: the first half of its SHA-256, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def row_sums(tensors: Sequence[Tensor]) -> Tensor:
    """A number for each row of tensors that stand side by side, from its bits and where they are: (rows,)."""
    total: Tensor | None = None
    for place, tensor in enumerate(tensors):
        if tensor.ndim:
            rows = _integers(tensor).flatten(1) if tensor.ndim > 1 else _integers(tensor).unsqueeze(1)
            part = (2 * place + 1) * _weighted(rows)
            total = part if total is None else total.to(part.device) + part
    return torch.zeros((), dtype=torch.int64) if total is None else _mixed(total)


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers that have nothing to do with each other, so that sums of them tell sets of rows apart."""
    for odd in (-0x4_0A7_B892_E31B_1A47, -0x6B2F_B644_ECCE_EE15):
        numbers = (numbers ^ (numbers >> 31)) * odd
    return numbers ^ (numbers >> 33)


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A short identity of each tensor: its form, its bits, and where they are.

    Of tensors in pieces each process sums over its own: they have the identity that they have whole.
    """
    together: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        here = full(tensor.detach()) if tensor.is_complex() else settled(tensor.detach())
        together.setdefault((layout(here), here.device), {})[name] = here
    totals: dict[str, int] = {}
    for mine in together.values():  # read off a device, or summed over processes, once for all
        sums = torch.stack([_total(tensor) for tensor in mine.values()])
        totals |= zip(mine, summed(sums, next(iter(mine.values()))).tolist(), strict=True)
    return {
        name: digest(f"{tuple(tensor.shape)} {tensor.dtype} {totals[name]}")[:16] for name, tensor in tensors.items()
    }


def _total(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, as a number."""
    mine, where = _integers(part(tensor)).reshape(-1), box(tensor)
    if where.start is not None:
        return _weighted(mine.unsqueeze(0), where.start).squeeze(0)
    total, room = torch.zeros((), dtype=torch.int64, device=mine.device), _Room(mine, _AT_ONCE)
    for first in range(0, len(mine), _AT_ONCE):
        chunk = mine[first : first + _AT_ONCE]
        places = where.places(first, first + len(chunk), mine.device)
        rows = _odd(places // _BLOCK, seed=1)
        total += (room.folded(chunk) * _weights(mine.device)[places % _BLOCK] * rows).sum()
    return total


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A short identity of all the tensors and their names, in whatever order."""
    return digest(str(sorted(fingerprints(tensors).items())))


def _integers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bool or tensor.is_complex():
        tensor = tensor.to(torch.uint8) if tensor.dtype == torch.bool else torch.view_as_real(tensor)
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _weighted(rows: Tensor, begin: int = 0) -> Tensor:
    """Each row's integers summed with weights by place, wrapping around: nothing rounds it, on any device.

    A weight is an odd number for the place in a block times one for the block, each of random bits: weights with a
    pattern would not tell tensors apart that have one. The first entry is number `begin`.
    """
    total = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    width, weights, start = rows.shape[1], _weights(rows.device), 0
    most = _FOR_A_CORE * torch.get_num_threads() if rows.device.type == "cpu" else _AT_ONCE
    room = _Room(rows, max(most, rows.shape[0]))
    while start < width:
        lead = (begin + start) % _BLOCK
        taken = min((width - start) // _BLOCK, most // (_BLOCK * max(1, rows.shape[0]))) if not lead else 0
        if taken:  # several blocks side by side
            chunk = rows[:, start : start + taken * _BLOCK].view(-1, taken, _BLOCK)
            blocks = torch.arange(taken, device=rows.device) + (begin + start) // _BLOCK
            total += (room.folded(chunk).mul_(weights).sum(2) * _odd(blocks, seed=1)).sum(1)
            start += taken * _BLOCK
        else:
            last = min(width, start + _BLOCK - lead, start + max(1, most // max(1, rows.shape[0])))
            weighed = room.folded(rows[:, start:last]).mul_(weights[lead : lead + last - start])
            total += weighed.sum(1) * _of_block((begin + start) // _BLOCK)
            start = last
    return total


class _Room:
    """Memory for integers that are folded a chunk at a time: asked for once, and not anew for each."""

    def __init__(self, like: Tensor, most: int) -> None:
        size = (min(most, like.numel()),)
        self._wide = torch.empty(size, dtype=torch.int64, device=like.device)
        self._spare = torch.empty(size if like.element_size() > 2 else (0,), dtype=torch.int64, device=like.device)

    def folded(self, bits: Tensor) -> Tensor:
        """Integers as int64, what is in their high bits in the low ones too: round numbers have only zeros there."""
        found = self._wide[: bits.numel()].view(bits.shape).copy_(bits)
        for size, shift in ((8, 32), (4, 16)):
            if bits.element_size() >= size:
                spare = self._spare[: bits.numel()].view(bits.shape)
                found += torch.bitwise_right_shift(found, shift, out=spare)
        return found


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """For the places in a block."""
    return _odd(torch.arange(_BLOCK, device=device), seed=0)


@functools.lru_cache(maxsize=1024)
def _of_block(number: int) -> int:
    """The weight of one block."""
    return int(_odd(torch.tensor(number), seed=1))


def _odd(numbers: Tensor, seed: int) -> Tensor:
    """An odd number of random bits for each."""
    return _mixed(_mixed(numbers + 1) + seed) | 1
