"""The open chunks of the gated delta rule, several new rows at once (`gated_delta`).

Up to `WINDOW` rows take about the same time: the state is read once for them, and not written at all. 256 sequences
with 12 new tokens each take 520 us in a layer of Qwen3.5-4B on an H200, 256 decodes 230 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels import gated_delta_decode as decode
from evalengine.kernels.chunks import CHUNK, chain_dot, dot, load_state, load_terms, store_terms, terms
from evalengine.kernels.launching.launch import launch
from evalengine.kernels.recurrent_variant import DeltaState, GatedDelta

WINDOW = tl.constexpr(16)  # rows at a time
OLD_ROWS = tl.constexpr(16)  # earlier rows at a time
ROWS, STAGES = 32, 2  # of the state; as in `gated_delta`, products have too few rows or warps for wgmma
WARPS, REGISTERS, RESIDENT = 2, 255, 528  # an SM runs four programs; all 132 of an H200


@triton.jit
def _open_chunk(s, cu_seqlens, seqlens, state_slots, start_slots):
    """A sequence's last chunk: its slot, that of the rows before the step and of the state before the chunk, the token
    of the step that the chunk's row 0 would be, its new rows [begin, end), and whether there is a chunk before it."""
    slot, first, last = tl.load(state_slots + s).to(tl.int64), tl.load(cu_seqlens + s), tl.load(cu_seqlens + s + 1)
    length = tl.load(seqlens + s)
    end = (length + CHUNK - 1) % CHUNK + 1
    begin = tl.maximum(end - (last - first), 0)
    # Where this step began the chunk, there are no rows before, and the state is where the step has put it.
    start_slot = tl.where(begin == 0, slot, tl.load(start_slots + s).to(tl.int64))
    return slot, start_slot, last - end, begin, end, length > CHUNK


