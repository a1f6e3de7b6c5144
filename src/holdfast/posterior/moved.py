"""Which weights of a model have left the mean of a posterior."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from ..devices import part
from ..params import aliases, all_parameters
from ..pieces import cut, in_pieces

_ROUNDING = 1e-6  # of the largest: an adapter that is merged and taken out again leaves as much


def moved(mean: Mapping[str, Tensor], model: nn.Module, among: Collection[str] | None = None) -> list[str]:
    """The parameters of a mean that are elsewhere in the model, by more than the rounding of the narrower of the two.

    What the model lacks, or has in another shape, has not moved: that is told where it matters.
    """
    named = all_parameters(model)
    named |= {other: named[name] for name, more in aliases(model).items() for other in more if name in named}
    wanted = [name for name in mean if name in named and (among is None or name in among)]
    return [name for name in wanted if _apart(named[name].detach(), mean[name])]


def _apart(parameter: Tensor, mean: Tensor) -> bool:
    if parameter.shape != mean.shape or parameter.is_meta or (in_pieces(mean) and not in_pieces(parameter)):
        return False
    here, there = part(parameter), part(cut(mean, parameter))  # of pieces each process sees its own
    narrow = max(here.dtype, there.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    here, there = here.to(there.device, narrow), there.to(narrow)
    if torch.equal(here, there):
        return False
    here, there = (each.to(torch.promote_types(narrow, torch.float32)) for each in (here, there))
    return not bool((here - there).abs().max() <= _ROUNDING * there.abs().max())
