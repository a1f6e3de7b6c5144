"""The pull of a diagonal Λ as a step of its own: θ ← μ + (θ − μ) / (1 + s Λ).

Computed as θ − (θ − μ) s Λ / (1 + s Λ), which leaves θ to the last digit where Λ is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .products import has_triton
from .pull import DTYPES, Entries, Room, Tensors, in_one_pass, pieces


def shrink_(params: Tensors, means: Tensors, entries: Entries, scales: Sequence[float | Tensor]) -> None:
    """Bring each parameter nearer to its mean, by what its precision asks for, s being a number or one for each entry.

    Of plain tensors on one device, contiguous; of several dtypes, if need be, and Λ in codes.
    """
    first, scale = params[0], scales[0]
    plain = [entry for entry in entries if isinstance(entry, Tensor)]
    one = all(not isinstance(each, Tensor) and each == scale for each in scales)
    fits = first.is_cuda and first.dtype in DTYPES and has_triton() and all(each.numel() < 2**31 for each in params)
    # A recorded step would find the addresses of its own tensors in memory that is someone else's by then.
    if fits and one and in_one_pass(params, means, entries) and not torch.cuda.is_current_stream_capturing():
        from .triton_shrink import shrink

        return shrink(params, means, plain, float(scale))
    room = Room(params, means, entries)
    for param, mean, entry, each in pieces(params, means, entries, scales):
        delta, weight = room.difference(param, mean), room.scaled(entry, each)
        delta.mul_(weight)
        param.addcdiv_(delta, weight.add_(1), value=-1)
    return None
