"""The pull of a diagonal Λ on all parameters: g ← g + s · Λ ∘ (θ − μ), and the value ½ Σ Λ (θ − μ)²."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .codes import BLOCK, Codes, bounds, piece
from .launches import chosen, launches

Tensors = Sequence[Tensor]
Entries = Sequence[Tensor | Codes]  # of Λ

WIDE = (torch.float32, torch.float64)


def in_one_pass(*roles: Entries) -> bool:
    """Whether all tensors are plain, dense, on one device and of one dtype, so that one pass can serve them."""
    every: list[Any] = [tensor for role in roles for tensor in role]
    first = every[0]
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype == first.dtype
        and tensor.device == first.device
        for tensor in every
    )


def in_runs(*roles: Entries) -> bool:
    """Whether all tensors are plain, contiguous and on one device: then they can be gone through piece by piece."""
    every = [tensor.codes if isinstance(tensor, Codes) else tensor for role in roles for tensor in role]
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.device == every[0].device
        for tensor in every
    )


def add_pull_(
    grads: Tensors, params: Tensors, means: Tensors, entries: Entries, scale: float | Tensor, *, value: bool = True
) -> Any:
    """Add scale · entries ∘ (params − means) to the gradients; returns ½ Σ entries (params − means)² if asked for.

    NotImplemented, and nothing is done, where tensors are such as none of its ways can serve.
    """
    lots = launches(grads, params, means, entries=entries)
    if lots is not None:
        return _pull_in_launches(lots, grads, params, means, entries, scale)
    roles = (grads, params, means, entries)
    if grads[0].device.type != "cpu" or not in_runs(*roles):
        if in_one_pass(*roles) and grads[0].dtype in WIDE:
            return plain_pull(grads, params, means, [entry for entry in entries if isinstance(entry, Tensor)], scale)
        if not in_runs(*roles):
            return NotImplemented
    return pull_in_pieces(grads, params, means, entries, scale, value=value)


def _pull_in_launches(
    lots: list[list[int]], grads: Tensors, params: Tensors, means: Tensors, entries: Entries, scale: float | Tensor
) -> Tensor:
    from .triton_pull import pull

    found = []
    for rows in lots:
        mine, held, centers, weights = chosen(rows, grads, params, means, entries)
        found.append(pull(mine, held, centers, weights, scale))
    nothing = torch.zeros((), dtype=torch.float32, device=grads[0].device)
    return found[0] if len(found) == 1 else sum(found, start=nothing)


def plain_pull(grads: Tensors, params: Tensors, means: Tensors, entries: Tensors, scale: float | Tensor) -> Tensor:
    """The same, one operation over all tensors after another."""
    deltas = torch._foreach_sub(list(params), list(means))
    pulls = torch._foreach_mul(deltas, list(entries))
    dots = [torch.dot(delta.flatten(), pull.flatten()) for delta, pull in zip(deltas, pulls, strict=True)]
    value = 0.5 * torch.stack(dots).sum()
    if isinstance(scale, Tensor):
        torch._foreach_mul_(pulls, scale)
        torch._foreach_add_(list(grads), pulls)
    else:
        torch._foreach_add_(list(grads), pulls, alpha=scale)
    return value


def pull_in_pieces(
    grads: Tensors, params: Tensors, means: Tensors, entries: Entries, scale: float | Tensor, *, value: bool = True
) -> Tensor | None:
    """The same, a piece at a time: what one operation leaves is still in the cache when the next one reads it.

    Tensors may be of several dtypes, and Λ in codes: all is computed in float32 at least, and rounded once.
    """
    room = Room(params, means, entries)
    dots = []
    for grad, param, mean, entry in pieces(grads, params, means, entries):
        delta, weight = room.difference(param, mean), room.read(entry)
        if value or isinstance(scale, Tensor):
            pull = torch.mul(delta, weight, out=room.second[: len(delta)])
            dots.append(torch.dot(delta, pull))
            grad.add_(pull.mul_(scale))
        else:
            grad.addcmul_(delta, weight, value=scale)
    return 0.5 * torch.stack(dots).sum() if value else None


def half_squares(params: Tensors, means: Tensors, entries: Entries) -> Tensor:
    """½ Σ entries (params − means)² alone, a piece at a time."""
    room = Room(params, means, entries)
    dots = []
    for param, mean, entry in pieces(params, means, entries):
        delta = room.difference(param, mean)
        dots.append(torch.dot(delta, torch.mul(delta, room.read(entry), out=room.second[: len(delta)])))
    return 0.5 * torch.stack(dots).sum()


class Room:
    """Where pieces are computed: two tensors in float32 at least, and one for entries that are read from codes."""

    def __init__(self, params: Tensors, means: Tensors, entries: Entries) -> None:
        plain = [entry.dtype for entry in entries if isinstance(entry, Tensor)]
        dtypes = (*(each.dtype for each in (*params, *means)), *plain)
        self.wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
        device = params[0].device
        size = min(piece(device), max(param.numel() for param in params))
        size = max(size, BLOCK)  # no piece of codes is smaller
        self.first, self.second = (torch.empty(size, dtype=self.wide, device=device) for _ in range(2))
        coded = len(plain) < len(entries)
        self._read = torch.empty(size + 2 * BLOCK, dtype=torch.float32, device=device) if coded else self.first

    def difference(self, param: Tensor, mean: Tensor) -> Tensor:
        """θ − μ in all the digits that either has."""
        found = self.first[: len(param)]
        if torch.promote_types(param.dtype, mean.dtype) == self.wide:
            torch.sub(param, mean, out=found)
        else:
            found.copy_(param).sub_(mean)
        return found

    def read(self, entry: Tensor | Codes) -> Tensor:
        """Entries of Λ as numbers."""
        return entry.read(self._read) if isinstance(entry, Codes) else entry

    def scaled(self, entry: Tensor | Codes, scale: float | Tensor) -> Tensor:
        """Entries of Λ times a number, or each times its own."""
        found = self.read(entry)
        into = self.second[: len(found)]
        return torch.mul(found, scale, out=into) if found.dtype == self.wide else into.copy_(found).mul_(scale)


def pieces(*roles: Sequence[Any], most: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Contiguous tensors of all roles side by side, flat, in parts of so many entries; numbers go with every part.

    Unless it is said how many, they are as many as a processor's cache keeps.
    """
    for members in zip(*roles, strict=True):
        coded = next((each for each in members if isinstance(each, Codes)), None)
        start, size = coded.start if coded else 0, members[0].numel()
        flat = [each.view(-1) if isinstance(each, Tensor) and each.numel() == size else each for each in members]
        edges = list(bounds(size, start, most or piece(members[0].device)))
        for first, last in edges:
            yield tuple(flat if len(edges) == 1 and not coded else (_part(each, first, last, size) for each in flat))


def _part(member: Any, first: int, last: int, size: int) -> Any:
    if isinstance(member, Codes):
        return member.part(first, last)
    return member[first:last] if isinstance(member, Tensor) and member.ndim and len(member) == size else member
