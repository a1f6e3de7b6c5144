"""The smallest kernel there is, to see whether kernels can be compiled and run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(number):
    tl.store(number, 1.0)


def run(device: torch.device) -> None:
    """Compile it, if it is not in Triton's cache, and start it."""
    number = torch.zeros(1, device=device)
    with torch.cuda.device(device):
        _kernel[(1,)](number)
