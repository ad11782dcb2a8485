"""Parts of the kernels of recurrences: chunks of 64 tokens at absolute positions, and products of float32 operands.

A recurrence's state is updated once a chunk. The chunk's own tokens, its rows, are stored with the state until then, so
a step may begin and end at any row. A chunk is closed (its rows enter the state) by the step that begins the next one:
until then a row may be computed again or dropped.

Tensor cores multiply bfloat16. An operand enters as a sum of bfloat16 terms, cut from its bits, which is exact; of the
products of terms the largest six are added up in a fixed order, the smallest first (NUMERICS.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import INTERPRETED

CHUNK = tl.constexpr(64)

if INTERPRETED:

    @triton.jit
    def _dot(x, y, acc):
        # In float64 numpy's order, which depends on the operands' shapes, is not seen.
        wide = tl.dot(x.to(tl.float64), y.to(tl.float64), acc.to(tl.float64), out_dtype=tl.float64)
        return wide.to(tl.float32)

    @triton.jit
    def chain_dot(x, y, acc):
        K: tl.constexpr = x.shape[1]
        j = tl.arange(0, K)
        for k in range(K):
            a = tl.sum(tl.where((j == k)[None, :], x, 0.0), 1)
            b = tl.sum(tl.where((j == k)[:, None], y, 0.0), 0)
            acc = tl.fma(tl.broadcast_to(a[:, None], acc.shape), tl.broadcast_to(b[None, :], acc.shape), acc)
        return acc

else:

    @triton.jit
    def _dot(x, y, acc):
        return tl.dot(x, y, acc)

    @triton.jit
    def chain_dot(x, y, acc):
        """acc + x y in float32: an ascending chain of fused multiply-adds for each element."""
        return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def _upper(x):
    """float32 -> its upper half, as bfloat16: cut, not rounded."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _rest(x):
    """float32 -> x without its upper half, exactly."""
    return x - (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def terms(x):
    """bfloat16 tensors whose sum is x, the largest first: one of a bfloat16 x, two of float16, three of float32."""
    if x.dtype == tl.bfloat16:
        result = (x,)
    else:
        wide = x.to(tl.float32)
        rest = _rest(wide)
        result = (_upper(wide), _upper(rest))
        if x.dtype == tl.float32:
            result += (_upper(_rest(rest)),)
    return result


@triton.jit
def dot(x, acc, y):
    """acc + x y of two operands in terms: one chain over the pairs of terms, the smallest first.

    The sum so far stands between the operands because Triton knows a function by the types of its arguments in a row:
    one term and three would be taken for three and one (3.6 did)."""
    for larger in tl.static_range(3):
        for j in tl.static_range(3 - larger):
            if j < len(y) and 2 - larger - j < len(x):
                acc = _dot(x[2 - larger - j], y[j], acc)
    return acc


@triton.jit
def chunk_of_program(p, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots):
    """Chunk p of this step -> the token of the step that its row 0 would be; its new rows [begin, end), none if end <=
    begin, as in padding; and of its sequence: the slot of what is before the step, the end of its tokens in the step,
    and its length so far."""
    s, c = tl.load(chunk_sequence + p), tl.load(chunk_number + p)
    slot = tl.load(start_slots + s).to(tl.int64)
    first, last, length = tl.load(cu_seqlens + s), tl.load(cu_seqlens + s + 1), tl.load(seqlens + s)
    before = (length - (last - first)) % CHUNK
    begin = tl.where(c == 0, before, 0)
    end = tl.where(slot < 0, begin, tl.minimum(CHUNK, before + last - first - CHUNK * c))
    return first - before + CHUNK * c, begin, end, slot, last, length


@triton.jit
def load_rows(pool_at, step_at, old, new):
    """Load a chunk's rows: the old ones from the pool, the new ones from the step's operands; zeros elsewhere."""
    return tl.where(old, tl.load(pool_at, mask=old, other=0.0), tl.load(step_at, mask=new, other=0.0))


@triton.jit
def end_factors(total, factor):
    """The decay of the state to the chunk's end, exp(G_63), and each row's factor with it: exp(G_63 - G_j) factor_j."""
    row = tl.arange(0, CHUNK)
    last = tl.sum(tl.where(row == CHUNK - 1, total, 0.0), 0)
    return device_math.exp(last), device_math.exp(last - total) * factor


@triton.jit
def sequences_to_close(cu_seqlens, seqlens, state_slots, sequences, S: tl.constexpr):
    """How many sequences begin a chunk in this step behind another one; and, of all [S], the place among these (-1: it
    does not), the slot, and the tokens before the step."""
    s = tl.arange(0, S)
    real = s < sequences
    n = tl.load(cu_seqlens + s + 1, mask=real, other=0) - tl.load(cu_seqlens + s, mask=real, other=0)
    starts = tl.load(seqlens + s, mask=real, other=0) - n
    slots = tl.load(state_slots + s, mask=real, other=-1)
    closes = ((slots >= 0) & (n > 0) & (starts > 0) & (starts % CHUNK == 0)).to(tl.int32)
    return tl.sum(closes, 0), tl.where(closes == 1, tl.cumsum(closes, 0) - 1, -1), slots, starts


@triton.jit
def gate_sums_kernel(
    gates_ptr, sums_ptr, sums_pool, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots,
    HV: tl.constexpr, HVP: tl.constexpr,
):  # fmt: skip
    """Program (chunk): the sums of its gates [HV, 64], each one ascending chain."""
    device_math.after_previous_kernel()
    p = tl.program_id(0)
    chunk = chunk_of_program(p, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots)
    token, begin, end, slot, _, _ = chunk
    if end <= begin:
        return
    head = tl.arange(0, HVP)
    real = head < HV
    total = tl.zeros((HVP,), tl.float32)
    for block in range(0, CHUNK, 32):
        # Load all first: a load cannot be moved above a store that may alias it. Old rows hold sums.
        gates = ()
        for i in tl.static_range(32):
            row = block + i
            old = tl.load(sums_pool + (slot * HV + head) * CHUNK + row, mask=real & (row < begin), other=0.0)
            new = real & (row >= begin) & (row < end)
            gate = tl.load(gates_ptr + (token + row).to(tl.int64) * HV + head, mask=new, other=0.0)
            gates += (tl.where(row < begin, old, gate),)  # type: ignore[assignment]
        for i in tl.static_range(32):
            total = tl.where(block + i < begin, gates[i], total + gates[i])
            tl.store(sums_ptr + (p * HV + head) * CHUNK + block + i, total, mask=real)


@triton.jit
def store_terms(at, stride, x, real):
    """Stores the three terms of an operand."""
    a, b, c = terms(x)
    tl.store(at, a, mask=real)
    tl.store(at + stride, b, mask=real)
    tl.store(at + 2 * stride, c, mask=real)


@triton.jit
def load_state(at, value, before, V: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """Rows of the state, in parts of its columns; zeros where no chunk was closed before."""
    state = ()
    for part in tl.static_range(PARTS):
        key = part * PART + tl.arange(0, PART)
        real = (value < V)[:, None] & (key < K)[None, :] & before
        state += (tl.load(at + value[:, None] * K + key[None, :], mask=real, other=0.0),)  # type: ignore[assignment]
    return state


@triton.jit
def load_terms(at, stride, real):
    """The three terms of an operand."""
    return (
        tl.load(at, mask=real, other=0.0),
        tl.load(at + stride, mask=real, other=0.0),
        tl.load(at + 2 * stride, mask=real, other=0.0),
    )


def padded(sequences: int) -> int:
    """The S of `sequences_to_close`: the same for most steps, so that they have one variant of a kernel."""
    return max(256, triton.next_power_of_2(sequences))
