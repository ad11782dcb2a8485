"""Mean over any dims.

    n rows, K numbers in a row.

Rounding points (NUMERICS.md, `native`): everything is float32; the mean is rounded once to the output dtype. A row is
cut at absolute multiples of `limits.MAX_TERMS` = 16384 numbers. A part is summed exactly on the grid 2^-44 of its own
largest magnitude, the sum rounded to float32 and divided by K; parts are added in order in float32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import row_sum
from evalengine.kernels.launching.launch import Launch, Replay, cache_launch, launch, operand_key
from evalengine.kernels.limits import MAX_TERMS

# Kinds of operands whose mean is one launch -> the launch, and the result's shape and dtype.
_launches: dict[tuple, tuple[Replay, torch.Size, torch.dtype]] = {}


@triton.jit
def _part_kernel(x_ptr, out_ptr, rows, columns, parts, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Program p: ROWS (row, part) pairs from p * ROWS on -> each part's sum / columns."""
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = unit // parts
    column = (unit % parts * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None] & (column < columns)
    x = tl.load(x_ptr + row[:, None] * columns + column, mask, 0.0).to(tl.float32)
    value = row_sum.mean(x, columns, 1)
    tl.store(out_ptr + unit, value.to(out_ptr.dtype.element_ty), row < rows)


@triton.jit
def _add_parts_kernel(parts_ptr, out_ptr, rows, parts, ROWS: tl.constexpr):
    """Program p: ROWS rows, whose parts it adds in order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    total = tl.load(parts_ptr + row * parts, mask, 0.0)
    for part in tl.range(1, parts, loop_unroll_factor=4):
        total += tl.load(parts_ptr + row * parts + part, mask, 0.0)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask)


def _schedule_for(block: int) -> tuple[int, int]:
    """Rows and warps of a program, for a tile of `block` columns: 16 to 32 elements a thread."""
    return max(1, 2048 // block), max(4, min(16, block // 1024))


def _mean_rows(x: Tensor, out: Tensor, schedule: tuple[int, int] | None) -> Launch | None:
    """contiguous [n, K] -> mean of each row, written to out [n]. Returns the launch if one does it all."""
    n, columns = x.shape
    block = min(MAX_TERMS, triton.next_power_of_2(columns))
    parts = triton.cdiv(columns, block)
    rows, warps = schedule or _schedule_for(block)
    values = out if parts == 1 else torch.empty(n, parts, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n * parts, rows), 1, 1)
    launched = launch(_part_kernel, grid, (x, values, n, columns, parts), (block, rows), warps, 3)
    if parts == 1:
        return launched
    launch(_add_parts_kernel, (triton.cdiv(n, 128), 1, 1), (values, out, n, parts), (128,), 4, 3)
    return None


def mean(
    x: Tensor,
    dim: int | tuple[int, ...],
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    *,
    _schedule: tuple[int, int] | None = None,
) -> Tensor:
    """Any shape and strides -> mean over `dim` (one or several; the empty tuple means all, as in torch).

    The result is rounded once to out_dtype (x's own by default). A mean over nothing is NaN, and so is one over an
    infinity or a NaN. ValueError for other dtypes than float32, bfloat16 and float16, and for a dim that x lacks.
    `_schedule` is (rows a program, warps), for tests and verify: it cannot change a bit.
    """
    key = (operand_key(x), dim, keepdim, out_dtype, _schedule)
    if remembered := _launches.get(key):
        replayer, shape, dtype = remembered
        out = torch.empty(shape, dtype=dtype, device=x.device)
        replayer(x, out)
        return out
    out_dtype = out_dtype or x.dtype
    for dtype in (x.dtype, out_dtype):
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"mean takes float32, bfloat16 and float16, not {dtype}")
    if x.ndim == 0:
        return mean(x[None], 0, out_dtype=out_dtype)
    named_axes = (dim,) if isinstance(dim, int) else tuple(dim) or tuple(range(x.ndim))
    if not all(-x.ndim <= axis < x.ndim for axis in named_axes):
        raise ValueError(f"mean over the dimensions {named_axes} of {x.ndim}")
    axes = sorted({axis % x.ndim for axis in named_axes})
    outer_shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    length = math.prod(x.shape[axis] for axis in axes)
    out = torch.empty(outer_shape, dtype=out_dtype, device=x.device)
    launched = None
    if length == 0:
        out.fill_(torch.nan)
    elif out.numel():
        moved = x.movedim(axes, list(range(x.ndim - len(axes), x.ndim)))
        rows = moved.reshape(out.numel(), length).contiguous()
        launched = _mean_rows(rows, out.view(-1), _schedule)
    for axis in axes if keepdim else []:
        out = out.unsqueeze(axis)
    if launched is not None and rows.data_ptr() == x.data_ptr():
        cache_launch(_launches, key, (launched.replayer(0, 1), out.shape, out_dtype))
    return out
