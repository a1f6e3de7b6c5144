"""Replicas of one model, on several processes: they may have BatchNorm statistics of their own, and stay one."""

from __future__ import annotations

import torch
from torch import distributed, nn


def agreed(number: float, device: torch.device | str) -> float:
    """The number that the first replica has."""
    found = torch.tensor(number, dtype=torch.float64, device=device)
    distributed.broadcast(found, 0)
    return float(found)


@torch.no_grad()
def same_(model: nn.Module) -> None:
    """Give every replica the parameters and the buffers of the first."""
    if distributed.get_world_size() == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        whole = tensor.detach().contiguous()
        distributed.broadcast(whole, 0)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)
