"""Decodes of the gated delta rule: the last row of an open chunk (`gated_delta`), and the closing of a chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.chunks import (
    CHUNK,
    dot,
    end_factors,
    load_state,
    padded,
    sequences_to_close,
    terms,
)
from evalengine.kernels.launching.launch import launch
from evalengine.kernels.recurrent_variant import DeltaState, GatedDelta

# As in `gated_delta`: K' has four warps and 64 rows; other products have fewer of them.
ROWS, WARPS, STAGES, COLUMNS = 32, 2, 2, 8
CLOSE_ROWS, CLOSE_PROGRAMS = 32, 264


@triton.jit
def _decode_kernel(
    mixed_ptr, norms_ptr, gates_ptr, beta_ptr, factors_ptr, out_ptr, state_pool, x_pool, inverse_pool, keys_pool,
    key_norms_pool, sums_pool, cu_seqlens, seqlens, state_slots, stride_mixed,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (value head, sequence): the open chunk's new rows of T, of the keys, of the gates' sums and of x, and the
    output."""
    PARTS: tl.constexpr = KP // 64 if KP > 64 else 1
    PART: tl.constexpr = KP // PARTS
    device_math.after_previous_kernel()
    head, s = tl.program_id(0), tl.program_id(1)
    key_head = head // (HV // HK)
    slot = tl.load(state_slots + s).to(tl.int64)
    if slot < 0:
        return
    length = tl.load(seqlens + s)
    i = (length - 1) % CHUNK
    t = tl.load(cu_seqlens + s).to(tl.int64)
    row, key, n = tl.arange(0, CHUNK), tl.arange(0, KP), tl.arange(0, N)
    own, real_key = slot * HV + head, key < K
    k_row = (slot * HK + key_head) * CHUNK
    q_at = mixed_ptr + t * stride_mixed + key_head * K + key
    q_new, k_new = tl.load(q_at, mask=real_key, other=0.0), tl.load(q_at + HK * K, mask=real_key, other=0.0)
    k_at = keys_pool + (k_row + row)[:, None] * K + key[None, :]
    k = tl.load(k_at, mask=(row < i)[:, None] & real_key[None, :], other=0.0)
    k = tl.where((row == i)[:, None], k_new[None, :], k)
    pair = tl.where((n == 0)[None, :], k_new[:, None], tl.where((n == 1)[None, :], q_new[:, None], 0.0)).to(k.dtype)
    products = dot(terms(k), tl.zeros((CHUNK, N), tl.float32), terms(pair))
    kk, qk = (
        tl.sum(tl.where((n == 0)[None, :], products, 0.0), 1),
        tl.sum(tl.where((n == 1)[None, :], products, 0.0), 1),
    )
    total = tl.load(sums_pool + own * CHUNK + i - 1, mask=i > 0, other=0.0) + tl.load(gates_ptr + t * HV + head)
    norms = norms_ptr + t * 2 * HK + key_head
    q_norm, k_norm, beta = tl.load(norms), tl.load(norms + HK), tl.load(beta_ptr + t * HV + head)
    totals = tl.load(sums_pool + own * CHUNK + row, mask=row < i, other=0.0)
    decays = device_math.exp(tl.where(row < i, total - totals, 0.0))
    k_norms = tl.load(key_norms_pool + k_row + row, mask=row < i, other=0.0)
    k_norms = tl.where(row == i, k_norm, k_norms)
    a = (beta * decays) * ((k_norm * k_norms) * kk)
    b = decays * ((q_norm * k_norms) * qk)
    factors = factors_ptr + (s * HV + head).to(tl.int64) * (2 * CHUNK)
    tl.store(factors + row, tl.where(row < i, -a, 0.0))
    tl.store(factors + CHUNK + row, tl.where(row <= i, b, 0.0))
    tl.store(sums_pool + own * CHUNK + i, total)
    if head % (HV // HK) == 0:
        tl.store(keys_pool + (k_row + i) * K + key, k_new, mask=real_key)
        tl.store(key_norms_pool + k_row + i, k_norm)
    tl.debug_barrier()  # threads read what others have stored
    inverse = inverse_pool + own * (CHUNK * CHUNK)
    acc, m = tl.where(row == i, 1.0, 0.0), tl.zeros((CHUNK,), tl.float32)
    for block in range(0, i, 16):
        for r in tl.static_range(16):
            j = block + r
            t_j = tl.load(inverse + j * CHUNK + row, mask=(row <= j) & (j < i), other=0.0)
            acc = tl.fma(t_j, tl.broadcast_to(tl.load(factors + j), (CHUNK,)), acc)
            m = tl.fma(t_j, tl.broadcast_to(tl.load(factors + CHUNK + j), (CHUNK,)), m)
    tl.store(inverse + i * CHUNK + row, acc)
    m = tl.fma(acc, tl.broadcast_to(tl.load(factors + CHUNK + i), (CHUNK,)), m)
    m_terms = terms(tl.where((n == 0)[None, :], m[:, None], 0.0))
    decay = device_math.exp(total)
    pairs = ()
    for part in tl.static_range(PARTS):
        column = part * PART + tl.arange(0, PART)
        at = mixed_ptr + t * stride_mixed + tl.where(n == 0, HK + key_head, key_head)[None, :] * K + column[:, None]
        pairs += (tl.load(at, mask=(column < K)[:, None] & (n < 2)[None, :], other=0.0),)  # type: ignore[assignment]
    zero = tl.zeros((ROWS, N), tl.float32)
    stored = tl.multiple_of((i + 15) // 16 * 16, 16)
    for tile in tl.range(0, (V + ROWS - 1) // ROWS, num_stages=STAGES):
        value = tile * ROWS + tl.arange(0, ROWS)
        real = value < V
        state = load_state(state_pool + own * V * K, value, length > CHUNK, V, K, PART, PARTS)
        x_at = x_pool + (own * V + value) * CHUNK
        x = tl.load(x_at[:, None] + row[None, :], mask=real[:, None] & (row < stored)[None, :], other=0.0)
        v = tl.load(mixed_ptr + t * stride_mixed + 2 * HK * K + head * V + value, mask=real, other=0.0).to(tl.float32)
        both = zero
        for part in tl.static_range(PARTS):
            both = dot(terms(state[part]), both, terms(pairs[part]))
        sk, sq = (
            tl.sum(tl.where((n == 0)[None, :], both, 0.0), 1),
            tl.sum(tl.where((n == 1)[None, :], both, 0.0), 1),
        )
        new = beta * (v - (decay * k_norm) * sk)
        tl.store(x_at + i, new, mask=real)
        x = tl.where((row < i)[None, :], x, tl.where((row == i)[None, :], new[:, None], 0.0))
        added = dot(terms(x), zero, m_terms)
        out = (decay * q_norm) * sq + tl.sum(tl.where((n == 0)[None, :], added, 0.0), 1)
        tl.store(out_ptr + (t * HV + head) * V + value, out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _close_kernel(
    state_pool, x_pool, inverse_pool, keys_pool, key_norms_pool, sums_pool, cu_seqlens, seqlens, state_slots,
    sequences,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    S: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Brings the states of the sequences that begin a chunk in this step behind the chunk before. The programs share
    these sequences, value heads and rows of the state."""
    PARTS: tl.constexpr = KP // 64 if KP > 64 else 1
    PART: tl.constexpr = KP // PARTS
    TILES: tl.constexpr = (V + ROWS - 1) // ROWS
    device_math.after_previous_kernel()
    count, place, slots, starts = sequences_to_close(cu_seqlens, seqlens, state_slots, sequences, S)
    row = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), count * (HV * TILES), PROGRAMS):
        mine = place == item // (HV * TILES)
        slot = tl.sum(tl.where(mine, slots, 0), 0).to(tl.int64)
        start = tl.sum(tl.where(mine, starts, 0), 0)
        head = item // TILES % HV
        value = item % TILES * ROWS + tl.arange(0, ROWS)
        real_value = (value < V)[:, None]
        own, k_row = slot * HV + head, (slot * HK + head // (HV // HK)) * CHUNK + row
        x_at = x_pool + (own * V + value)[:, None] * CHUNK + row[None, :]
        x = terms(tl.load(x_at, mask=real_value & (row >= 0)[None, :], other=0.0))
        k_norm = tl.load(key_norms_pool + k_row)
        last_decay, factor = end_factors(tl.load(sums_pool + own * CHUNK + row), k_norm)
        transposed = tl.load(inverse_pool + own * (CHUNK * CHUNK) + row[None, :] * CHUNK + row[:, None])
        inverse = terms(transposed * factor[None, :])
        for part in tl.static_range(PARTS):
            key = part * PART + tl.arange(0, PART)
            k_at = keys_pool + k_row[:, None] * K + key[None, :]
            k = tl.load(k_at, mask=(row >= 0)[:, None] & (key < K)[None, :], other=0.0)
            keys = terms(dot(inverse, tl.zeros((CHUNK, PART), tl.float32), terms(k)))
            at = state_pool + (own * V + value)[:, None] * K + key[None, :]
            real = real_value & (key < K)[None, :]
            state = tl.load(at, mask=real & (start > CHUNK), other=0.0)
            added = dot(x, tl.zeros((ROWS, PART), tl.float32), keys)
            tl.store(at, state * last_decay + added, mask=real)


def sizes(variant: GatedDelta) -> tuple[int, int, int, int]:
    """Hk, Hv, K, and K padded to a tile's columns."""
    keys = variant.key_dim
    return variant.num_key_heads, variant.num_value_heads, keys, max(16, triton.next_power_of_2(keys))


def close_chunks(
    state: DeltaState, cu_seqlens_q: Tensor, seqlens_k: Tensor, state_slots: Tensor, variant: GatedDelta
) -> None:
    """Brings the states of sequences that begin a chunk with this step behind the chunk before."""
    sequences, values = len(state_slots), variant.value_dim
    items = sequences * variant.num_value_heads * -(-values // CLOSE_ROWS)
    launch(
        _close_kernel, (min(CLOSE_PROGRAMS, items), 1, 1), (*state, cu_seqlens_q, seqlens_k, state_slots, sequences),
        (*sizes(variant), values, CLOSE_ROWS, padded(sequences), CLOSE_PROGRAMS), 4, 1,
    )  # fmt: skip


def decode(
    mixed: Tensor,
    norms: Tensor,
    gates: Tensor,
    beta: Tensor,
    out: Tensor,
    state: DeltaState,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    num_decodes: int,
    variant: GatedDelta,
) -> None:
    """Writes the outputs [T, Hv, V] of the first sequences, and each one's new row of its open chunk.

    norms [T, 2, Hk], gates and beta [T, Hv]: of `gated_delta`'s tokens; all float32."""
    heads = variant.num_value_heads
    factors = torch.empty((num_decodes, heads, 2, 64), device=mixed.device)
    launch(
        _decode_kernel, (heads, num_decodes, 1),
        (mixed, norms, gates, beta, factors, out, *state, cu_seqlens_q, seqlens_k, state_slots, mixed.stride(0)),
        (*sizes(variant), variant.value_dim, ROWS, COLUMNS, STAGES), WARPS, STAGES,
    )  # fmt: skip
