"""Decoded pictures, kept in the cache: sixty thousand JPEGs take seconds, their pixels a fraction of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ... import file
from ...errors import HoldfastWarning, MemoryFileError
from .files import File, cache, fingerprint

_KIND = "set of decoded pictures"
_KEYS: file.Keys = {"format": int, "kind": str, "source": str, "sha256": str}

Tensors = dict[str, Tensor]


def decoded(name: str, files: Mapping[str, File], decode: Callable[[], Tensors]) -> Tensors:
    """What `decode` makes of `files`, from the cache if it was made before and the file is sound."""
    source = fingerprint(files)
    folder = cache()
    if folder is None:
        return decode()
    facts = {"format": file.FORMAT, "kind": _KIND, "source": source}
    path = folder / name / f"decoded-{source[:16]}.safetensors"

    def rebuilt(found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensors:
        if found["source"] != source:
            raise ValueError("it was made from other files")
        return dict(tensors)

    if path.exists():
        try:
            return file.read(path, _KIND, _KEYS, rebuilt)
        except MemoryFileError as error:
            warnings.warn(HoldfastWarning(f"Decoding again: {error}"), stacklevel=3)
    tensors = decode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file.write(path, facts, tensors, rebuilt)
    except OSError as error:  # a MemoryFileError is one
        warnings.warn(HoldfastWarning(f"The decoded pictures are not kept: {error} Set HOLDFAST_CACHE."), stacklevel=3)
    return tensors
