"""The parts that softmax and log_softmax share: the arithmetic of a row's normaliser, written only here.

    n rows, V columns.

Rounding points (NUMERICS.md, `native`): everything is float32; the result is rounded once to the output dtype. A row
is cut at absolute multiples of `CHUNK` columns (a contract constant). In a chunk: m_c = max z, and l_c = the integer
sum of exp(z - m_c) on the grid 2^-44 (`row_sum`), rounded once. Chunks are merged left to right: M' = max(M, m_c),
l = fma(l, exp(M - M'), l_c * exp(m_c - M')). Then softmax = exp(z - M) / l and log_softmax = (z - M) - log(l).
"""

from __future__ import annotations

import triton
import triton.language as tl

from evalengine.kernels import device_math, row_sum

CHUNK = 4096  # contract constant: columns, at whose absolute multiples a row is cut


@triton.jit
def finite(m):
    """A row's maximum, or 0 in place of -inf: exp(z - 0) is then 0 where exp(-inf + inf) would be NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def fixed_terms(z, m):
    """exp(z - m) as integers to add, m broadcast to z; the integers are arbitrary where m is not finite."""
    return row_sum.to_fixed(device_math.exp(z - finite(m)))


@triton.jit
def chunk_sum(z):
    """float32 tile [rows, columns of one chunk] (masked columns -inf) -> its maxima m and sums of exp(z - m), [rows].

    A maximum is not finite where the row holds a +inf or a NaN; its sum is then arbitrary.
    """
    m = device_math.row_max(z, 1)
    return m, row_sum.from_fixed(tl.sum(fixed_terms(z, m[:, None]), 1))


@triton.jit
def merge_factors(m, top, chunk_m, chunk_norm):
    """A row's maximum before a chunk and with it (top), the chunk's maximum and sum -> (a, b) of l' = fma(l, a, b)."""
    shift = finite(top)
    return device_math.exp(m - shift), chunk_norm * device_math.exp(chunk_m - shift)


@triton.jit
def merge(m, norm, chunk_m, chunk_norm):
    """Returns a row's running maximum M and sum l after adding the next chunk. A chunk of -inf changes neither."""
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
