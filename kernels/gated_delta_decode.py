"""Decodes of the gated delta rule: the last row of an open chunk (`gated_delta`), and the closing of a chunk."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.chunks import (
    CHUNK,
    chain_dot,
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
REGISTERS, RESIDENT = 112, 1056  # an SM runs eight programs; all 132 of an H200
CLOSE_ROWS, CLOSE_PROGRAMS, CLOSE_REGISTERS = 32, 396, 168  # an SM runs three programs


@triton.jit
def _decode_kernel(
    mixed_ptr, norms_ptr, gates_ptr, beta_ptr, out_ptr, state_pool, x_pool, inverse_pool, keys_pool, key_norms_pool,
    sums_pool, cu_seqlens, seqlens, state_slots, stride_mixed,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (value head, sequence, tiles of rows of the state): the open chunk's new rows of T, of the keys, of the
    gates' sums and of x, and the output.

    All programs of a head compute the row of T; the first one stores it. What needs no norms and gates is loaded before
    the wait: the kernel before this one writes nothing else that is read here, and those before that one have ended.
    Such loads pass by the L1 cache, which need not have been emptied since."""
    PARTS: tl.constexpr = KP // 64 if KP > 64 else 1
    PART: tl.constexpr = KP // PARTS
    head, s, first_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2) * TILES
    key_head = head // (HV // HK)
    slot = tl.load(state_slots + s, cache_modifier=".cg").to(tl.int64)
    length, t = tl.load(seqlens + s, cache_modifier=".cg"), tl.load(cu_seqlens + s, cache_modifier=".cg").to(tl.int64)
    out_ptr += (t * HV + head) * V
    if slot < 0:
        device_math.after_previous_kernel()
        for tile in range(first_tile, first_tile + TILES):
            value = tile * ROWS + tl.arange(0, ROWS)
            tl.store(out_ptr + value, tl.zeros((ROWS,), out_ptr.dtype.element_ty), mask=value < V)
        return
    i = (length - 1) % CHUNK
    row, key, n = tl.arange(0, CHUNK), tl.arange(0, KP), tl.arange(0, N)
    own, real_key, old = slot * HV + head, key < K, row < i
    stored = tl.multiple_of((i + 7) // 8 * 8, 8)
    k_row = (slot * HK + key_head) * CHUNK
    mixed_ptr += t * stride_mixed
    q_at = mixed_ptr + key_head * K + key
    q_new = tl.load(q_at, mask=real_key, other=0.0, cache_modifier=".cg")
    k_new = tl.load(q_at + HK * K, mask=real_key, other=0.0, cache_modifier=".cg")
    k_at = keys_pool + (k_row + row)[:, None] * K + key[None, :]
    k_at = tl.where((row == i)[:, None], (mixed_ptr + (HK + key_head) * K + key)[None, :], k_at)
    k = tl.load(k_at, mask=(row <= i)[:, None] & real_key[None, :], other=0.0, cache_modifier=".cg")
    k_norms = tl.load(key_norms_pool + k_row + row, mask=old, other=0.0, cache_modifier=".cg")
    pair = tl.where((n == 0)[None, :], k_new[:, None], tl.where((n == 1)[None, :], q_new[:, None], 0.0)).to(k.dtype)
    products = dot(terms(k), tl.zeros((CHUNK, N), tl.float32), terms(pair))
    kk = tl.sum(tl.where((n == 0)[None, :], products, 0.0), 1)
    qk = tl.sum(tl.where((n == 1)[None, :], products, 0.0), 1)
    inverse_at = inverse_pool + own * (CHUNK * CHUNK) + row
    # Whole sectors of 8: a condition for each element would make loads of one. T is 0 above its diagonal.
    seen = old[:, None] & (row[None, :] // 8 <= row[:, None] // 8)
    inverse = tl.load(inverse_at[None, :] + row[:, None] * CHUNK, mask=seen, other=0.0, cache_modifier=".cg")
    total = tl.load(sums_pool + own * CHUNK + i - 1, mask=i > 0, other=0.0, cache_modifier=".cg")
    totals = tl.load(sums_pool + own * CHUNK + row, mask=old, other=0.0, cache_modifier=".cg")
    device_math.after_previous_kernel()
    total += tl.load(gates_ptr + t * HV + head)
    norms = norms_ptr + t * 2 * HK + key_head
    q_norm, k_norm, beta = tl.load(norms), tl.load(norms + HK), tl.load(beta_ptr + t * HV + head)
    decays = device_math.exp(tl.where(old, total - totals, 0.0))
    k_norms = tl.where(row == i, k_norm, k_norms)
    a = (beta * decays) * ((k_norm * k_norms) * kk)
    b = decays * ((q_norm * k_norms) * qk)
    # The rows -A_i and B_i times the rows of T before: T's own, and the part of M's that does not need T's.
    is_a = (tl.arange(0, 2) == 0)[:, None]
    factors = tl.where(old[None, :], tl.where(is_a, -a[None, :], b[None, :]), 0.0)
    chains = chain_dot(factors, inverse, tl.where(is_a & (row == i)[None, :], 1.0, 0.0))
    new_inverse = tl.sum(tl.where(is_a, chains, 0.0), 0)
    m = tl.sum(tl.where(is_a, 0.0, chains), 0)
    b_new = tl.sum(tl.where(row == i, b, 0.0), 0)
    m = tl.fma(new_inverse, tl.broadcast_to(b_new, (CHUNK,)), m)
    if first_tile == 0:
        tl.store(inverse_at + i * CHUNK, new_inverse)
        tl.store(sums_pool + own * CHUNK + i, total)
        if head % (HV // HK) == 0:
            tl.store(keys_pool + (k_row + i) * K + key, k_new, mask=real_key)
            tl.store(key_norms_pool + k_row + i, k_norm)
    m_terms = terms(tl.where((n == 0)[None, :], m[:, None], 0.0))
    decay = device_math.exp(total)
    pairs = ()
    for part in tl.static_range(PARTS):
        column = part * PART + tl.arange(0, PART)
        at = mixed_ptr + tl.where(n == 0, HK + key_head, key_head)[None, :] * K + column[:, None]
        pairs += (tl.load(at, mask=(column < K)[:, None] & (n < 2)[None, :], other=0.0),)  # type: ignore[assignment]
    zero = tl.zeros((ROWS, N), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        value = (first_tile + tile) * ROWS + tl.arange(0, ROWS)
        real = value < V
        state = load_state(state_pool + own * V * K, value, length > CHUNK, V, K, PART, PARTS)
        x_at = x_pool + (own * V + value) * CHUNK
        x = tl.load(x_at[:, None] + row[None, :], mask=real[:, None] & (row < stored)[None, :], other=0.0)
        v = tl.load(mixed_ptr + 2 * HK * K + head * V + value, mask=real, other=0.0).to(tl.float32)
        both = zero
        for part in tl.static_range(PARTS):
            both = dot(terms(state[part]), both, terms(pairs[part]))
        sk = tl.sum(tl.where((n == 0)[None, :], both, 0.0), 1)
        sq = tl.sum(tl.where((n == 1)[None, :], both, 0.0), 1)
        new = beta * (v - (decay * k_norm) * sk)
        tl.store(x_at + i, new, mask=real)
        x = tl.where(old[None, :], x, tl.where((row == i)[None, :], new[:, None], 0.0))
        added = dot(terms(x), zero, m_terms)
        out = (decay * q_norm) * sq + tl.sum(tl.where((n == 0)[None, :], added, 0.0), 1)
        tl.store(out_ptr + value, out.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _close_kernel(
    state_pool, x_pool, inverse_pool, keys_pool, key_norms_pool, sums_pool, cu_seqlens, seqlens, state_slots,
    sequences, layers, layer_slots,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    S: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Brings the states of the sequences that begin a chunk in this step behind the chunk before. The programs share
    these sequences, layers, value heads and parts of the state's columns; each part has its K'."""
    PARTS: tl.constexpr = KP // 64 if KP > 64 else 1
    PART: tl.constexpr = KP // PARTS
    TILES: tl.constexpr = (V + ROWS - 1) // ROWS
    device_math.after_previous_kernel()
    count, place, slots, starts = sequences_to_close(cu_seqlens, seqlens, state_slots, sequences, S)
    row = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), count * layers * (HV * PARTS), PROGRAMS):
        mine = place == item // (HV * PARTS) // layers
        slot = tl.sum(tl.where(mine, slots, 0), 0).to(tl.int64) + item // (HV * PARTS) % layers * layer_slots
        start = tl.sum(tl.where(mine, starts, 0), 0)
        head, key = item // PARTS % HV, item % PARTS * PART + tl.arange(0, PART)
        real_key = (key < K)[None, :]
        own, k_row = slot * HV + head, (slot * HK + head // (HV // HK)) * CHUNK + row
        last_decay, factor = end_factors(tl.load(sums_pool + own * CHUNK + row), tl.load(key_norms_pool + k_row))
        transposed = tl.load(inverse_pool + own * (CHUNK * CHUNK) + row[None, :] * CHUNK + row[:, None])
        k = tl.load(keys_pool + k_row[:, None] * K + key[None, :], mask=(row >= 0)[:, None] & real_key, other=0.0)
        keys = terms(dot(terms(transposed * factor[None, :]), tl.zeros((CHUNK, PART), tl.float32), terms(k)))
        for tile in range(TILES):
            value = tile * ROWS + tl.arange(0, ROWS)
            real_value = (value < V)[:, None]
            x_at = x_pool + (own * V + value)[:, None] * CHUNK + row[None, :]
            x = tl.load(x_at, mask=real_value & (row >= 0)[None, :], other=0.0)
            at = state_pool + (own * V + value)[:, None] * K + key[None, :]
            state = tl.load(at, mask=real_value & real_key & (start > CHUNK), other=0.0)
            added = dot(terms(x), tl.zeros((ROWS, PART), tl.float32), keys)
            tl.store(at, state * last_decay + added, mask=real_value & real_key)


def sizes(variant: GatedDelta) -> tuple[int, int, int, int]:
    """Hk, Hv, K, and K padded to a tile's columns."""
    keys = variant.key_dim
    return variant.num_key_heads, variant.num_value_heads, keys, max(16, triton.next_power_of_2(keys))


def shared_tiles(values: int, rows: int, heads: int, resident: int) -> tuple[int, int]:
    """How many programs share the tiles of a head's state, and how many tiles each has. heads: of all sequences. Few
    leave SMs idle: then a head's tiles are shared by as many programs as are resident at once."""
    tiles = -(-values // rows)
    each = -(-tiles // max(1, resident // heads))
    return -(-tiles // each), each


def close_chunks(
    state: DeltaState, cu_seqlens_q: Tensor, seqlens_k: Tensor, state_slots: Tensor, layers: int, variant: GatedDelta
) -> None:
    """Brings the states of sequences that begin a chunk with this step behind the chunk before, in so many layers, of
    which `state` is the first one's."""
    sequences, wide_keys = len(state_slots), sizes(variant)[-1]
    items = sequences * layers * variant.num_value_heads * max(1, wide_keys // 64)
    launch(
        _close_kernel, (min(CLOSE_PROGRAMS, items), 1, 1),
        (*state, cu_seqlens_q, seqlens_k, state_slots, sequences, layers, len(state.state)),
        (*sizes(variant), variant.value_dim, CLOSE_ROWS, padded(sequences), CLOSE_PROGRAMS), 4, 1,
        maxnreg=CLOSE_REGISTERS,
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
    """Writes the outputs [T, Hv, V] of the first sequences (zeros for padding), and their open chunks' new rows.

    norms [T, 2, Hk], gates and beta [T, Hv]: of `gated_delta`'s tokens; all float32."""
    heads = variant.num_value_heads
    programs, each = shared_tiles(variant.value_dim, ROWS, num_decodes * heads, RESIDENT)
    launch(
        _decode_kernel, (heads, num_decodes, programs),
        (mixed, norms, gates, beta, out, *state, cu_seqlens_q, seqlens_k, state_slots, mixed.stride(0)),
        (*sizes(variant), variant.value_dim, ROWS, COLUMNS, each, STAGES), WARPS, STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
