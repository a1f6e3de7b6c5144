"""Short names for values: two things with the same bits have the same identity, on whatever device they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .devices import full, part
from .pieces import box, layout, settled, summed

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Entries at once: on the CPU few enough for temporaries to stay in each core's cache, elsewhere many for few calls.
_FOR_A_CORE = 1 << 16
_LARGE_CHUNK = 1 << 24


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
    total = torch.zeros((), dtype=torch.int64, device=mine.device)
    for first in range(0, len(mine), _LARGE_CHUNK):
        chunk = mine[first : first + _LARGE_CHUNK]
        total += (chunk * (2 * where.places(first, first + len(chunk), mine.device) + 1)).sum()
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

    The weights are odd: an even one would push the highest bit, a float's sign, out of the sum.
    """
    total = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    most = _FOR_A_CORE * torch.get_num_threads() if rows.device.type == "cpu" else _LARGE_CHUNK
    width = max(1, min(most // max(1, rows.shape[0]), rows.shape[1]))
    odd = 2 * torch.arange(width, device=rows.device) + 1
    for index, chunk in enumerate(torch.split(rows, width, dim=1)):
        total += (chunk * odd[: chunk.shape[1]]).sum(1) + 2 * (begin + index * width) * chunk.sum(1, dtype=torch.int64)
    return total
