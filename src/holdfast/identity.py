"""Short names for values: two things with the same bits have the same identity, on whatever device they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20


def digest(text: str) -> str:
    """A short name for a text: the first half of its SHA-256, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def bit_sum(tensor: Tensor) -> int:
    """The sum of a tensor's bits, read as integers: nothing rounds it, and the order of rows does not matter."""
    return int(_integers(tensor).sum(dtype=torch.int64))


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A short identity of each tensor: its form, its bits, and where they are.

    Odd weights by place: an even one would push the highest bit, a float's sign, out of the sum.
    """
    found = {}
    for name, tensor in tensors.items():
        bits = _integers(tensor).flatten()
        places = 2 * torch.arange(min(_CHUNK, bits.numel()), device=bits.device) + 1
        sums = [
            (chunk * places[: chunk.numel()]).sum() * (2 * index - 1)
            for index, chunk in enumerate(torch.split(bits, _CHUNK), start=1)
        ]
        total = int(torch.stack(sums).sum()) if sums else 0
        found[name] = digest(f"{tuple(tensor.shape)} {tensor.dtype} {total}")[:16]
    return found


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A short identity of all the tensors and their names, in whatever order."""
    return digest(str(sorted(fingerprints(tensors).items())))


def _integers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.dtype == torch.bool or tensor.is_complex():
        tensor = tensor.to(torch.uint8) if tensor.dtype == torch.bool else torch.view_as_real(tensor)
    return tensor.contiguous().view(_BITS[tensor.element_size()])
