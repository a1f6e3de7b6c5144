"""The squared products on a GPU: squares are taken in the epilogue of a matrix product, and nothing else is written."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tiles of the result, length of a step along the positions, stages, warps: for results with many tiles, and with few.
_LARGE = (128, 256, 64, 3, 8)
_SMALL = (64, 128, 64, 4, 4)
# Without matrix units every product is an instruction: longer steps are longer code, which takes seconds to compile.
_EXACT = (64, 128, 16, 4, 4)
# A result with fewer tiles than this leaves multiprocessors idle: its examples are shared out among several programs.
_PROGRAMS = 264


@triton.jit(do_not_specialize=["examples", "per_share"])  # else compiled anew for numbers that change nothing
def _kernel(
    left, right, total, parts, examples, positions, rows, columns,
    left_example, left_group, left_position, left_row, right_example, right_group, right_position, right_column,
    per_share,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.program_id(1)
    group = tl.program_id(2)
    position = tl.arange(0, STEP)
    left_tile = left + group * left_group + row[:, None].to(tl.int64) * left_row + position[None, :] * left_position
    right_tile = (
        right + group * right_group + column[None, :].to(tl.int64) * right_column + position[:, None] * right_position
    )
    squares = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for example in range(share * per_share, tl.minimum((share + 1) * per_share, examples)):
        product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        left_at = left_tile + tl.cast(example, tl.int64) * left_example
        right_at = right_tile + tl.cast(example, tl.int64) * right_example
        for start in range(0, positions, STEP):
            inside = position < positions - start
            a = tl.load(left_at, mask=(row[:, None] < rows) & inside[None, :], other=0.0)
            b = tl.load(right_at, mask=(column[None, :] < columns) & inside[:, None], other=0.0)
            product = tl.dot(a, b, product, input_precision=PRECISION)
            left_at += STEP * left_position
            right_at += STEP * right_position
        squares += product * product
    place = (group * rows + row[:, None]).to(tl.int64) * columns + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    if share == 0:
        tl.store(total + place, tl.load(total + place, mask=inside, other=0.0) + squares, mask=inside)
    else:
        tl.store(parts + (share - 1).to(tl.int64) * tl.num_programs(2) * rows * columns + place, squares, mask=inside)


def squared_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add Σₙ (leftₙᵀ rightₙ)² to total (groups, rows, columns), for left (batch, groups, positions, rows)."""
    examples, groups, positions, rows = left.shape
    columns = right.shape[-1]
    if not examples:
        return
    precision = _precision(left)
    room = _shared_memory(total.device)
    height, width, step, stages, warps = tiling(rows, columns, left.element_size(), precision, room)
    tiles = -(-rows // height) * -(-columns // width)
    per_share = -(-examples // max(1, min(examples, _PROGRAMS // (tiles * groups))))
    shares = -(-examples // per_share)
    # The first share adds to the total; the others are added after it, in one order whatever the GPU's.
    parts = total.new_empty(shares - 1, groups, rows, columns) if shares > 1 else total
    with _on(total.device):
        _kernel[(tiles, shares, groups)](
            left, right, total, parts, examples, positions, rows, columns, *left.stride(), *right.stride(), per_share,
            PRECISION=precision, ROWS=height, COLUMNS=width, STEP=step, num_stages=stages, num_warps=warps,
        )  # fmt: skip
    if shares > 1:
        total += parts.sum(0)


def tiling(rows: int, columns: int, size: int, precision: str, room: int) -> tuple[int, int, int, int, int]:
    """Tiles, step, stages and warps for factors of so many bytes an entry, with as much shared memory as there is."""
    many = -(-rows // 128) * -(-columns // 256) >= _PROGRAMS // 2
    few = _EXACT if precision == "ieee" else _SMALL
    height, width, step, stages, warps = _LARGE if many and size == 2 else few
    return height, width, step, max(1, min(stages, room // ((height + width) * step * size))), warps


def _on(device: torch.device) -> AbstractContextManager[None]:
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on a multiprocessor: stages beyond them would not start."""
    least = 99 * 2**10 if torch.version.cuda else 2**16  # where torch cannot say
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", least))


def _precision(left: Tensor) -> str:
    """As torch's own products: float32 factors are rounded to ten bits only where the user allows it."""
    rounded = left.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounded else "ieee"
