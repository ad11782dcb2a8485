"""The selective state space of Mamba-2 in chunks of 64 tokens, over ragged sequences with a state each.

    T tokens, S sequences, H heads, P head_dim, G groups, N state_dim, R slots of the pools, C = 64.

In a chunk with start state S [P, N], whose row i has the gates' sum G_i (from the chunk's first row on) and time step
dt_i, clamped to its limits in prefill and decode (transformers does so in prefill only):

    M_ij = exp(G_i - G_j) dt_j (C_i B_j), j <= i
    o_i = exp(G_i) (S C_i) + sum_j M_ij x_j + D x_i
    S'  = exp(G_63) S + sum_j x_j K'_j,                     K'_j = exp(G_63 - G_j) dt_j B_j

As in `gated_delta`, row i depends on S and on rows <= i alone, and prefill and decode compute it by the same chains, so
a step may begin and end at any row. Only S' is passed from chunk to chunk: a prefill computes sum_j x_j K'_j and the
outputs of all chunks in parallel, and between them one elementwise kernel computes each chunk's start state. A decode
reads the state and the rows of the open chunk (x, B, dt and G), and adds a row to these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.chunks import (
    CHUNK,
    chunk_of_program,
    dot,
    end_factors,
    gate_sums_kernel,
    load_rows,
    padded,
    sequences_to_close,
    terms,
)
from evalengine.kernels.launching.launch import launch
from evalengine.kernels.recurrent_variant import ChunkTable, Mamba2, Mamba2Inputs, ScanState

# Every product has 64 rows and four warps, so it is a chain of wgmma in prefill and decode, whatever its columns.
ROWS, WARPS = 64, 4  # ROWS: of the state
DECODE_COLUMNS = 16  # of which the first is the new row's; with 8 Triton takes mma.sync
STAGES = 3
DECODE_REGISTERS, OUTPUT_REGISTERS = 168, 160  # so that an SM runs three programs
CLOSE_PROGRAMS = 396
STATES_BLOCK, STATES_STAGES = 512, 4


@triton.jit
def _time_step(dt_ptr, a_log_ptr, dt_bias_ptr, dt_least, dt_most, at, head, real):
    """The clamped time steps and the gates of the inputs at these places, which belong to these heads."""
    bias = tl.load(dt_bias_ptr + head, mask=real, other=0.0)
    dt = device_math.softplus(tl.load(dt_ptr + at, mask=real, other=0.0).to(tl.float32) + bias)
    dt = tl.minimum(tl.maximum(dt, dt_least), dt_most)
    return dt, -device_math.exp(tl.load(a_log_ptr + head, mask=real, other=0.0)) * dt


@triton.jit
def _token_kernel(
    dt_ptr, a_log_ptr, dt_bias_ptr, steps_ptr, gates_ptr, size, dt_least, dt_most, stride_dt, H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of [T, H]): the time steps and the gates."""
    device_math.after_previous_kernel()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, head = i < size, i % H
    at = (i // H).to(tl.int64) * stride_dt + head
    step, gate = _time_step(dt_ptr, a_log_ptr, dt_bias_ptr, dt_least, dt_most, at, head, real)
    tl.store(steps_ptr + i, step, mask=real)
    tl.store(gates_ptr + i, gate, mask=real)


@triton.jit
def _products_kernel(
    mixed_ptr, products_ptr, b_pool, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots, stride_mixed,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Program (chunk, group): C B, transposed: [j, i]."""
    PARTS: tl.constexpr = NP // 64 if NP > 64 else 1
    PART: tl.constexpr = NP // PARTS
    device_math.after_previous_kernel()
    p, group = tl.program_id(0), tl.program_id(1)
    chunk = chunk_of_program(p, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots)
    token, begin, end, slot, _, _ = chunk
    if end <= begin:
        return
    row = tl.arange(0, CHUNK)
    old, new = row < begin, (row >= begin) & (row < end)
    b_at = mixed_ptr + (token + row).to(tl.int64) * stride_mixed + H * P + group * N
    stored_at = b_pool + ((slot * G + group) * CHUNK + row) * N
    acc = tl.zeros((CHUNK, CHUNK), tl.float32)
    for part in tl.static_range(PARTS):
        column = part * PART + tl.arange(0, PART)
        real = column < N
        b = load_rows(
            stored_at[:, None] + column[None, :], b_at[:, None] + column[None, :], old[:, None] & real[None, :],
            new[:, None] & real[None, :],
        )  # fmt: skip
        c_at = b_at[None, :] + G * N + column[:, None]
        acc = dot(terms(b), acc, terms(tl.load(c_at, mask=new[None, :] & real[:, None], other=0.0)))
    to = products_ptr + (p * G + group).to(tl.int64) * (CHUNK * CHUNK)
    tl.store(to + row[:, None] * CHUNK + row[None, :], acc)


@triton.jit
def _added_kernel(
    mixed_ptr, steps_ptr, sums_ptr, states_ptr, x_pool, b_pool, steps_pool, chunk_sequence, chunk_number, cu_seqlens,
    seqlens, start_slots, stride_mixed,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (rows of the state, head, chunk): what the chunk adds to the state, if the step has another one."""
    PARTS: tl.constexpr = NP // 64 if NP > 64 else 1
    PART: tl.constexpr = NP // PARTS
    device_math.after_previous_kernel()
    head, p = tl.program_id(1), tl.program_id(2)
    group = head // (H // G)
    chunk = chunk_of_program(p, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots)
    token, begin, end, slot, last, _ = chunk
    if (end < CHUNK) | (token + CHUNK >= last):
        return
    value, row = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHUNK)
    old, new = row < begin, row >= begin
    real_value = (value < P)[:, None]
    own, stored, tokens = (p * H + head).to(tl.int64), (slot * H + head) * CHUNK + row, (token + row).to(tl.int64)
    step = load_rows(steps_pool + stored, steps_ptr + tokens * H + head, old, new)
    factor = end_factors(tl.load(sums_ptr + own * CHUNK + row), step)[1]
    x_at = mixed_ptr + tokens[None, :] * stride_mixed + head * P + value[:, None]
    x = load_rows(
        x_pool + stored[None, :] * P + value[:, None], x_at, old[None, :] & real_value, new[None, :] & real_value
    )
    x_terms = terms(x)
    b_at = mixed_ptr + tokens * stride_mixed + H * P + group * N
    stored_at = b_pool + ((slot * G + group) * CHUNK + row) * N
    for part in tl.static_range(PARTS):
        column = part * PART + tl.arange(0, PART)
        real = (column < N)[None, :]
        b = load_rows(
            stored_at[:, None] + column[None, :], b_at[:, None] + column[None, :], old[:, None] & real,
            new[:, None] & real,
        )  # fmt: skip
        added = dot(x_terms, tl.zeros((ROWS, PART), tl.float32), terms(factor[:, None] * b.to(tl.float32)))
        tl.store(states_ptr + (own * P + value)[:, None] * N + column[None, :], added, mask=real_value & real)


@triton.jit
def _states_kernel(
    sums_ptr, states_ptr, state_pool, first_chunk, cu_seqlens, seqlens, state_slots, start_slots,
    H: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of the state [P, N], head, sequence): each chunk's start state replaces what the chunk
    adds; the last one's stays in the pool."""
    device_math.after_previous_kernel()
    head, s = tl.program_id(1), tl.program_id(2)
    slot = tl.load(state_slots + s).to(tl.int64)
    n = tl.load(cu_seqlens + s + 1) - tl.load(cu_seqlens + s)
    start = tl.load(seqlens + s) - n
    chunks = (start % CHUNK + n + CHUNK - 1) // CHUNK
    if (slot < 0) | (n == 0) | (chunks == 1):
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < SIZE
    start_at = state_pool + (tl.load(start_slots + s).to(tl.int64) * H + head) * SIZE + i
    state = tl.load(start_at, mask=real & (start >= CHUNK), other=0.0)
    first = tl.load(first_chunk + s)
    for c in tl.range(0, chunks - 1, num_stages=STAGES):
        own = ((first + c) * H + head).to(tl.int64)
        added = tl.load(states_ptr + own * SIZE + i, mask=real)
        decay = device_math.exp(tl.load(sums_ptr + own * CHUNK + CHUNK - 1))
        tl.store(states_ptr + own * SIZE + i, state, mask=real)
        state = state * decay + added
    tl.store(state_pool + (slot * H + head) * SIZE + i, state, mask=real)


@triton.jit
def _read_state(
    state_at, c_at, value, before, new, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """S C [ROWS, COLUMNS], for the rows of C at these addresses that are `new`; zeros if no chunk was closed before."""
    PARTS: tl.constexpr = NP // 64 if NP > 64 else 1
    PART: tl.constexpr = NP // PARTS
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in tl.range(0, PARTS, num_stages=STAGES):
        column = part * PART + tl.arange(0, PART)
        real = column < N
        c = tl.load(c_at[None, :] + column[:, None], mask=new[None, :] & real[:, None], other=0.0)
        at = state_at + value[:, None] * N + column[None, :]
        state = tl.load(at, mask=(value < P)[:, None] & real[None, :] & before, other=0.0)
        acc = dot(terms(state), acc, terms(c))
    return acc


@triton.jit
def _output_kernel(
    mixed_ptr, d_ptr, steps_ptr, sums_ptr, products_ptr, states_ptr, out_ptr, state_pool, x_pool, steps_pool,
    chunk_sequence, chunk_number, cu_seqlens, seqlens, state_slots, start_slots, stride_mixed,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (rows of the state, head, chunk): the outputs."""
    device_math.after_previous_kernel()
    head, p = tl.program_id(1), tl.program_id(2)
    group = head // (H // G)
    chunk = chunk_of_program(p, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots)
    token, begin, end, start_slot, last, length = chunk
    if end <= begin:
        return
    value, row = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHUNK)
    old, new = row < begin, (row >= begin) & (row < end)
    real_value = (value < P)[:, None]
    own, stored, tokens = (p * H + head).to(tl.int64), (start_slot * H + head) * CHUNK + row, (token + row).to(tl.int64)
    position = length - last + token  # of the chunk's row 0 in its sequence
    is_last = token + CHUNK >= last
    # The state before the last chunk is where the step has put it, if it has closed another one.
    closed = tl.load(chunk_number + p) > 0
    slot = tl.where(closed, tl.load(state_slots + tl.load(chunk_sequence + p)).to(tl.int64), start_slot)
    state_at = state_pool + (slot * H + head) * (P * N) if is_last else states_ptr + own * (P * N)
    c_at = mixed_ptr + tokens * stride_mixed + H * P + (G + group) * N
    acc = _read_state(state_at, c_at, value, position > 0, new, P, N, NP, ROWS, CHUNK, STAGES)
    x_at = mixed_ptr + tokens[None, :] * stride_mixed + head * P + value[:, None]
    x = load_rows(
        x_pool + stored[None, :] * P + value[:, None], x_at, old[None, :] & real_value, new[None, :] & real_value
    )
    total = tl.load(sums_ptr + own * CHUNK + row)
    step = load_rows(steps_pool + stored, steps_ptr + tokens * H + head, old, new)
    # Rows from `end` on may hold anything, and exp could overflow above the diagonal.
    seen = (row[:, None] <= row[None, :]) & (row < end)[None, :]
    products_at = products_ptr + (p * G + group).to(tl.int64) * (CHUNK * CHUNK)
    products = tl.load(products_at + row[:, None] * CHUNK + row[None, :], mask=seen, other=0.0)
    decay = device_math.exp(tl.where(seen, total[None, :] - total[:, None], 0.0))
    m = tl.where(seen, (decay * step[:, None]) * products, 0.0)
    out = device_math.exp(total)[None, :] * acc + dot(terms(x), tl.zeros((ROWS, CHUNK), tl.float32), terms(m))
    out += 0.0  # makes a -0 a 0, as the sum over a decode's columns does
    out = tl.fma(x.to(tl.float32), tl.broadcast_to(tl.load(d_ptr + head), out.shape), out)
    out_at = out_ptr + (tokens[None, :] * H + head) * P + value[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=new[None, :] & real_value)


@triton.jit
def _store_kernel(
    mixed_ptr, steps_ptr, sums_ptr, x_pool, b_pool, steps_pool, sums_pool, first_chunk, cu_seqlens, seqlens,
    state_slots, stride_mixed,
    H: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Program (head, sequence): stores the new rows of the sequence's last chunk in the pools."""
    device_math.after_previous_kernel()
    head, s = tl.program_id(0), tl.program_id(1)
    slot = tl.load(state_slots + s).to(tl.int64)
    after = tl.load(cu_seqlens + s + 1)
    n = after - tl.load(cu_seqlens + s)
    if (slot < 0) | (n == 0):
        return
    length = tl.load(seqlens + s)
    start = length - n
    end = (length - 1) % CHUNK + 1
    row, value = tl.arange(0, CHUNK), tl.arange(0, PP)
    token = (after - end + row).to(tl.int64)
    new = (row >= end - n) & (row < end)
    p = tl.load(first_chunk + s) + (length - 1) // CHUNK - start // CHUNK
    stored = (slot * H + head) * CHUNK + row
    tl.store(steps_pool + stored, tl.load(steps_ptr + token * H + head, mask=new), mask=new)
    total = tl.load(sums_ptr + (p * H + head).to(tl.int64) * CHUNK + row, mask=new)
    tl.store(sums_pool + stored, total, mask=new)
    real = new[:, None] & (value < P)[None, :]
    x = tl.load(mixed_ptr + token[:, None] * stride_mixed + head * P + value[None, :], mask=real)
    tl.store(x_pool + stored[:, None] * P + value[None, :], x, mask=real)
    if head % (H // G) == 0:
        group, column = head // (H // G), tl.arange(0, NP)
        real_column = new[:, None] & (column < N)[None, :]
        b_at = mixed_ptr + token[:, None] * stride_mixed + H * P + group * N + column[None, :]
        stored_at = b_pool + ((slot * G + group) * CHUNK + row)[:, None] * N + column[None, :]
        tl.store(stored_at, tl.load(b_at, mask=real_column), mask=real_column)


@triton.jit
def _decode_row_kernel(
    mixed_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, m_ptr, b_pool, steps_pool, sums_pool, cu_seqlens, seqlens, state_slots,
    dt_least, dt_most, stride_mixed, stride_dt,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (group, sequence): the open chunk's new rows of B, of the time steps and of the gates' sums, and M's
    [heads, 64]."""
    PARTS: tl.constexpr = NP // 64 if NP > 64 else 1
    PART: tl.constexpr = NP // PARTS
    device_math.after_previous_kernel()
    group, s = tl.program_id(0), tl.program_id(1)
    slot = tl.load(state_slots + s).to(tl.int64)
    if slot < 0:
        return
    i = (tl.load(seqlens + s) - 1) % CHUNK
    t = tl.load(cu_seqlens + s).to(tl.int64)
    row, n = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
    head = group * (H // G) + tl.arange(0, HEADS)
    real_head = tl.arange(0, HEADS) < H // G
    step, gate = _time_step(dt_ptr, a_log_ptr, dt_bias_ptr, dt_least, dt_most, t * stride_dt + head, head, real_head)
    stored = (slot * H + head) * CHUNK
    total = tl.load(sums_pool + stored + i - 1, mask=real_head & (i > 0), other=0.0) + gate
    old = real_head[:, None] & (row < i)[None, :]
    totals = tl.load(sums_pool + stored[:, None] + row[None, :], mask=old, other=0.0)
    steps = tl.load(steps_pool + stored[:, None] + row[None, :], mask=old, other=0.0)
    tl.store(sums_pool + stored + i, total, mask=real_head)
    tl.store(steps_pool + stored + i, step, mask=real_head)
    b_at = mixed_ptr + t * stride_mixed + H * P + group * N
    stored_at = b_pool + (slot * G + group) * CHUNK * N
    acc = tl.zeros((CHUNK, COLUMNS), tl.float32)
    for part in tl.static_range(PARTS):
        column = part * PART + tl.arange(0, PART)
        real = column < N
        b_new = tl.load(b_at + column, mask=real, other=0.0)
        b = tl.load(stored_at + row[:, None] * N + column[None, :], mask=(row < i)[:, None] & real[None, :], other=0.0)
        b = tl.where((row == i)[:, None], b_new[None, :], b)
        c_at = (b_at + G * N + column)[:, None] + 0 * n[None, :]
        c = tl.load(c_at, mask=real[:, None] & (n == 0)[None, :], other=0.0)
        acc = dot(terms(b), acc, terms(c))
        tl.store(stored_at + i * N + column, b_new, mask=real)
    products = tl.sum(tl.where((n == 0)[None, :], acc, 0.0), 1)
    last, seen = (row == i)[None, :], (row <= i)[None, :]
    totals, steps = tl.where(last, total[:, None], totals), tl.where(last, step[:, None], steps)
    decay = device_math.exp(tl.where(seen, total[:, None] - totals, 0.0))
    m = tl.where(seen, (decay * steps) * products[None, :], 0.0)
    at = (s * H + head).to(tl.int64)[:, None] * CHUNK + row[None, :]
    tl.store(m_ptr + at, m, mask=real_head[:, None] & (row >= 0)[None, :])


@triton.jit
def _decode_kernel(
    mixed_ptr, d_ptr, m_ptr, out_ptr, state_pool, x_pool, sums_pool, cu_seqlens, seqlens, state_slots, stride_mixed,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (rows of the state, head, sequence): the output, and the open chunk's new row of x."""
    device_math.after_previous_kernel()
    head, s = tl.program_id(1), tl.program_id(2)
    slot, length = tl.load(state_slots + s).to(tl.int64), tl.load(seqlens + s)
    t = tl.load(cu_seqlens + s).to(tl.int64)
    value = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real_value = value < P
    out_ptr += (t * H + head) * P
    if slot < 0:
        tl.store(out_ptr + value, tl.zeros((ROWS,), out_ptr.dtype.element_ty), mask=real_value)
        return
    # These loads come before the state's, which are asynchronous, and are used after them: a program waits once.
    i = (length - 1) % CHUNK
    row, n, own = tl.arange(0, CHUNK), tl.arange(0, COLUMNS), slot * H + head
    total, d = tl.load(sums_pool + own * CHUNK + i), tl.load(d_ptr + head)
    m = tl.load(m_ptr + (s * H + head).to(tl.int64) * CHUNK + row)
    x_at = x_pool + own * CHUNK * P + value
    x = tl.load(x_at[:, None] + row[None, :] * P, mask=real_value[:, None] & (row < i)[None, :], other=0.0)
    mixed_ptr += t * stride_mixed
    x_new = tl.load(mixed_ptr + head * P + value, mask=real_value, other=0.0)
    c_at = mixed_ptr + H * P + (G + head // (H // G)) * N + 0 * n
    acc = _read_state(state_pool + own * P * N, c_at, value, length > CHUNK, n == 0, P, N, NP, ROWS, COLUMNS, STAGES)
    x = tl.where((row == i)[None, :], x_new[:, None], x)
    m_terms = terms(tl.where((n == 0)[None, :], m[:, None], 0.0))
    out = device_math.exp(total) * acc + dot(terms(x), tl.zeros((ROWS, COLUMNS), tl.float32), m_terms)
    out = tl.sum(tl.where((n == 0)[None, :], out, 0.0), 1)
    out = tl.fma(x_new.to(tl.float32), tl.broadcast_to(d, out.shape), out)
    tl.store(out_ptr + value, out.to(out_ptr.dtype.element_ty), mask=real_value)
    tl.store(x_at + i * P, x_new, mask=real_value)


@triton.jit
def _close_kernel(
    state_pool, x_pool, b_pool, steps_pool, sums_pool, cu_seqlens, seqlens, state_slots, sequences,
    layers, layer_slots,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
    S: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Brings the states of the sequences that begin a chunk in this step behind the chunk before. The programs share
    these sequences, layers, heads and rows of the state."""
    PARTS: tl.constexpr = NP // 64 if NP > 64 else 1
    PART: tl.constexpr = NP // PARTS
    TILES: tl.constexpr = (P + ROWS - 1) // ROWS
    device_math.after_previous_kernel()
    count, place, slots, starts = sequences_to_close(cu_seqlens, seqlens, state_slots, sequences, S)
    row = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), count * layers * (H * TILES), PROGRAMS):
        mine = place == item // (H * TILES) // layers
        slot = tl.sum(tl.where(mine, slots, 0), 0).to(tl.int64) + item // (H * TILES) % layers * layer_slots
        start = tl.sum(tl.where(mine, starts, 0), 0)
        head = item // TILES % H
        value = item % TILES * ROWS + tl.arange(0, ROWS)
        real_value = (value < P)[:, None]
        own = slot * H + head
        stored = own * CHUNK + row
        last_decay, factor = end_factors(tl.load(sums_pool + stored), tl.load(steps_pool + stored))
        x_at = x_pool + stored[None, :] * P + value[:, None]
        x = terms(tl.load(x_at, mask=real_value & (row >= 0)[None, :], other=0.0))
        b_at = b_pool + ((slot * G + head // (H // G)) * CHUNK + row)[:, None] * N
        for part in tl.static_range(PARTS):
            column = part * PART + tl.arange(0, PART)
            real = (column < N)[None, :]
            b = tl.load(b_at + column[None, :], mask=real & (row >= 0)[:, None], other=0.0)
            added = dot(x, tl.zeros((ROWS, PART), tl.float32), terms(factor[:, None] * b.to(tl.float32)))
            at = state_pool + (own * P + value)[:, None] * N + column[None, :]
            state = tl.load(at, mask=real_value & real & (start > CHUNK), other=0.0)
            tl.store(at, state * last_decay + added, mask=real_value & real)


def mamba2(
    inputs: Mamba2Inputs,
    state: ScanState,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    num_decodes: int,
    chunks: ChunkTable | None,
    variant: Mamba2,
    closes: int = 1,
    start_slots: Tensor | None = None,
) -> Tensor:
    """The outputs [T, H, P] of a step's tokens; the pools of states are brought up to date.

    The sequences are described as for `causal_conv`; the first `num_decodes` have one token each.
    chunks: those of the others, if there are any. closes, start_slots: see `gated_delta`.
    """
    mixed, dt, a_log, dt_bias, d = inputs
    heads, values, columns = variant.state_shape
    tokens, sequences, groups, device = len(mixed), len(state_slots), variant.num_groups, mixed.device
    assert mixed.stride(1) == dt.stride(1) == 1 and all(pool.is_contiguous() for pool in state)
    assert state.state.shape[1:] == variant.state_shape and state.state.dtype == torch.float32
    least, most = variant.dt_limits
    limits = float(least), float("inf") if most is None else float(most)
    wide_columns = max(16, triton.next_power_of_2(columns))
    sizes, stride = (heads, values, groups, columns, wide_columns), mixed.stride(0)
    new = torch.empty if chunks is None else torch.zeros  # of padding only decodes write outputs
    out = new((tokens, heads, values), dtype=mixed.dtype, device=device)
    tiles = -(-values // ROWS)
    if closes:
        launch(
            _close_kernel, (min(CLOSE_PROGRAMS, sequences * closes * heads * tiles), 1, 1),
            (*state, cu_seqlens_q, seqlens_k, state_slots, sequences, closes, len(state.state)),
            (*sizes, ROWS, padded(sequences), CLOSE_PROGRAMS), WARPS, 1,
        )  # fmt: skip
    if num_decodes:
        step = cu_seqlens_q, seqlens_k, state_slots
        m = torch.empty((num_decodes, heads, 64), device=device)
        launch(
            _decode_row_kernel, (groups, num_decodes, 1),
            (mixed, dt, a_log, dt_bias, m, *state[2:], *step, *limits, stride, dt.stride(0)),
            (*sizes, triton.next_power_of_2(heads // groups), DECODE_COLUMNS), WARPS, 1,
        )  # fmt: skip
        launch(
            _decode_kernel, (tiles, heads, num_decodes),
            (mixed, d, m, out, state.state, state.x, state.gate_sums, *step, stride),
            (*sizes, ROWS, DECODE_COLUMNS, STAGES), WARPS, STAGES,
            maxnreg=DECODE_REGISTERS,
        )  # fmt: skip
    if chunks is not None:
        step = cu_seqlens_q[num_decodes:], seqlens_k[num_decodes:], state_slots[num_decodes:]
        starts = (state_slots if start_slots is None else start_slots)[num_decodes:]
        rows, n = (*chunks[:2], *step[:2], starts), len(chunks.sequence)
        steps, gates = torch.empty((2, tokens, heads), device=device)
        sums = torch.empty((n, heads, 64), device=device)
        products = torch.empty((n, groups, 64, 64), device=device)
        states = torch.empty((n, *variant.state_shape), device=device)
        launch(
            _token_kernel, (-(-tokens * heads // 1024), 1, 1),
            (dt, a_log, dt_bias, steps, gates, tokens * heads, *limits, dt.stride(0)), (heads, 1024), 4, 1,
        )  # fmt: skip
        launch(
            gate_sums_kernel, (n, 1, 1), (gates, sums, state.gate_sums, *rows),
            (heads, triton.next_power_of_2(heads)), 1, 1,
        )  # fmt: skip
        launch(_products_kernel, (n, groups, 1), (mixed, products, state.b, *rows, stride), sizes, WARPS, 1)
        launch(
            _added_kernel, (tiles, heads, n),
            (mixed, steps, sums, states, state.x, state.b, state.steps, *rows, stride),
            (*sizes, ROWS), WARPS, 1,
        )  # fmt: skip
        size = values * columns
        launch(
            _states_kernel, (-(-size // STATES_BLOCK), heads, sequences - num_decodes),
            (sums, states, state.state, chunks.first, *step, starts), (heads, size, STATES_BLOCK, STATES_STAGES), 4,
            STATES_STAGES,
        )  # fmt: skip
        launch(
            _output_kernel, (tiles, heads, n),
            (mixed, d, steps, sums, products, states, out, state.state, state.x, state.steps, *chunks[:2], *step,
             starts, stride),
            (*sizes, ROWS, STAGES), WARPS, STAGES, maxnreg=OUTPUT_REGISTERS,
        )  # fmt: skip
        launch(
            _store_kernel, (heads, sequences - num_decodes, 1),
            (mixed, steps, sums, *state[1:], chunks.first, *step, stride),
            (heads, values, triton.next_power_of_2(values), *sizes[2:]), 4, 1,
        )  # fmt: skip
    return out
