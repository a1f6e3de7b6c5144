"""Whether kernels can be compiled for this GPU: found out once, by compiling one."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

from ..errors import HoldfastWarning


def has_triton() -> bool:
    """Whether kernels run here. If they should and do not, a warning says why, and their plain twins do the work."""
    # A step that is being recorded is no time to load a first kernel: what is there is taken to be in order.
    return _is_there() and (torch.cuda.is_current_stream_capturing() or _runs(torch.cuda.current_device()))


@functools.cache
def _is_there() -> bool:
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)


@functools.cache
def _runs(device: int) -> bool:
    """Triton builds a module in C for each kernel: without a compiler, Python's headers or a cache folder it cannot."""
    try:
        from .triton_trial import run

        run(torch.device("cuda", device))
    except Exception as error:  # whatever a compiler, a linker or a file system has to say
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"Triton is installed, and cannot compile a kernel here ({reason[:200]}). Holdfast goes on without its own "
            "kernels, slower. Triton needs a C compiler (CC, gcc or clang), Python's headers, and a cache folder to "
            "write to (TRITON_CACHE_DIR).",
            HoldfastWarning,
            stacklevel=2,
        )
        return False
    return True
