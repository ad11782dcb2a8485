"""The gated delta rule in chunks of 64 tokens, over ragged sequences with a state each.

    T tokens, S sequences, Hk/Hv key and value heads, K/V their dimensions, R slots of the pools, C = 64.

In a chunk with start state S [V, K], whose row i has the gates' sum G_i (from the chunk's first row on) and the factors
r of the norms of q and k:

    x_i = beta_i (v_i - exp(G_i) (S k_i) r_i)                    what row i adds, but for the rows before it
    A_ij = beta_i exp(G_i - G_j) (k_i k_j) r_i r_j, j < i;  T = (I + A)^-1
    B_ij = exp(G_i - G_j) (q_i k_j) r_i r_j, j <= i;        M = B T
    o_i = exp(G_i) (S q_i) r_i + sum_j M_ij x_j
    S'  = exp(G_63) S + sum_j x_j K'_j,                     K' = T^t diag(exp(G_63 - G_j) r_j) k

This is the rule token by token, solved for the rows of a chunk (Yang et al., "Parallelizing linear transformers with
the delta rule", 2024, where T is applied to x; here it is part of M and K', which do not depend on the state). Row i
depends on S and on rows <= i alone, and prefill and decode compute it by the same chains, so a step may begin and end
at any row. A decode reads the state and the rows of the open chunk (x, T, k, their norms and G), and adds a row to
these; the state itself is written once in 64 tokens. This module's kernels compute the chunks that another one follows
in the step; `gated_delta_rows` has those for a sequence's last chunk.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels import gated_delta_decode as decode
from evalengine.kernels import gated_delta_rows as rows
from evalengine.kernels.chunks import (
    CHUNK,
    chain_dot,
    chunk_of_program,
    dot,
    end_factors,
    gate_sums_kernel,
    load_rows,
    load_state,
    load_terms,
    store_terms,
    terms,
)
from evalengine.kernels.launching.launch import launch
from evalengine.kernels.recurrent_variant import ChunkTable, DeltaInputs, DeltaState, GatedDelta

# Prefill and decode must take the same instruction for a product: Triton takes wgmma, whose sums are others than those
# of mma.sync, from 64 rows and four warps on. K' has them in both; all other products have fewer rows or warps in both.
PREFILL_ROWS = 32
# (warps, stages) of up to SMS programs, which have an SM each, and of more, of which two share one.
PREFILL_ALONE, PREFILL_PAIRED, SMS = (8, 2), (4, 1), 132
PRODUCT_WARPS, M_WARPS, KEY_WARPS = 8, 4, 4


@triton.jit
def _token_kernel(
    mixed_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, norms_ptr, gates_ptr, beta_ptr, scale, beta_scale, stride_mixed,
    stride_a, stride_b,
    HK: tl.constexpr, HKP: tl.constexpr, HV: tl.constexpr, HVP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Program (token): the factors of q's and k's norms [2, HK], the gates and beta [HV]."""
    device_math.after_previous_kernel()
    t = tl.program_id(0).to(tl.int64)
    head, key = tl.arange(0, HKP), tl.arange(0, KP)
    real = (head < HK)[:, None] & (key < K)[None, :]
    at = mixed_ptr + t * stride_mixed + head[:, None] * K + key[None, :]
    q = tl.load(at, mask=real, other=0.0).to(tl.float32)
    k = tl.load(at + HK * K, mask=real, other=0.0).to(tl.float32)
    norms = norms_ptr + t * 2 * HK + head
    tl.store(norms, device_math.rsqrt(tl.sum(q * q, 1) + 1e-6) * scale, mask=head < HK)
    tl.store(norms + HK, device_math.rsqrt(tl.sum(k * k, 1) + 1e-6), mask=head < HK)
    value_head = tl.arange(0, HVP)
    real_head = value_head < HV
    a = tl.load(a_ptr + t * stride_a + value_head, mask=real_head, other=0.0).to(tl.float32)
    rate = -device_math.exp(tl.load(a_log_ptr + value_head, mask=real_head, other=0.0))
    gate = rate * device_math.softplus(a + tl.load(dt_bias_ptr + value_head, mask=real_head, other=0.0))
    tl.store(gates_ptr + t * HV + value_head, gate, mask=real_head)
    b = device_math.sigmoid(tl.load(b_ptr + t * stride_b + value_head, mask=real_head, other=0.0).to(tl.float32))
    beta = b.to(mixed_ptr.dtype.element_ty).to(tl.float32) * beta_scale
    tl.store(beta_ptr + t * HV + value_head, beta, mask=real_head)


