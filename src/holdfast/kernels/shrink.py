"""The pull of a diagonal Λ as a step of its own: θ ← μ + (θ − μ) / (1 + s Λ).

Computed as θ − (θ − μ) s Λ / (1 + s Λ), which leaves θ to the last digit where Λ is zero. Where s Λ is so large that
this is μ to the last digit, it is taken for no larger than that: the product would be beyond all numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .codes import LARGEST
from .launches import chosen, launches
from .pull import Entries, Room, Tensors, pieces

FIRM = 2.0**64  # a stiffness that leaves nothing of a distance, in any dtype


def shrink_(params: Tensors, means: Tensors, entries: Entries, scales: Sequence[float | Tensor]) -> None:
    """Bring each parameter nearer to its mean, by what its precision asks for, s being a number or one for each entry.

    Of plain tensors on one device, contiguous; of several dtypes, if need be, and Λ in codes.
    """
    scales = [each if isinstance(each, Tensor) else min(each, LARGEST) for each in scales]
    scale = scales[0]
    one = all(not isinstance(each, Tensor) and each == scale for each in scales)
    lots = launches(params, means, entries=entries) if one else None
    if lots is not None:
        from .triton_shrink import shrink

        for rows in lots:
            held, centers, weights = chosen(rows, params, means, entries)
            shrink(held, centers, weights, float(scale))
        return
    room = Room(params, means, entries)
    for param, mean, entry, each in pieces(params, means, entries, scales):
        delta, weight = room.difference(param, mean), room.scaled(entry, each).clamp_(max=FIRM)
        delta.mul_(weight)
        param.addcdiv_(delta, weight.add_(1), value=-1)
