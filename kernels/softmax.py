"""Softmax, and the arithmetic of a row's normaliser that log_softmax shares.

    n rows, V columns (a vocabulary, or the keys of one attention row).

Rounding points (NUMERICS.md, `native`): everything is float32; the result is rounded once to the output dtype. A row
is cut at absolute multiples of `CHUNK` columns (a contract constant). In a chunk: m_c = max z, and l_c = the integer
sum of exp(z - m_c) on the grid 2^-44 (`row_sum`), rounded once. Chunks are merged left to right: M' = max(M, m_c),
l = fma(l, exp(M - M'), l_c * exp(m_c - M')). Then softmax = exp(z - M) / l and log_softmax = (z - M) - log(l).
Whether one program walks the chunks or each has its own is schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math, row_sum
from evalengine.kernels.device_math import GLUON
from evalengine.kernels.launch import launch

CHUNK = 4096  # contract constant
ASYNC_COPIES = (8, 0)  # compute capability


@dataclass(frozen=True)
class Schedule:
    """How rows meet programs. It changes no bit."""

    rows: int = 1  # of a program that walks its rows' chunks
    warps: int = 4
    resident: bool = False  # `softmax_resident`, which has a program per (row, chunk); what is above is then its own


REFERENCE = Schedule()
excluded: set[Schedule] = set()  # what kernels/verify.py found wrong on this GPU: never chosen in this process


@triton.jit
def finite(m):
    """A row's maximum, or 0 in place of -inf: exp(z - 0) is then 0 where exp(-inf + inf) would be NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def fixed_terms(z, m):
    """exp(z - m) as integers to add, m broadcast to z; where m is not finite, any numbers."""
    return row_sum.to_fixed(device_math.exp(z - finite(m)))


@triton.jit
def chunk_sum(z):
    """float32 tile [rows, columns of one chunk] (masked columns -inf) -> its maxima m and sums of exp(z - m), [rows].

    A maximum is not finite where the row holds a +inf or a NaN; its sum is then any number.
    """
    m = device_math.row_max(z, 1)
    return m, row_sum.from_fixed(tl.sum(fixed_terms(z, m[:, None]), 1))


@triton.jit
def merge_factors(m, top, chunk_m, chunk_norm):
    """A row's M before a chunk and with it (top), and the chunk's -> (a, b) of l' = fma(l, a, b)."""
    shift = finite(top)
    return device_math.exp(m - shift), chunk_norm * device_math.exp(chunk_m - shift)


@triton.jit
def merge(m, norm, chunk_m, chunk_norm):
    """A row's M and l so far, and the next chunk's -> with it. A chunk of -inf changes nothing."""
    top = tl.maximum(m, chunk_m, propagate_nan=tl.PropagateNan.ALL)
    a, b = merge_factors(m, top, chunk_m, chunk_norm)
    return top, tl.fma(norm, a, b)


@triton.jit
def norm_term(m, norm, LOG: tl.constexpr):
    """log(l), or l; NaN where the row's maximum is not a finite number."""
    term = device_math.log(norm) if LOG else norm
    return tl.where(tl.abs(m) < float("inf"), term, float("nan"))


@triton.jit
def finish(z, m, term, LOG: tl.constexpr):
    """(z - M) - log(l), or exp(z - M) / l; m and term broadcast to z."""
    shifted = z - finite(m)
    if LOG:
        return shifted - term
    return tl.div_rn(device_math.exp(shifted), term)


@triton.jit
def load_chunk(x_ptr, row, rows, stride, start, columns, BLOCK: tl.constexpr):
    """float32 [len(row), BLOCK] from column `start` on; -inf outside the tensor."""
    column = start + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x_ptr + row[:, None] * stride + column[None, :], mask, float("-inf")).to(tl.float32)


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
    """A program holds ROWS rows: one chunk stays in registers, several are read again from the cache."""
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


@triton.jit
def merge_row(maxima_ptr, sums_ptr, chunks):
    """Chunk maxima and sums of one row -> M, l and the first chunk that holds M (scalars)."""
    m = tl.load(maxima_ptr)
    norm = tl.load(sums_ptr)
    first = tl.zeros_like(m).to(tl.int32)
    for chunk in tl.range(1, chunks, loop_unroll_factor=4):
        chunk_m = tl.load(maxima_ptr + chunk)
        first = tl.where(chunk_m > m, chunk, first)
        m, norm = merge(m, norm, chunk_m, tl.load(sums_ptr + chunk))
    return m, norm, first


def choose(x: Tensor) -> Schedule:
    """The schedule for [n, V] on its device: never one that kernels/verify.py found wrong there."""
    schedule = _choose(x)
    return REFERENCE if schedule in excluded else schedule


def _choose(x: Tensor) -> Schedule:
    n, columns = x.shape
    if _should_stay(n, columns, x.element_size()) and _resident_covers(x):
        return Schedule(resident=True)
    return Schedule(rows=max(1, 2048 // triton.next_power_of_2(columns)))


def _resident_covers(x: Tensor) -> bool:
    if not GLUON or torch.cuda.get_device_capability(x.device) < ASYNC_COPIES:
        return False
    try:
        from evalengine.kernels import softmax_resident
    except (ImportError, AttributeError):  # a Triton whose Gluon has other names
        return False
    return softmax_resident.covers(x)


def _should_stay(n: int, columns: int, element_size: int) -> bool:
    """Whether keeping rows on the chip is quicker than reading them twice, on an H200.

    Many rows of half precision are bound by arithmetic, not by memory (8192 x 151,936 bfloat16: 2.34 ms against 1.84
    ms read twice); few rows leave SMs idle if each has one program (one row of 151,936: 10 us against 69 us). What lies
    in the L2 cache is read again at no cost.
    """
    if element_size < 4:
        return columns > 4 * CHUNK and n <= 256
    return columns > 4 * CHUNK or (columns > 2 * CHUNK and n * columns >= 1 << 24)


def normalize_rows(x: Tensor, out: Tensor, *, log: bool, schedule: Schedule | None) -> None:
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


def along(x: Tensor, dim: int, out_dtype: torch.dtype | None, *, log: bool, schedule: Schedule | None) -> Tensor:
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
    x: Tensor, dim: int = -1, out_dtype: torch.dtype | None = None, *, _schedule: Schedule | None = None
) -> Tensor:
    """Any shape and strides, any dim -> contiguous softmax in out_dtype (x's own by default), rounded once.

    A row that holds +inf or NaN, or nothing above -inf, becomes NaN as a whole. ValueError for other dtypes than
    float32, bfloat16 and float16.
    """
    return along(x, dim, out_dtype, log=False, schedule=_schedule)
