"""`log_softmax.read_out` of rows whose columns lie on several devices, cut between chunks.

    n rows, V vocabulary, v columns that lie here, k wanted logprobs.

The rounding points are those of `log_softmax`. A chunk's maximum and sum depend on that chunk alone, so each device
computes those of its own chunks; a device that has all of them merges them in order, as one device alone does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math, log_softmax, softmax_parts
from evalengine.kernels.launching.launch import launch

_PAIRS = 128  # logprobs that one program computes


@triton.jit(do_not_specialize_on_alignment=log_softmax.STATE)
def _part_kernel(
    logits_ptr, maxima_ptr, sums_ptr, row_ptr, greedy_ptr, stride, columns, chunks, first_column, own_columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The greedy choice of rows of which `own_columns` columns, from `first_column` on, lie here.

    The choice is 0 if the most probable token lies on another device. For a row that is NaN it is `columns` on the
    device that has column 0, and 0 on the others.
    """
    device_math.after_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    m, term, top, first = log_softmax.best_chunk(maxima_ptr, sums_ptr, row, chunks)
    start = first * BLOCK - first_column
    column = start + tl.arange(0, BLOCK)
    is_own = (start >= 0) & (start < own_columns)
    z = tl.load(logits_ptr + row * stride + column, is_own & (column < own_columns), float("-inf"))
    is_best = (softmax_parts.finish(z, m, term, True) == top) & is_own & (column < own_columns)
    best = tl.min(tl.where(is_best, column, columns), 0)
    found = tl.where(is_own, first_column + best, 0)
    has_first = (first_column == 0) & (own_columns > 0)
    found = tl.where(term == term, found, tl.where(has_first, columns, 0))
    tl.store(greedy_ptr + row, found.to(tl.int64))
    tl.store(row_ptr + 3 * row, m)
    tl.store(row_ptr + 3 * row + 1, term)
    tl.store(row_ptr + 3 * row + 2, tl.where(is_own, 1.0, 0.0))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=log_softmax.STATE)
def _gather_part_kernel(
    logits_ptr, row_ptr, rows_ptr, columns_ptr, out_ptr, count, stride, columns, first_column, own_columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p: logprobs of BLOCK (row, column) pairs; 0 for a column that lies on another device."""
    device_math.after_previous_kernel()
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < count
    row = tl.load(rows_ptr + pair, mask, 0)
    column = tl.load(columns_ptr + pair, mask, 0)
    m = tl.load(row_ptr + 3 * row, mask, 0.0)
    term = tl.load(row_ptr + 3 * row + 1, mask, 0.0)
    has_best = tl.load(row_ptr + 3 * row + 2, mask, 0.0) > 0
    place = tl.minimum(column, columns - 1) - first_column
    is_own = (column >= 0) & (place >= 0) & (place < own_columns)
    z = tl.load(logits_ptr + row * stride + place, mask & is_own, 0.0)
    z = tl.where(column < 0, m, z)  # All largest logprobs are equal; the maximum's is taken.
    is_here = tl.where(column < 0, has_best, is_own) | (term != term)
    tl.store(out_ptr + pair, tl.where(is_here, softmax_parts.finish(z, m, term, True), 0.0), mask)


def statistics(logits: Tensor) -> Tensor:
    """float32 logits [n, v] -> float32 [2, n, chunks]: every chunk's maximum, and its sum of exponentials below it.

    The logits are whole rows, or the columns of rows from a multiple of `softmax_parts.CHUNK` on, so that the chunks
    are those of the whole row.
    """
    n, own_columns = logits.shape
    chunks = triton.cdiv(own_columns, softmax_parts.CHUNK)
    result = torch.empty(2, n, chunks, dtype=torch.float32, device=logits.device)
    if n and chunks:
        launch(
            log_softmax.statistics_kernel, (n * chunks, 1, 1),
            (logits, result[0], result[1], n, logits.stride(0), own_columns, chunks),
            (softmax_parts.CHUNK,), 2 if n * chunks >= 4096 else 4, 1,
        )  # fmt: skip
    return result


def read_out_part(
    logits: Tensor, statistics: Tensor, first_column: int, vocabulary: int, rows: Tensor | None, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """One part of `read_out`: float32 logits [n, v] of the columns from `first_column` on, of rows of V = `vocabulary`
    columns whose `statistics` are float32 [2, n, chunks of V] -> (int64 [n], float32 [k]).

    A result of another part is 0 here, so the sums of all parts' results are the results of `read_out`.
    """
    n, own_columns = logits.shape
    chunks = statistics.shape[2]
    greedy = torch.empty(n, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(columns.shape[0], dtype=torch.float32, device=logits.device)
    if n == 0:
        return greedy, logprobs
    if rows is None:
        rows = torch.arange(n, device=logits.device)
    statistics = statistics.contiguous()
    state = torch.empty(n, 3, dtype=torch.float32, device=logits.device)
    stride = logits.stride(0)
    launch(
        _part_kernel, (n, 1, 1),
        (logits, statistics[0], statistics[1], state, greedy, stride, vocabulary, chunks, first_column, own_columns),
        (softmax_parts.CHUNK,), 4, 1,
    )  # fmt: skip
    wanted = logprobs.numel()
    if wanted:
        launch(
            _gather_part_kernel, (triton.cdiv(wanted, _PAIRS), 1, 1),
            (logits, state, rows.contiguous(), columns.contiguous(), logprobs, wanted, stride, vocabulary, first_column,
             own_columns),
            (_PAIRS,), 4, 1,
        )  # fmt: skip
    return greedy, logprobs
