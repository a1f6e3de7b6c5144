"""Readers of the forms that pictures come in: IDX, CIFAR-10's pickled batches, and JPEGs packed in one file."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError, HoldfastError
from .files import File
from .progress import progress

_SIDE = 32  # CIFAR-10's pictures are 3×32×32
_BROKEN = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, TypeError, ValueError,
    pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, OSError,
)  # fmt: skip


def idx(file: File, dims: int) -> Tensor:
    """The uint8 array of an IDX file: two zero bytes, its type, how many dimensions, each of them, and the values."""
    content = file.content
    magic = bytes((0, 0, 8, dims))  # 8: unsigned bytes
    if content[:4] != magic:
        raise DataError(f"{file.place} starts with {content[:4].hex()}, not {magic.hex()}: it is not such an IDX file.")
    start = 4 + 4 * dims
    if len(content) < start:
        raise DataError(f"{file.place} is truncated: its header alone takes {start} bytes, it has {len(content)}.")
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        raise DataError(
            f"{file.place} has {len(content)} bytes, but its header says {start + math.prod(shape)} ({shape}): it is "
            "truncated or damaged. Use another copy."
        )
    return _uint8(content[start:]).reshape(shape)


def batch(file: File) -> tuple[Tensor, Tensor]:
    """Pictures (n, 3, 32, 32) and labels (n,) of one of CIFAR-10's pickles, in which nothing is executed."""
    try:
        contents = _Unpickler(io.BytesIO(file.content), encoding="bytes").load()
        x = contents[b"data"].values  # (n, 3072): the red plane, the green, the blue
        y = torch.tensor(contents[b"labels"], dtype=torch.int64)
        return x.reshape(len(y), 3, _SIDE, _SIDE).contiguous(), y
    except _BROKEN as error:
        raise _damaged(file, "one of CIFAR-10's batches", error) from error


def packed(file: File) -> tuple[Tensor, Tensor]:
    """Pictures and labels of an npz of JPEGs: `jpeg` (all their bytes), `offset` (n + 1) and `label` (n)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise HoldfastError(f"{file.place} holds JPEGs: reading them needs Pillow. Install holdfast[bench].") from error
    try:
        with np.load(io.BytesIO(file.content), allow_pickle=False) as arrays:
            jpeg, offset, label = (arrays[name] for name in ("jpeg", "offset", "label"))
        if jpeg.dtype != np.uint8 or offset.shape != (len(label) + 1,) or offset[0] != 0 or offset[-1] != jpeg.size:
            raise ValueError("its offsets are not those of its pictures")
        everything = jpeg.tobytes()
        x = np.empty((len(label), _SIDE, _SIDE, 3), np.uint8)
        with progress(f"decoding {len(label)} pictures", len(label)) as advance:
            for row, (start, end) in enumerate(zip(offset[:-1].tolist(), offset[1:].tolist(), strict=True)):
                x[row] = _decoded(Image.open(io.BytesIO(everything[start:end]), formats=("JPEG",)))
                advance(1)
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise _damaged(file, "a file of packed JPEGs", error) from error
    return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(label.astype(np.int64))


def _decoded(picture: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if picture.size != (_SIDE, _SIDE):  # NumPy would stretch a 1×1 picture over the whole
        raise ValueError(f"a picture has {picture.size} pixels, not {(_SIDE, _SIDE)}")
    return np.asarray(picture.convert("RGB"))


def _damaged(file: File, what: str, error: BaseException) -> DataError:
    return DataError(f"{file.place} is not {what}: {type(error).__name__}: {error}. Use another copy.")


def _uint8(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


class _Dtype:
    """Stands in for `numpy.dtype`: of its arguments only the name of the type counts, of its state nothing."""

    def __init__(self, name: object, *rest: object) -> None:
        self.bytes_ = name in ("u1", b"u1")

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stands in for `numpy.ndarray`, and for the function that makes one to fill."""

    values: Tensor

    def __init__(self, *description: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, (rows, columns), dtype, fortran, raw = state
        if not (isinstance(dtype, _Dtype) and dtype.bytes_ and isinstance(raw, bytes)):
            raise pickle.UnpicklingError("it holds an array of something else than bytes")
        self.values = _uint8(raw).reshape(columns, rows).T if fortran else _uint8(raw).reshape(rows, columns)


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # its name since NumPy 2
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _Unpickler(pickle.Unpickler):
    """Knows what an array is made of, and has harmless classes of its own for it: a pickle can call nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")
        return _STAND_INS[module, name]