@triton.jit
def _factors(
    mixed_ptr, norms_ptr, keys_pool, key_norms_pool, j, real, totals_j, pair, norms, beta, totals, i, new, is_q, token,
    begin, start_slot, key_head, stride_mixed, HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """The entries [j, i] of -A and B in a window's columns, zeros where there are none; the keys of the rows j, and the
    factors of their norms. totals: the gates' sums."""
    key, stored, tokens = tl.arange(0, KP), (start_slot * HK + key_head) * CHUNK + j, (token + j).to(tl.int64)
    k_at = mixed_ptr + tokens * stride_mixed + (HK + key_head) * K
    k_at = tl.where(j < begin, keys_pool + stored * K, k_at)
    k = tl.load(k_at[:, None] + key[None, :], mask=real[:, None] & (key < K)[None, :], other=0.0)
    k_norms_at = tl.where(j < begin, key_norms_pool + stored, norms_ptr + (tokens * 2 + 1) * HK + key_head)
    k_norms = tl.load(k_norms_at, mask=real, other=0.0)
    products = dot(terms(k), tl.zeros((j.shape[0], i.shape[0]), tl.float32), pair)
    products *= norms[None, :] * k_norms[:, None]
    seen = (j[:, None] < i[None, :]) | (is_q[None, :] & (j[:, None] == i[None, :]))
    seen &= real[:, None] & new[None, :]
    decays = device_math.exp(tl.where(seen, totals[None, :] - totals_j[:, None], 0.0))
    factors = tl.where(is_q[None, :], decays, -(beta[None, :] * decays)) * products
    return tl.where(seen, factors, 0.0), k, k_norms


@triton.jit
def _coefficients_kernel(
    mixed_ptr, norms_ptr, gates_ptr, beta_ptr, m_ptr, inverse_pool, keys_pool, key_norms_pool, sums_pool, cu_seqlens,
    seqlens, state_slots, start_slots, stride_mixed,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Program (value head, sequence): the new rows of T, of the keys and of the gates' sums; and M transposed, [j, i],
    in three terms, by windows. A window has two columns for each of its rows i: of the first half k_i makes A and T, of
    the second q_i makes B and M."""
    device_math.after_previous_kernel()
    head, s = tl.program_id(0), tl.program_id(1)
    key_head = head // (HV // HK)
    slot, start_slot, token, begin, end, _follows = _open_chunk(s, cu_seqlens, seqlens, state_slots, start_slots)
    if slot < 0:
        return
    row, few, c = tl.arange(0, CHUNK), tl.arange(0, WINDOW), tl.arange(0, 2 * WINDOW)
    key, is_q = tl.arange(0, KP), c >= WINDOW
    own, k_row = slot * HV + head, (slot * HK + key_head) * CHUNK
    m_ptr += (s * HV + head).to(tl.int64) * (3 * CHUNK * CHUNK)
    start_inverse = inverse_pool + (start_slot * HV + head) * (CHUNK * CHUNK)
    start_sums = sums_pool + (start_slot * HV + head) * CHUNK
    inverse_pool += own * (CHUNK * CHUNK)
    sums_pool += own * CHUNK
    total = tl.load(start_sums + begin - 1, mask=begin > 0, other=0.0)
    for block in tl.range(begin, end, WINDOW, num_stages=1):
        i = block + c % WINDOW
        new, tokens = i < end, (token + i).to(tl.int64)
        at = mixed_ptr + tokens * stride_mixed + tl.where(is_q, key_head, HK + key_head) * K
        pair = terms(tl.load(at[None, :] + key[:, None], mask=new[None, :] & (key < K)[:, None], other=0.0))
        norms = tl.load(norms_ptr + (tokens * 2 + tl.where(is_q, 0, 1)) * HK + key_head, mask=new, other=0.0)
        beta = tl.load(beta_ptr + tokens * HV + head, mask=new, other=0.0)
        own_totals, totals = tl.zeros((WINDOW,), tl.float32), tl.zeros((2 * WINDOW,), tl.float32)
        for r in tl.static_range(WINDOW):
            gate_at = gates_ptr + (token + block + r).to(tl.int64) * HV + head
            total += tl.load(gate_at, mask=block + r < end, other=0.0)
            own_totals, totals = tl.where(few == r, total, own_totals), tl.where(i == block + r, total, totals)
        # The chains of T's rows and M's: first what the rows before the window give, then its own ones.
        rows = tl.where(~is_q[:, None] & (i[:, None] == row[None, :]), 1.0, 0.0)
        for part in tl.range(0, block, OLD_ROWS, num_stages=1):
            j = part + tl.arange(0, OLD_ROWS)
            old_totals = tl.load(tl.where(j < begin, start_sums, sums_pool) + j, mask=j < block, other=0.0)
            factors, _k, _k_norms = _factors(
                mixed_ptr, norms_ptr, keys_pool, key_norms_pool, j, j < block, old_totals, pair, norms, beta, totals, i,
                new, is_q, token, begin, start_slot, key_head, stride_mixed, HK, K, KP,
            )  # fmt: skip
            # Whole sectors of 8: a condition for each element would make loads of one. T is 0 above its diagonal.
            given = (j < block)[:, None] & (row[None, :] // 8 <= j[:, None] // 8)
            inverse_at = tl.where(j < begin, start_inverse, inverse_pool) + j * CHUNK
            inverse = tl.load(inverse_at[:, None] + row[None, :], mask=given, other=0.0)
            rows = chain_dot(tl.trans(factors), inverse, rows)
        j = block + few
        factors, k, k_norms = _factors(
            mixed_ptr, norms_ptr, keys_pool, key_norms_pool, j, j < end, own_totals, pair, norms, beta, totals, i, new,
            is_q, token, begin, start_slot, key_head, stride_mixed, HK, K, KP,
        )  # fmt: skip
        tl.store(sums_pool + j, own_totals, mask=j < end)
        if head % (HV // HK) == 0:
            tl.store(
                keys_pool + (k_row + j)[:, None] * K + key[None, :], k, mask=(j < end)[:, None] & (key < K)[None, :]
            )
            tl.store(key_norms_pool + k_row + j, k_norms, mask=j < end)
        for r in tl.static_range(WINDOW):
            t = tl.sum(tl.where((c == r)[:, None], rows, 0.0), 0)
            factor = tl.sum(tl.where((few == r)[:, None], factors, 0.0), 0)
            added = tl.fma(tl.broadcast_to(factor[:, None], rows.shape), tl.broadcast_to(t[None, :], rows.shape), rows)
            rows = tl.where(((i > block + r) | (is_q & (i == block + r)))[:, None], added, rows)
        at = inverse_pool + i[:, None] * CHUNK + row[None, :]
        tl.store(at, rows, mask=(new & ~is_q)[:, None] & (row >= 0)[None, :])
        to = m_ptr + (block - begin) * CHUNK + row[None, :] * WINDOW + (c - WINDOW)[:, None]
        store_terms(to, CHUNK * CHUNK, rows, is_q[:, None] & (row >= 0)[None, :])
        tl.debug_barrier()  # threads read what others have stored


@triton.jit
def _rows_kernel(
    mixed_ptr, norms_ptr, beta_ptr, m_ptr, out_ptr, state_pool, x_pool, sums_pool, cu_seqlens, seqlens, state_slots,
    start_slots, stride_mixed,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tiles of rows of the state, value head, sequence): the new rows of x, and the outputs."""
    PARTS: tl.constexpr = KP // 64 if KP > 64 else 1
    PART: tl.constexpr = KP // PARTS
    device_math.after_previous_kernel()
    first_tile, head, s = tl.program_id(0) * TILES, tl.program_id(1), tl.program_id(2)
    key_head = head // (HV // HK)
    slot, start_slot, token, begin, end, follows = _open_chunk(s, cu_seqlens, seqlens, state_slots, start_slots)
    row, few = tl.arange(0, CHUNK), tl.arange(0, WINDOW)
    sector = row // 8 * 8
    if slot < 0:
        last = tl.load(cu_seqlens + s + 1)
        for tile in range(first_tile, first_tile + TILES):
            value = tile * ROWS + tl.arange(0, ROWS)
            for t in range(tl.load(cu_seqlens + s), last, WINDOW):
                at = out_ptr + ((t + few)[None, :].to(tl.int64) * HV + head) * V + value[:, None]
                zeros = tl.zeros((ROWS, WINDOW), out_ptr.dtype.element_ty)
                tl.store(at, zeros, mask=(t + few < last)[None, :] & (value < V)[:, None])
        return
    own, start_own = slot * HV + head, start_slot * HV + head
    m_ptr += (s * HV + head).to(tl.int64) * (3 * CHUNK * CHUNK) + row[:, None] * WINDOW + few[None, :]
    zero = tl.zeros((ROWS, WINDOW), tl.float32)
    for block in tl.range(begin, end, WINDOW, num_stages=1):
        i = block + few
        new, tokens = i < end, (token + i).to(tl.int64)
        m = load_terms(m_ptr + (block - begin) * CHUNK, CHUNK * CHUNK, (row >= 0)[:, None])
        norms_at = norms_ptr + tokens * 2 * HK + key_head
        q_norm, k_norm = tl.load(norms_at, mask=new, other=0.0), tl.load(norms_at + HK, mask=new, other=0.0)
        beta = tl.load(beta_ptr + tokens * HV + head, mask=new, other=0.0)
        decay = device_math.exp(tl.load(sums_pool + own * CHUNK + i, mask=new, other=0.0))
        k, q = (), ()
        for part in tl.static_range(PARTS):
            key = part * PART + tl.arange(0, PART)
            real = new[None, :] & (key < K)[:, None]
            q_at = mixed_ptr + tokens[None, :] * stride_mixed + key_head * K + key[:, None]
            k += (tl.load(q_at + HK * K, mask=real, other=0.0),)  # type: ignore[assignment]
            q += (tl.load(q_at, mask=real, other=0.0),)  # type: ignore[assignment]
        # Stored and loaded by whole sectors of 8 rows: the first one that is stored has old rows, too.
        from_start = sector < tl.where(block == begin, begin, begin // 8 * 8)
        stored = (sector >= block // 8 * 8) & (sector < tl.minimum(block + WINDOW, end))
        place = tl.broadcast_to(tl.minimum(tl.maximum(row - block, 0), WINDOW - 1)[None, :], (ROWS, CHUNK))
        for tile in tl.range(first_tile, first_tile + TILES, num_stages=STAGES):
            value = tile * ROWS + tl.arange(0, ROWS)
            real_value = (value < V)[:, None]
            state = load_state(state_pool + start_own * V * K, value, follows, V, K, PART, PARTS)
            x_at = x_pool + (own * V + value)[:, None] * CHUNK + row[None, :]
            start_at = x_pool + (start_own * V + value)[:, None] * CHUNK + row[None, :]
            old_x = tl.load(
                tl.where(from_start[None, :], start_at, x_at), mask=real_value & (sector < block)[None, :], other=0.0
            )
            v_at = mixed_ptr + tokens[None, :] * stride_mixed + 2 * HK * K + head * V + value[:, None]
            v = tl.load(v_at, mask=real_value & new[None, :], other=0.0).to(tl.float32)
            sk, sq = zero, zero
            for part in tl.static_range(PARTS):
                state_terms = terms(state[part])
                sk = dot(state_terms, sk, terms(k[part]))
                sq = dot(state_terms, sq, terms(q[part]))
            x_new = beta[None, :] * (v - (decay * k_norm)[None, :] * sk)
            x = tl.where((row < tl.minimum(block + WINDOW, end))[None, :], tl.gather(x_new, place, 1), 0.0)
            x = tl.where((row < block)[None, :], old_x, x)
            tl.store(x_at, x, mask=real_value & stored[None, :])
            out = (decay * q_norm)[None, :] * sq + dot(terms(x), zero, m)
            out_at = out_ptr + (tokens[None, :] * HV + head) * V + value[:, None]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=real_value & new[None, :])
        tl.debug_barrier()  # threads read what others have stored


def open_rows(
    mixed: Tensor,
    norms: Tensor,
    gates: Tensor,
    beta: Tensor,
    out: Tensor,
    state: DeltaState,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    start_slots: Tensor,
    variant: GatedDelta,
) -> None:
    """Writes the outputs [T, Hv, V] of the sequences' last chunks (zeros for padding, of all its tokens), and these
    chunks' new rows.

    norms [T, 2, Hk], gates and beta [T, Hv]: of `gated_delta`'s tokens; all float32."""
    sizes = _, heads, _, _ = decode.sizes(variant)
    sequences, values, step = len(state_slots), variant.value_dim, (cu_seqlens_q, seqlens_k, state_slots, start_slots)
    m = torch.empty((sequences, heads, 3, 64, 64), dtype=torch.bfloat16, device=mixed.device)
    launch(
        _coefficients_kernel, (heads, sequences, 1),
        (mixed, norms, gates, beta, m, *state[2:], *step, mixed.stride(0)), sizes, WARPS, 1, maxnreg=REGISTERS,
    )  # fmt: skip
    tiles, each = decode.shared_tiles(values, ROWS, sequences * heads, RESIDENT)
    stages = STAGES if sizes[-1] * mixed.itemsize <= 512 else 1  # within the shared memory of any GPU
    launch(
        _rows_kernel, (tiles, heads, sequences),
        (mixed, norms, beta, m, out, state.state, state.x, state.gate_sums, *step, mixed.stride(0)),
        (*sizes, values, ROWS, each, stages), WARPS, stages, maxnreg=REGISTERS,
    )  # fmt: skip
