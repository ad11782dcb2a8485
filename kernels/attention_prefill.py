"""`native` prefill by Triton: a tile of rows walks all its chunks and merges them in registers.

    S sequences, T query rows, G query heads a KV head, M rows (token, head of the group) of a tile, D head_dim.

It takes every dtype, head_dim and page size; `attention_hopper` is quicker where it covers the model.
"""

from __future__ import annotations

import triton
import triton.language as tl

from evalengine.kernels.attention_parts import merge, merge_sink, normalized, reduce_chunk


@triton.jit
def sequence_of(tile, cu_seqlens_q, num_seqs, G: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr):
    """The sequence whose tiles include `tile`, and that tile's number in it.

    Sequence s starts at tile (its first row) // M + s.
    """
    base = tl.load(cu_seqlens_q)
    count = 0
    for first in range(0, num_seqs, STEP):
        s = first + tl.arange(0, STEP)
        row = (tl.load(cu_seqlens_q + s, mask=s < num_seqs, other=0) - base) * G
        count += tl.sum(((row // M + s <= tile) & (s < num_seqs)).to(tl.int32), 0)
    s = count - 1
    return s, tile - ((tl.load(cu_seqlens_q + s) - base) * G // M + s)


@triton.jit(
    do_not_specialize=["num_seqs", "stride_bt"],
    # These three start at the first prefill, so their alignment differs from step to step.
    do_not_specialize_on_alignment=["block_table", "cu_seqlens_q", "seqlens_k"],
)
def prefill_kernel(
    q_ptr, k_src, v_src, o_ptr, sinks_ptr, block_table, cu_seqlens_q, seqlens_k, num_seqs, scale,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_slot, stride_head, stride_bt,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, CHUNK_N: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): M rows (token, head of the group) of one sequence. The last tiles come first.

    sinks: [Hq] or None.
    """
    s, tile = sequence_of(tl.num_programs(0) - 1 - tl.program_id(0), cu_seqlens_q, num_seqs, G, M, STEP)
    head = tl.program_id(1)
    first_row = tl.load(cu_seqlens_q + s)
    queries = tl.load(cu_seqlens_q + s + 1) - first_row
    length = tl.load(seqlens_k + s)
    if tile * M >= queries * G:
        return
    r = tile * M + tl.arange(0, M)
    token, q_head = r // G, head * G + r % G
    column = tl.arange(0, DP)
    real = (token < queries)[:, None] & (column < D)[None, :]
    row = (first_row + token).to(tl.int64)[:, None]
    q = tl.load(q_ptr + row * stride_qt + q_head[:, None] * stride_qh + column[None, :], mask=real, other=0.0)
    q_position = length - queries + token
    pages = block_table + s.to(tl.int64) * stride_bt
    end = tl.minimum(length, length - queries + (tile * M + M - 1) // G + 1)
    unmasked_end = (length - queries + tile * M // G + 1) // BLOCK_N * BLOCK_N
    KV: tl.constexpr = q_ptr.dtype.element_ty
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DP), tl.float32)
    low = 0
    if WINDOW is not None:
        low = tl.maximum(length - queries + tile * M // G - WINDOW + 1, 0)
    for start in range(low // CHUNK_N * CHUNK_N, end, CHUNK_N):
        m_c, l_c, acc_c = reduce_chunk(
            q, k_src, v_src, pages, start, unmasked_end, tl.minimum(start + CHUNK_N, end), q_position, low, length,
            head, scale, stride_slot, stride_head, M, D, DP, PAGE, BLOCK_N, TMA, WINDOW, CAPPED, PRECISION, KV,
        )  # fmt: skip
        m, l, acc = merge(m, l, acc, m_c, l_c, acc_c)
    if sinks_ptr is not None:
        l, acc = merge_sink(m, l, acc, tl.load(sinks_ptr + q_head))
    o = normalized(acc, l).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + row * stride_ot + q_head[:, None] * stride_oh + column[None, :], o, mask=real)
