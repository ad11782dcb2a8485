"""Log-softmax, and reading logprobs out of logits without making the whole table of them.

    n rows (positions), V vocabulary, k wanted logprobs.

Rounding points (NUMERICS.md, `native`): logits are float32; chunks of 4096 columns at absolute multiples, each with its
maximum and its integer sum of exponentials, merged left to right in float32 (`softmax_parts`); a logprob is
(z - M) - log(l) in float32, rounded once to the output dtype. `read_out` gives the bytes that `log_softmax` gives, from
one reading; `log_softmax_parts` does where a row's columns lie on several devices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math, row_sum, softmax, softmax_parts
from evalengine.kernels.launching.launch import launch

_GATHER = 128  # logprobs that one program computes
# Each thread accesses one element of these, so their alignment does not affect the code; nor does the row count.
STATE = ["maxima_ptr", "sums_ptr", "row_ptr", "greedy_ptr", "rows_ptr", "columns_ptr", "out_ptr"]


def log_softmax(
    x: Tensor, dim: int = -1, out_dtype: torch.dtype | None = None, *, _schedule: softmax.SoftmaxSchedule | None = None
) -> Tensor:
    """Any shape and strides, any dim -> contiguous log_softmax in out_dtype (x's own by default), rounded once.

    A row that holds +inf or NaN, or nothing above -inf, becomes NaN as a whole. ValueError for other dtypes than
    float32, bfloat16 and float16.
    """
    return softmax.along(x, dim, out_dtype, log=True, schedule=_schedule)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=STATE)
def statistics_kernel(logits_ptr, maxima_ptr, sums_ptr, rows, stride, columns, chunks, BLOCK: tl.constexpr):
    """Program u: maximum and sum of unit u, a chunk of a row."""
    device_math.after_previous_kernel()
    unit = tl.program_id(0)
    row = (unit // chunks).to(tl.int64) + tl.arange(0, 1)
    z = softmax_parts.load_chunk(logits_ptr, row, rows, stride, unit % chunks * BLOCK, columns, BLOCK)
    m, norm = softmax_parts.chunk_sum(z)
    place = unit.to(tl.int64) + tl.arange(0, 1)
    tl.store(maxima_ptr + place, m)
    tl.store(sums_ptr + place, norm)


@triton.jit
def _wanted_logit(logits_ptr, row, stride, columns, columns_ptr, EACH: tl.constexpr):
    """The one column whose logprob the row needs, and its logit. These loads depend on no other, so they come
    first."""
    column = tl.full([], -1, tl.int64)
    z = tl.full([], 0.0, tl.float32)
    if EACH:
        column = tl.load(columns_ptr + row)
        z = tl.load(logits_ptr + row * stride + tl.minimum(tl.maximum(column, 0), columns - 1))
    return column, z


@triton.jit
def _leave(row, columns, best, m, term, column, z, row_ptr, greedy_ptr, out_ptr, EACH: tl.constexpr):
    """Stores the results of a row: its first column of the largest logprob, and its wanted logprob (EACH) or the state
    from which `_gather_kernel` computes logprobs."""
    tl.store(greedy_ptr + row, tl.where(term == term, best, columns).to(tl.int64))
    if EACH:
        z = tl.where(column < 0, m, z)  # All largest logprobs are equal; the maximum's is taken.
        tl.store(out_ptr + row, softmax_parts.finish(z, m, term, True))
    else:
        tl.store(row_ptr + 2 * row, m)
        tl.store(row_ptr + 2 * row + 1, term)


@triton.jit
def best_chunk(maxima_ptr, sums_ptr, row, chunks):
    """A row's statistics, merged -> its M, its log l, its largest logprob, and the first chunk that holds that one.

    Logits that differ can have equal logprobs (subtracting log l rounds), so logprobs are compared, as they are in a
    whole table of them. Rounding is monotonic, so comparing the chunks' maxima is enough.
    """
    m, norm, last = softmax_parts.merge_row(maxima_ptr + row * chunks, sums_ptr + row * chunks, chunks)
    term = softmax_parts.norm_term(m, norm, True)
    top = softmax_parts.finish(m, m, term, True)
    first = last
    for back in tl.range(0, last):
        chunk = last - 1 - back
        chunk_top = softmax_parts.finish(tl.load(maxima_ptr + row * chunks + chunk), m, term, True)
        first = tl.where(chunk_top == top, chunk, first)
    return m, term, top, first


@triton.jit(do_not_specialize_on_alignment=STATE)
def _greedy_kernel(
    logits_ptr, maxima_ptr, sums_ptr, row_ptr, greedy_ptr, columns_ptr, out_ptr, stride, columns, chunks,
    BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """A program a row: merges its chunks, then looks for the first column of the largest logprob (`best_chunk`)."""
    device_math.after_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    wanted, z_wanted = _wanted_logit(logits_ptr, row, stride, columns, columns_ptr, EACH)
    m, term, top, first = best_chunk(maxima_ptr, sums_ptr, row, chunks)
    column = first * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + row * stride + column, column < columns, float("-inf"))
    best = tl.min(tl.where((softmax_parts.finish(z, m, term, True) == top) & (column < columns), column, columns), 0)
    _leave(row, columns, best, m, term, wanted, z_wanted, row_ptr, greedy_ptr, out_ptr, EACH)


@triton.jit
def _sum_and_least(sum_1, least_1, sum_2, least_2):
    return sum_1 + sum_2, tl.minimum(least_1, least_2)


@triton.jit(do_not_specialize_on_alignment=STATE)
def _one_chunk_kernel(
    logits_ptr, row_ptr, greedy_ptr, columns_ptr, out_ptr, stride, columns, BLOCK: tl.constexpr, EACH: tl.constexpr
):
    """A program a row of at most one chunk: statistics and greedy choice in one kernel, which reads the logits once.

    A logit with the largest logprob lies within half an ulp of log l (below 16) of the maximum. So only a group of 4
    columns whose maximum does can hold one, and the first such group nearly always does. Comparing every column, with
    another kernel for the single logprobs, took 47 us for 8192 x 4096 on an H200, this takes 38 (a copy: 33.5).
    """
    GROUPS: tl.constexpr = BLOCK // 4
    device_math.after_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    wanted, z_wanted = _wanted_logit(logits_ptr, row, stride, columns, columns_ptr, EACH)
    group, member = tl.arange(0, GROUPS), tl.arange(0, 4)
    column = 4 * group[:, None] + member[None, :]
    z = tl.load(logits_ptr + row * stride + column, column < columns, float("-inf"))
    maxima = device_math.row_max(z, 1)
    m = device_math.row_max(maxima, 0)
    sums = tl.sum(softmax_parts.fixed_terms(z, m), 1)
    near = tl.where(maxima - softmax_parts.finite(m) >= -9.5367431640625e-07, group, GROUPS)  # 2^-20
    total, first = tl.reduce((sums, near), 0, _sum_and_least)
    term = softmax_parts.norm_term(m, row_sum.from_fixed(total), True)
    top = softmax_parts.finish(m, m, term, True)
    place = 4 * first + member
    some = tl.load(logits_ptr + row * stride + place, place < columns, float("-inf"))
    best = tl.min(tl.where((softmax_parts.finish(some, m, term, True) == top) & (place < columns), place, columns), 0)
    if best == columns:
        is_best = (softmax_parts.finish(z, m, term, True) == top) & (column < columns)
        best = tl.min(tl.min(tl.where(is_best, column, columns), 1), 0)
    _leave(row, columns, best, m, term, wanted, z_wanted, row_ptr, greedy_ptr, out_ptr, EACH)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=STATE)
def _gather_kernel(
    logits_ptr, row_ptr, greedy_ptr, rows_ptr, columns_ptr, out_ptr, count, stride, columns, BLOCK: tl.constexpr
):
    """Program p: logprobs of BLOCK (row, column) pairs."""
    device_math.after_previous_kernel()
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < count
    row = tl.load(rows_ptr + pair, mask, 0)
    column = tl.load(columns_ptr + pair, mask, 0)
    column = tl.where(column < 0, tl.load(greedy_ptr + row, mask, 0), column)
    column = tl.minimum(column, columns - 1)
    z = tl.load(logits_ptr + row * stride + column, mask, 0.0)
    m = tl.load(row_ptr + 2 * row, mask, 0.0)
    term = tl.load(row_ptr + 2 * row + 1, mask, 0.0)
    tl.store(out_ptr + pair, softmax_parts.finish(z, m, term, True), mask)


def read_out(logits: Tensor, rows: Tensor | None, columns: Tensor) -> tuple[Tensor, Tensor]:
    """float32 logits [n, V] of any row stride, int64 rows [k], columns [k] -> (int64 [n], float32 [k]).

    The first result is the position of each row's largest logprob, the lowest among equals; V where a row's log_softmax
    is NaN. The second is log_softmax(logits)[rows, columns]; a column below 0 stands for the row's first result, one
    above V - 1 is read as V - 1. Without rows, columns [n] has one for each row, which takes a launch less.
    """
    if logits.dtype != torch.float32 or logits.ndim != 2:
        raise ValueError(f"read_out takes float32 [n, V], not {logits.dtype} {list(logits.shape)}")
    n, vocabulary = logits.shape
    if rows is None and columns.shape != (n,):
        raise ValueError(f"read_out takes one column for each of {n} rows, not {list(columns.shape)}; or rows as well")
    greedy = torch.empty(n, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(columns.shape[0], dtype=torch.float32, device=logits.device)
    if n == 0:
        return greedy, logprobs
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    columns = columns.contiguous()
    stride, chunks = logits.stride(0), triton.cdiv(vocabulary, softmax_parts.CHUNK)
    row_state = None if rows is None else torch.empty(n, 2, dtype=torch.float32, device=logits.device)
    left = (row_state, greedy, columns, logprobs)
    if chunks == 1:
        block = max(4, triton.next_power_of_2(vocabulary))
        warps = max(1, block // 1024)
        launch(_one_chunk_kernel, (n, 1, 1), (logits, *left, stride, vocabulary), (block, rows is None), warps, 1)
    else:
        maxima, sums = torch.empty(2, n, chunks, dtype=torch.float32, device=logits.device)
        launch(
            statistics_kernel, (n * chunks, 1, 1), (logits, maxima, sums, n, stride, vocabulary, chunks),
            (softmax_parts.CHUNK,), 2 if n * chunks >= 4096 else 4, 1,
        )  # fmt: skip
        launch(
            _greedy_kernel, (n, 1, 1), (logits, maxima, sums, *left, stride, vocabulary, chunks),
            (softmax_parts.CHUNK, rows is None), 4, 1,
        )  # fmt: skip
    if rows is not None:
        wanted = logprobs.numel()
        launch(
            _gather_kernel, (triton.cdiv(wanted, _GATHER), 1, 1),
            (logits, row_state, greedy, rows.contiguous(), columns, logprobs, wanted, stride, vocabulary),
            (_GATHER,), 4, 1,
        )  # fmt: skip
    return greedy, logprobs
