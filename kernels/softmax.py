"""Softmax over rows, and how the rows of softmax and log_softmax are spread over programs.

    n rows, V columns (a vocabulary, or the keys of one attention row).

The arithmetic is that of `softmax_parts`. Whether one program walks a row's chunks or each chunk has its own program is
schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels.device_math import GLUON
from evalengine.kernels.launching.launch import launch
from evalengine.kernels.softmax_parts import CHUNK, chunk_sum, finish, load_chunk, merge, norm_term

ASYNC_COPIES = (8, 0)  # the least compute capability with asynchronous copies


@dataclass(frozen=True)
class SoftmaxSchedule:
    """How rows are spread over programs. No choice here changes a bit."""

    rows: int = 1  # rows of a program that walks its rows' chunks
    warps: int = 4
    resident: bool = False  # by `softmax_resident`, whose programs each hold chunks; it ignores the fields above


REFERENCE = SoftmaxSchedule()
# Schedules that evalengine/verification found wrong on this GPU; this process never chooses them.
excluded: set[SoftmaxSchedule] = set()


@triton.jit
def _store_chunk(out_ptr, value, row, rows, start, columns, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    out = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * columns + column[None, :], out, mask, eviction_policy="evict_first")


@triton.jit
def _walk_kernel(
    x_ptr, out_ptr, rows, stride, columns, BLOCK: tl.constexpr, ROWS: tl.constexpr, ONE: tl.constexpr, LOG: tl.constexpr
):
    """A program does ROWS rows. A single chunk stays in registers; several are read again from the cache."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    z = load_chunk(x_ptr, row, rows, stride, 0, columns, BLOCK)
    m, norm = chunk_sum(z)
    if ONE:
        value = finish(z, m[:, None], norm_term(m, norm, LOG)[:, None], LOG)
        _store_chunk(out_ptr, value, row, rows, 0, columns, BLOCK)
    else:
        for start in range(BLOCK, columns, BLOCK):
            chunk_m, chunk_norm = chunk_sum(load_chunk(x_ptr, row, rows, stride, start, columns, BLOCK))
            m, norm = merge(m, norm, chunk_m, chunk_norm)
        term = norm_term(m, norm, LOG)
        for start in range(0, columns, BLOCK):
            z = load_chunk(x_ptr, row, rows, stride, start, columns, BLOCK)
            _store_chunk(out_ptr, finish(z, m[:, None], term[:, None], LOG), row, rows, start, columns, BLOCK)


def choose(x: Tensor) -> SoftmaxSchedule:
    """The schedule for [n, V] on its device: never one that evalengine/verification found wrong there."""
    schedule = preferred(x)
    return REFERENCE if schedule in excluded else schedule


def preferred(x: Tensor) -> SoftmaxSchedule:
    """The schedule that `choose` returns where nothing is excluded."""
    n, columns = x.shape
    if _should_stay(n, columns, x.element_size()) and _resident_covers(x):
        return SoftmaxSchedule(resident=True)
    return SoftmaxSchedule(rows=max(1, 2048 // triton.next_power_of_2(columns)))


def _resident_covers(x: Tensor) -> bool:
    if not GLUON or torch.cuda.get_device_capability(x.device) < ASYNC_COPIES:
        return False
    try:
        from evalengine.kernels import softmax_resident
    except (ImportError, AttributeError):  # This Triton's Gluon has other names.
        return False
    return softmax_resident.covers(x)


def _should_stay(n: int, columns: int, element_size: int) -> bool:
    """Whether keeping rows on the chip is quicker than reading them twice, on an H200.

    Many rows of half precision are bound by arithmetic, not by memory (8192 x 151,936 bfloat16: 2.34 ms against 1.84
    ms read twice); few rows leave SMs idle if each has one program (one row of 151,936: 10 us against 69 us). A row
    that is in the L2 cache is read again at no cost.
    """
    if element_size < 4:
        return columns > 4 * CHUNK and n <= 256
    return columns > 4 * CHUNK or (columns > 2 * CHUNK and n * columns >= 1 << 24)


def normalize_rows(x: Tensor, out: Tensor, *, log: bool, schedule: SoftmaxSchedule | None) -> None:
    """[n, V] of any row stride, contiguous [n, V] -> softmax or log_softmax of each row, written to `out`."""
    n, columns = x.shape
    s = schedule or choose(x)
    if s.resident:
        from evalengine.kernels import softmax_resident

        softmax_resident.normalize_rows(x, out, log=log)
        return
    block = min(CHUNK, triton.next_power_of_2(columns))
    launch(
        _walk_kernel, (triton.cdiv(n, s.rows), 1, 1), (x, out, n, x.stride(0), columns),
        (block, s.rows, columns <= CHUNK, log), s.warps, 3,
    )  # fmt: skip


def along(x: Tensor, dim: int, out_dtype: torch.dtype | None, *, log: bool, schedule: SoftmaxSchedule | None) -> Tensor:
    """softmax or log_softmax of x along `dim` -> contiguous, x's shape."""
    out_dtype = out_dtype or x.dtype
    for dtype in (x.dtype, out_dtype):
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"softmax and log_softmax take float32, bfloat16 and float16, not {dtype}")
    if x.ndim == 0:
        return along(x[None], 0, out_dtype, log=log, schedule=schedule)[0]
    moved = x.movedim(dim, -1)
    out = torch.empty(moved.shape, dtype=out_dtype, device=x.device)
    if out.numel():
        rows = moved.reshape(-1, moved.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        normalize_rows(rows, out.view(rows.shape), log=log, schedule=schedule)
    return out.movedim(-1, dim).contiguous()


def softmax(
    x: Tensor, dim: int = -1, out_dtype: torch.dtype | None = None, *, _schedule: SoftmaxSchedule | None = None
) -> Tensor:
    """Any shape and strides, any dim -> contiguous softmax in out_dtype (x's own by default), rounded once.

    A row that holds +inf or NaN, or nothing above -inf, becomes NaN as a whole. ValueError for other dtypes than
    float32, bfloat16 and float16.
    """
    return along(x, dim, out_dtype, log=False, schedule=_schedule)