@triton.jit
def _chunk_keys(
    mixed_ptr, norms_ptr, keys_pool, key_norms_pool, slot, key_head, row, token, begin, stride_mixed,
    HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The keys of a closed chunk's rows [n, KP], and the factors of their norms [n], old ones and new."""
    key = tl.arange(0, KP)
    new, old, real = row >= begin, row < begin, (key < K)[None, :]
    tokens = (token + row).to(tl.int64)
    stored = (slot * HK + key_head) * CHUNK + row
    norms = load_rows(key_norms_pool + stored, norms_ptr + tokens * 2 * HK + HK + key_head, old, new)
    at = mixed_ptr + tokens[:, None] * stride_mixed + (HK + key_head) * K + key[None, :]
    keys = load_rows(keys_pool + stored[:, None] * K + key[None, :], at, old[:, None] & real, new[:, None] & real)
    return keys, norms


@triton.jit
def _products_kernel(
    mixed_ptr, norms_ptr, beta_ptr, sums_ptr, products_ptr, keys_pool, key_norms_pool, chunk_sequence,
    chunk_number, cu_seqlens, seqlens, start_slots, stride_mixed,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Program (chunk, key head, half of j): -A and B of its value heads, both transposed: [j, i]."""
    device_math.after_previous_kernel()
    p, key_head = tl.program_id(0), tl.program_id(1)
    chunk = chunk_of_program(p, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots)
    token, begin, end, slot, _, _ = chunk
    if end <= begin:
        return
    row, key, j = tl.arange(0, CHUNK), tl.arange(0, KP), tl.program_id(2) * 32 + tl.arange(0, 32)
    new = row >= begin
    tokens = (token + row).to(tl.int64)
    k, k_norm = _chunk_keys(
        mixed_ptr, norms_ptr, keys_pool, key_norms_pool, slot, key_head, row, token, begin, stride_mixed, HK, K, KP
    )
    k_j, k_norm_j = _chunk_keys(
        mixed_ptr, norms_ptr, keys_pool, key_norms_pool, slot, key_head, j, token, begin, stride_mixed, HK, K, KP
    )
    q_norm = tl.load(norms_ptr + tokens * 2 * HK + key_head, mask=new, other=0.0)
    at = mixed_ptr + tokens[:, None] * stride_mixed + key_head * K + key[None, :]
    q = tl.load(at, mask=new[:, None] & (key < K)[None, :], other=0.0)
    zero, k_terms = tl.zeros((32, CHUNK), tl.float32), terms(k_j)
    kk, qk = dot(k_terms, zero, terms(tl.trans(k))), dot(k_terms, zero, terms(tl.trans(q)))
    kk *= k_norm[None, :] * k_norm_j[:, None]
    qk *= q_norm[None, :] * k_norm_j[:, None]
    seen = j[:, None] <= row[None, :]  # exp could overflow above the diagonal
    for value_head in range(HV // HK):
        head = key_head * (HV // HK) + value_head
        sums = sums_ptr + (p * HV + head) * CHUNK
        decay = device_math.exp(tl.where(seen, tl.load(sums + row)[None, :] - tl.load(sums + j)[:, None], 0.0))
        beta = tl.load(beta_ptr + tokens * HV + head, mask=new, other=0.0)
        to = products_ptr + (p * HV + head).to(tl.int64) * (2 * CHUNK * CHUNK) + j[:, None] * CHUNK + row[None, :]
        a = tl.where(seen & (j[:, None] < row[None, :]), (beta[None, :] * decay) * kk, 0.0)
        tl.store(to, -a)
        tl.store(to + CHUNK * CHUNK, tl.where(seen, decay * qk, 0.0))


@triton.jit
def _solve_kernel(
    products_ptr, inverse_ptr, inverse_pool, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots,
    HV: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head), one warp: the rows of T, each one ascending chain; by blocks of 16."""
    device_math.after_previous_kernel()
    p, head = tl.program_id(0), tl.program_id(1)
    chunk = chunk_of_program(p, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots)
    _, begin, end, slot, _, _ = chunk
    if end <= begin:
        return
    own = (p * HV + head).to(tl.int64)
    products, inverse = products_ptr + own * (2 * CHUNK * CHUNK), inverse_ptr + own * (CHUNK * CHUNK)
    stored = inverse_pool + (slot * HV + head) * (CHUNK * CHUNK)
    column, r = tl.arange(0, CHUNK), tl.arange(0, 16)
    for block in range(CHUNK // 16):
        i = block * 16 + r
        acc = tl.where(column[:, None] == i[None, :], 1.0, 0.0)
        for part in range(0, block * 16, 8):
            for j in tl.static_range(8):
                t = tl.load(inverse + (part + j) * CHUNK + column)
                factor = tl.load(products + (part + j) * CHUNK + i)
                acc = tl.fma(tl.broadcast_to(t[:, None], acc.shape), tl.broadcast_to(factor[None, :], acc.shape), acc)
        old = (i < begin)[None, :] & (column >= 0)[:, None]
        at = i[None, :] * CHUNK + column[:, None]
        acc = tl.where(old, tl.load(stored + at, mask=old, other=0.0), acc)
        for j in tl.static_range(15):
            t = tl.sum(tl.where((r == j)[None, :], acc, 0.0), 1)
            factor = tl.load(products + (block * 16 + j) * CHUNK + i)
            added = tl.fma(tl.broadcast_to(t[:, None], acc.shape), tl.broadcast_to(factor[None, :], acc.shape), acc)
            acc = tl.where(((r > j) & (i >= begin))[None, :], added, acc)
        tl.store(inverse + at, acc)
        tl.debug_barrier()  # threads read what others have stored


@triton.jit
def _m_kernel(
    products_ptr, inverse_ptr, m_ptr, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots, HV: tl.constexpr
):
    """Program (chunk, value head): M transposed, [j, i], in three terms; by quarters of 32 x 32, without the products
    with quarters of T and B that are zeros."""
    device_math.after_previous_kernel()
    p, head = tl.program_id(0), tl.program_id(1)
    chunk = chunk_of_program(p, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots)
    _, begin, end, _, _, _ = chunk
    if end <= begin:
        return
    own = (p * HV + head).to(tl.int64)
    inverse, b_ptr = inverse_ptr + own * (CHUNK * CHUNK), products_ptr + (2 * own + 1) * (CHUNK * CHUNK)
    m_ptr += own * (3 * CHUNK * CHUNK)
    half, row = tl.arange(0, CHUNK // 2), tl.arange(0, CHUNK)
    zero = tl.zeros((CHUNK // 2, CHUNK // 2), tl.float32)
    for j in tl.static_range(2):
        for i in tl.static_range(2):
            at_j, at_i = half + j * (CHUNK // 2), half + i * (CHUNK // 2)
            m = zero
            if j <= i:
                between = at_j if j == i else row
                t = tl.load(inverse + between[None, :] * CHUNK + at_j[:, None])
                m = chain_dot(t, tl.load(b_ptr + between[:, None] * CHUNK + at_i[None, :]), zero)
            store_terms(m_ptr + at_j[:, None] * CHUNK + at_i[None, :], CHUNK * CHUNK, m, (half >= 0)[:, None])


@triton.jit
def _keys_kernel(
    mixed_ptr, norms_ptr, sums_ptr, inverse_ptr, keys_ptr, keys_pool, key_norms_pool, chunk_sequence, chunk_number,
    cu_seqlens, seqlens, start_slots, stride_mixed,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head): K' in three terms."""
    device_math.after_previous_kernel()
    p, head = tl.program_id(0), tl.program_id(1)
    chunk = chunk_of_program(p, chunk_sequence, chunk_number, cu_seqlens, seqlens, start_slots)
    token, begin, end, slot, _, _ = chunk
    if end <= begin:
        return
    row, key = tl.arange(0, CHUNK), tl.arange(0, KP)
    own = (p * HV + head).to(tl.int64)
    transposed = tl.load(inverse_ptr + own * (CHUNK * CHUNK) + row[None, :] * CHUNK + row[:, None])
    k, k_norm = _chunk_keys(
        mixed_ptr, norms_ptr, keys_pool, key_norms_pool, slot, head // (HV // HK), row, token, begin, stride_mixed,
        HK, K, KP,
    )  # fmt: skip
    factor = end_factors(tl.load(sums_ptr + own * CHUNK + row), k_norm)[1]
    keys = dot(terms(transposed * factor[None, :]), tl.zeros((CHUNK, KP), tl.float32), terms(k))
    to = keys_ptr + own * (3 * CHUNK * K) + row[:, None] * K + key[None, :]
    store_terms(to, CHUNK * K, keys, (key < K)[None, :] & (row >= 0)[:, None])


@triton.jit
def _prefill_kernel(
    mixed_ptr, norms_ptr, beta_ptr, sums_ptr, m_ptr, keys_ptr, out_ptr, state_pool, x_pool, first_chunk, sequences,
    cu_seqlens, seqlens, state_slots, start_slots, stride_mixed,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (rows of the state, value head, sequence): from closed chunk to closed chunk, x, the outputs and the
    state."""
    PARTS: tl.constexpr = KP // 64 if KP > 64 else 1
    PART: tl.constexpr = KP // PARTS
    device_math.after_previous_kernel()
    head, s = tl.program_id(1), tl.load(sequences + tl.program_id(2))
    key_head = head // (HV // HK)
    slot = tl.load(state_slots + s).to(tl.int64)
    if slot < 0:
        return
    value, row = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHUNK)
    real_value = (value < V)[:, None]
    first, length = tl.load(cu_seqlens + s), tl.load(seqlens + s)
    last = tl.load(cu_seqlens + s + 1)
    start = length - (last - first)
    before = start % CHUNK
    own, start_own = slot * HV + head, tl.load(start_slots + s).to(tl.int64) * HV + head
    state = load_state(state_pool + start_own * V * K, value, start >= CHUNK, V, K, PART, PARTS)
    chunks = (length - 1) // CHUNK - start // CHUNK
    program = tl.load(first_chunk + s)
    x_at = x_pool + (start_own * V + value)[:, None] * CHUNK + row[None, :]
    for c in tl.range(0, chunks, num_stages=STAGES):
        # Prefetch the next chunk's operands: the programs wait for memory more than they compute.
        if (tl.program_id(0) == 0) & (c < chunks - 1):
            following = ((program + c + 1) * HV + head).to(tl.int64)
            device_math.prefetch(m_ptr + following * (3 * CHUNK * CHUNK), 3 * CHUNK * CHUNK * 2)
            device_math.prefetch(keys_ptr + following * (3 * CHUNK * K), 3 * CHUNK * K * 2)
        if STAGES == 1:  # lines of 128 bytes: in 16 bits all of q, k and v
            ahead = tl.minimum(first - before + CHUNK * (c + 1) + row, last - 1).to(tl.int64)
            line = mixed_ptr + ahead * stride_mixed
            device_math.prefetch_lines(line + 2 * HK * K + head * V + tl.program_id(0) * ROWS)
            if tl.program_id(0) == 0:
                for part in tl.static_range(PARTS):
                    device_math.prefetch_lines(line + key_head * K + part * PART)
                    device_math.prefetch_lines(line + (HK + key_head) * K + part * PART)
        begin = tl.where(c == 0, before, 0)
        new = row >= begin
        token = (first - before + CHUNK * c + row).to(tl.int64)
        at = ((program + c) * HV + head).to(tl.int64)
        sk, sq = tl.zeros((ROWS, CHUNK), tl.float32), tl.zeros((ROWS, CHUNK), tl.float32)
        for part in tl.static_range(PARTS):
            key = part * PART + tl.arange(0, PART)
            real = new[None, :] & (key < K)[:, None]
            q_at = mixed_ptr + token[None, :] * stride_mixed + key_head * K + key[:, None]
            k, q = tl.load(q_at + HK * K, mask=real, other=0.0), tl.load(q_at, mask=real, other=0.0)
            state_terms = terms(state[part])
            sk = dot(state_terms, sk, terms(k))
            sq = dot(state_terms, sq, terms(q))
        v_at = mixed_ptr + token[None, :] * stride_mixed + 2 * HK * K + head * V + value[:, None]
        v = tl.load(v_at, mask=new[None, :] & real_value, other=0.0).to(tl.float32)
        decay = device_math.exp(tl.load(sums_ptr + at * CHUNK + row))
        norms = norms_ptr + token * 2 * HK + key_head
        k_norm, q_norm = tl.load(norms + HK, mask=new, other=0.0), tl.load(norms, mask=new, other=0.0)
        beta = tl.load(beta_ptr + token * HV + head, mask=new, other=0.0)
        x = beta[None, :] * (v - (decay * k_norm)[None, :] * sk)
        # By sectors of 8, so that loads stay 16 bytes wide; rows from `begin` on are replaced.
        stored_x = tl.load(x_at, mask=(row // 8 * 8 < begin)[None, :] & real_value, other=0.0)
        x_terms = terms(tl.where(new[None, :], x, stored_x))
        m_at = m_ptr + at * (3 * CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
        m = load_terms(m_at, CHUNK * CHUNK, (row >= 0)[:, None])
        out = (decay * q_norm)[None, :] * sq + dot(x_terms, tl.zeros((ROWS, CHUNK), tl.float32), m)
        out_at = out_ptr + (token[None, :] * HV + head) * V + value[:, None]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=new[None, :] & real_value)
        last_decay = tl.sum(tl.where(row == CHUNK - 1, decay, 0.0), 0)
        ended = ()
        for part in tl.static_range(PARTS):
            key = part * PART + tl.arange(0, PART)
            keys_at = keys_ptr + at * (3 * CHUNK * K) + row[:, None] * K + key[None, :]
            keys = load_terms(keys_at, CHUNK * K, (row >= 0)[:, None] & (key < K)[None, :])
            added = dot(x_terms, tl.zeros((ROWS, PART), tl.float32), keys)
            ended += (state[part] * last_decay + added,)  # type: ignore[assignment]
        state = ended
    for part in tl.static_range(PARTS):
        key = part * PART + tl.arange(0, PART)
        state_at = state_pool + (own * V + value)[:, None] * K + key[None, :]
        tl.store(state_at, state[part], mask=real_value & (key < K)[None, :])


def _holds_two_stages(device: torch.device) -> bool:
    """Whether a program may have two stages, which need up to 205 KiB of shared memory: not on A100, Ada or RTX 50."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def gated_delta(
    inputs: DeltaInputs,
    state: DeltaState,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    num_decodes: int,
    chunks: ChunkTable | None,
    variant: GatedDelta,
    closes: int = 1,
    start_slots: Tensor | None = None,
) -> Tensor:
    """The outputs [T, Hv, V] of a step's tokens; the pools of states are brought up to date.

    The sequences are described as for `causal_conv`; the first `num_decodes` have one token each.
    chunks: the closed ones of the others, if there are others. closes: the number of layers whose chunks are closed
    first, from this one on, whose pools follow each other in memory; 0: an earlier layer has closed them.
    start_slots: int32 [S], the slots with the state and the open chunk's rows before the step (None: `state_slots`).
    Several sequences may share one. A sequence whose two slots differ must have more than one token in the step, an
    open chunk that is not full, and no later step, because its slot does not get the chunk's earlier rows.
    """
    mixed, a, b, a_log, dt_bias = inputs
    tokens, device = len(mixed), mixed.device
    sizes = key_heads, heads, keys, wide_keys = decode.sizes(variant)
    assert mixed.stride(1) == a.stride(1) == b.stride(1) == 1 and all(pool.is_contiguous() for pool in state)
    assert state.state.shape[1:] == variant.state_shape and state.state.dtype == torch.float32
    norms = torch.empty((tokens, 2, key_heads), device=device)
    gates, beta = torch.empty((2, tokens, heads), device=device)
    out = torch.empty((tokens, heads, variant.value_dim), dtype=mixed.dtype, device=device)
    values, wide_heads = variant.value_dim, triton.next_power_of_2(heads)
    if closes:
        decode.close_chunks(state, cu_seqlens_q, seqlens_k, state_slots, closes, variant)
    launch(
        _token_kernel, (tokens, 1, 1),
        (mixed, a, b, a_log, dt_bias, norms, gates, beta, keys**-0.5, variant.beta_scale, mixed.stride(0),
         a.stride(0), b.stride(0)),
        (key_heads, triton.next_power_of_2(key_heads), heads, wide_heads, keys, wide_keys), 4, 1,
    )  # fmt: skip
    if num_decodes:  # directly after the norms and gates: all else that decodes read must be written before these
        step = cu_seqlens_q, seqlens_k, state_slots
        decode.decode(mixed, norms, gates, beta, out, state, *step, num_decodes, variant)
    if chunks is None:
        return out
    starts = (state_slots if start_slots is None else start_slots)[num_decodes:]
    ragged = cu_seqlens_q[num_decodes:], seqlens_k[num_decodes:], state_slots[num_decodes:], starts
    if n := len(chunks.sequence):
        table = chunks.sequence, chunks.number, *ragged[:2], starts  # these kernels only read slots
        sums = torch.empty((n, heads, 64), device=device)
        products = torch.empty((n, heads, 2, 64, 64), device=device)
        inverse = torch.empty((n, heads, 64, 64), device=device)
        m = torch.empty((n, heads, 3, 64, 64), dtype=torch.bfloat16, device=device)
        ended = torch.empty((n, heads, 3, 64, keys), dtype=torch.bfloat16, device=device)
        grid = -(-values // PREFILL_ROWS), heads, len(chunks.sequences)
        alone = math.prod(grid) <= SMS and wide_keys * mixed.itemsize <= 512 and _holds_two_stages(device)
        warps, stages = PREFILL_ALONE if alone else PREFILL_PAIRED
        stored, stride = (state.keys, state.key_norms), mixed.stride(0)
        launch(gate_sums_kernel, (n, 1, 1), (gates, sums, state.gate_sums, *table), (heads, wide_heads), 1, 1)
        launch(
            _products_kernel, (n, key_heads, 2),
            (mixed, norms, beta, sums, products, *stored, *table, stride), sizes, PRODUCT_WARPS, 1,
        )  # fmt: skip
        launch(_solve_kernel, (n, heads, 1), (products, inverse, state.inverse, *table), (heads,), 1, 1)
        launch(_m_kernel, (n, heads, 1), (products, inverse, m, *table), (heads,), M_WARPS, 1)
        launch(
            _keys_kernel, (n, heads, 1),
            (mixed, norms, sums, inverse, ended, *stored, *table, stride), sizes, KEY_WARPS, 1,
        )  # fmt: skip
        launch(
            _prefill_kernel, grid,
            (mixed, norms, beta, sums, m, ended, out, state.state, state.x, chunks.first, chunks.sequences, *ragged,
             stride),
            (*sizes, values, PREFILL_ROWS, stages), warps, stages,
        )  # fmt: skip
    # After the others, which read the rows that these replace.
    rows.open_rows(mixed, norms, gates, beta, out, state, *ragged, variant)
    return out
