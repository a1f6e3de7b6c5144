"""Whether kernels run on a GPU: found out once for each, by starting one."""

from __future__ import annotations

import importlib.util
import warnings

import torch

from ..errors import HoldfastWarning

_FOUND: dict[torch.device, bool] = {}


def has_triton(device: torch.device) -> bool:
    """Whether kernels run on this GPU. Where they should and do not, a warning says why; their plain twins do the work.

    A step that is being recorded is no time to start a first one: until it is known, they do not.
    """
    if device not in _FOUND and not torch.cuda.is_current_stream_capturing():
        _FOUND[device] = _tried(device)
    return _FOUND.get(device, False)


def _tried(device: torch.device) -> bool:
    """Triton builds a module in C for each kernel: without a compiler, Python's headers or a cache folder it cannot."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from .triton_trial import run

        run(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler, a linker or a file system has to say
        if any(sign in str(error) for sign in ("CUDA error", "Error [CUDA]")):  # of what ran before, or of the GPU
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(
            f"Triton is installed, and cannot compile a kernel here ({reason[:200]}). Holdfast goes on without its own "
            "kernels, slower. Triton needs a C compiler (CC, gcc or clang), Python's headers, and a cache folder to "
            "write to (TRITON_CACHE_DIR).",
            HoldfastWarning,
            stacklevel=3,
        )
        return False
    return True
