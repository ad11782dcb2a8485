"""`native` decode: one row a sequence. Chunks run in parallel and are merged in order; or first blocks, then chunks.

    S sequences, G query heads a KV head, M >= G rows of a tile, D head_dim, DP padded, N = BLOCK, C chunks a sequence.

Programs run in the order of their numbers, of which the chunk's is the slowest, and sequences come longest first: the
shortest work is done last, so that the GPU is full to the end. Whichever program of a sequence's chunks ends last
merges them all, in order. On an H200, 225 sequences of 300 to 1,200 tokens took 179 us in the batch's order with a
second kernel that merged, and take 168 (the bytes' floor is 165).

Where there are few (KV head, chunk, sequence) programs for the GPU, a chunk's sixteen blocks one after another on one
SM are slow (18 us for one sequence of 1,024 tokens). Then the scores and their blocks' maxima are made first, all
blocks at once; with them every block's running maximum is known, and a program a slice of D does the rest. The same
numbers are added in the same order, so the bytes are the same.

What sequences share is read once for all of them. A chunk is reduced block by block from a fresh state, and a row's
state depends on the row and on the blocks alone. So a program may take the rows of many sequences (M, a row for each
sequence and head of the group) through the blocks that they have in the same pages, as a small prefill does, and leave
every row's state (m, l, acc in float32, which loses nothing) after the last of them. The decode goes on from there:
with the chunk's other blocks if there are any, and with the merge of the chunks, in order. The same numbers are added
in the same order, so the bytes are those of a decode that reads everything itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels.attention_batch import TILE_DECODES, AttentionSchedule, RaggedBatch, SharedBlocks
from evalengine.kernels.attention_parts import (
    blocks,
    in_use,
    merge,
    merge_sink,
    normalized,
    reduce_chunk,
    scores,
    slots,
)
from evalengine.kernels.device_math import after_previous_kernel, is_last_to_arrive
from evalengine.kernels.launching.launch import Launch, launch

# Programs of the shared part at most, in a CUDA graph, whose grid is laid out before the tiles are known; each takes
# one tile after another. An H100 has 132 SMs.
PROGRAMS = 512
SHARED_TABLES = ("tiles", "members", "count", "tokens", "block_table", "seqlens_k")

# These tables are made for each step; a new width or alignment must not cause another compilation.
TABLES = ("block_table", "seqlens_k")


@triton.jit
def _finish(
    m, l, acc, o_ptr, sinks_ptr, head, m_ptr, l_ptr, acc_ptr, arrived_ptr, first, chunk, chunks, column, stride_oh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Stores what one chunk gave (m, l [M], acc [M, columns]), or, as the sequence's last program, the result.

    SPLIT: the state goes to m, l [.., C, G] and acc [.., C, G, DP], which begin at state `first`. A sequence of one
    chunk has its result at once (merging it into the fresh state would change nothing: a = 0, b = 1). o_ptr is the
    place of the group's first head. sinks: [Hq], merged in after the last chunk, or None.
    """
    if SPLIT and chunks > 1:
        r = tl.arange(0, M)
        state = (first + chunk) * G + r
        tl.store(m_ptr + state, m, mask=r < G)
        tl.store(l_ptr + state, l, mask=r < G)
        tl.store(acc_ptr + state[:, None] * DP + column[None, :], acc, mask=(r < G)[:, None])
        if is_last_to_arrive(arrived_ptr, chunks, "gpu"):
            merge_chunks(
                o_ptr, sinks_ptr, head, m_ptr, l_ptr, acc_ptr, first, chunks, column, stride_oh, G, D, DP
            )  # fmt: skip
    else:
        store_result(m, l, acc, o_ptr, sinks_ptr, head, column, stride_oh, G, D)


@triton.jit
def store_result(m, l, acc, o_ptr, sinks_ptr, head, column, stride_oh, G: tl.constexpr, D: tl.constexpr):
    """Stores the result of the G heads that begin at o_ptr; m and l [rows], acc [rows, columns]."""
    r = tl.arange(0, acc.shape[0])
    if sinks_ptr is not None:
        l, acc = merge_sink(m, l, acc, tl.load(sinks_ptr + head * G + r, mask=r < G, other=0.0))
    o = normalized(acc, l).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + r[:, None] * stride_oh + column[None, :], o, mask=(r < G)[:, None] & (column < D)[None, :])


@triton.jit
def merge_chunks(
    o_ptr, sinks_ptr, head, m_ptr, l_ptr, acc_ptr, first, chunks, column, stride_oh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Merges the chunks' states, left to right, with eight chunks' loads in flight, past an L1 that may be older."""
    GP: tl.constexpr = triton.next_power_of_2(G)
    g = tl.arange(0, GP)
    real = (g < G)[:, None]
    m = tl.full((GP,), float("-inf"), tl.float32)
    l = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, column.shape[0]), tl.float32)
    for chunk in tl.range(0, chunks, loop_unroll_factor=8):
        state = (first + chunk) * G + g
        m_c = tl.load(m_ptr + state, mask=g < G, other=0.0, cache_modifier=".cg")
        l_c = tl.load(l_ptr + state, mask=g < G, other=0.0, cache_modifier=".cg")
        at = acc_ptr + state[:, None] * DP + column[None, :]
        m, l, acc = merge(m, l, acc, m_c, l_c, tl.load(at, mask=real, other=0.0, cache_modifier=".cg"))
    store_result(m, l, acc, o_ptr, sinks_ptr, head, column, stride_oh, G, D)


@triton.jit
def _lowest(length, WINDOW: tl.constexpr):
    """The lowest KV position that the last of `length` tokens sees."""
    low = 0
    if WINDOW is not None:
        low = tl.maximum(length - WINDOW, 0)
    return low


@triton.jit(do_not_specialize=["stride_bt"], do_not_specialize_on_alignment=TABLES)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, sinks_ptr, m_ptr, l_ptr, acc_ptr, arrived_ptr, block_table, seqlens_k, scale,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_slot, stride_head, stride_bt,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, CHUNK_N: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (KV head, sequence, chunk): the G rows that share the head, over one chunk, counted from the first one
    that the WINDOW reaches.

    SPLIT: sequences may have several chunks. arrived: int32 [S, Hkv] of zeros. sinks: [Hq] or None.
    """
    after_previous_kernel()
    head, s, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seqlens_k + s)
    low = _lowest(length, WINDOW)
    skipped = low // CHUNK_N
    start = (chunk + skipped) * CHUNK_N
    if start >= length:
        return
    r, column = tl.arange(0, M), tl.arange(0, DP)
    real = (r < G)[:, None] & (column < D)[None, :]
    row = s.to(tl.int64)
    q_head = head * G + r
    q = tl.load(q_ptr + row * stride_qt + q_head[:, None] * stride_qh + column[None, :], mask=real, other=0.0)
    q_position = tl.zeros((M,), tl.int32) + length - 1
    KV: tl.constexpr = q_ptr.dtype.element_ty
    m, l, acc = reduce_chunk(
        q, k_ptr, v_ptr, block_table + row * stride_bt, start, length // BLOCK_N * BLOCK_N,
        tl.minimum(start + CHUNK_N, length), q_position, low, length, head, scale, stride_slot, stride_head,
        M, D, DP, PAGE, BLOCK_N, False, WINDOW, CAPPED, PRECISION, KV, WINDOW is not None,
    )  # fmt: skip
    place = row * tl.num_programs(0) + head
    _finish(
        m, l, acc, o_ptr + row * stride_ot + head * G * stride_oh, sinks_ptr, head, m_ptr, l_ptr, acc_ptr,
        arrived_ptr + place, place * tl.num_programs(2), chunk, tl.cdiv(length, CHUNK_N) - skipped, column, stride_oh,
        G, D, DP, M, SPLIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_bt"], do_not_specialize_on_alignment=TABLES)
def score_kernel(
    q_ptr, k_ptr, d_ptr, top_ptr, block_table, seqlens_k,
    stride_qt, stride_qh, stride_slot, stride_head, stride_bt,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head, block, sequence): stores one block's d in [S, Hkv, blocks, G, N] and its rows' maxima in the
    same without N. Blocks are counted from the first one that the WINDOW reaches; positions past the end and before
    the window are -inf."""
    after_previous_kernel()
    head, block, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seqlens_k + s)
    low = _lowest(length, WINDOW)
    n = (block + low // BLOCK_N) * BLOCK_N
    if n >= length:
        return
    r, column, key = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, BLOCK_N)
    row = s.to(tl.int64)
    real = (r < G)[:, None] & (column < D)[None, :]
    q = tl.load(q_ptr + row * stride_qt + (head * G + r)[:, None] * stride_qh + column[None, :], mask=real, other=0.0)
    slot = slots(block_table + row * stride_bt, n, length, PAGE, BLOCK_N, False)
    k_at = k_ptr + slot[None, :] * stride_slot + head * stride_head + column[:, None]
    d = scores(q, tl.load(k_at, mask=(column < D)[:, None], other=0.0), CAPPED, PRECISION)
    d = tl.where(in_use(n, low, length, BLOCK_N, WINDOW)[None, :], d, float("-inf"))
    state = ((row * tl.num_programs(0) + head) * tl.num_programs(1) + block) * G + r
    tl.store(top_ptr + state, tl.max(d, 1), mask=r < G)
    tl.store(d_ptr + state[:, None] * BLOCK_N + key[None, :], d, mask=(r < G)[:, None])


@triton.jit(do_not_specialize=["max_blocks", "stride_bt"], do_not_specialize_on_alignment=TABLES)
def value_kernel(
    d_ptr, top_ptr, v_ptr, o_ptr, sinks_ptr, m_ptr, l_ptr, acc_ptr, arrived_ptr, block_table, seqlens_k, max_blocks,
    scale,
    stride_ot, stride_oh, stride_slot, stride_head, stride_bt,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, CHUNK_N: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """Program (KV head and slice of D, sequence, chunk): `online_step` of the chunk's blocks, from d and its maxima.

    The results are stored as by `decode_kernel`; every slice stores the same m and l. arrived: int32 [S, Hkv * slices].
    """
    after_previous_kernel()
    slices: tl.constexpr = DP // SLICE
    head, part = tl.program_id(0) // slices, tl.program_id(0) % slices
    s, chunk = tl.program_id(1), tl.program_id(2)
    length = tl.load(seqlens_k + s)
    low = _lowest(length, WINDOW)
    skipped = low // CHUNK_N
    start = (chunk + skipped) * CHUNK_N
    if start >= length:
        return
    begin = start
    if WINDOW is not None:
        begin = tl.maximum(start, low // BLOCK_N * BLOCK_N)
    heads = tl.num_programs(0) // slices
    row = s.to(tl.int64)
    r, key, column = tl.arange(0, M), tl.arange(0, BLOCK_N), part * SLICE + tl.arange(0, SLICE)
    KV: tl.constexpr = v_ptr.dtype.element_ty
    ones = tl.full((BLOCK_N, 16), 1.0, KV)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M, 16), tl.float32)
    acc = tl.zeros((M, SLICE), tl.float32)
    pages = block_table + row * stride_bt
    state = ((row * heads + head) * max_blocks + begin // BLOCK_N - low // BLOCK_N) * G + r
    slot = slots(pages, begin, length, PAGE, BLOCK_N, False)
    for n in tl.range(begin, tl.minimum(start + CHUNK_N, length), BLOCK_N):
        d = tl.load(d_ptr + state[:, None] * BLOCK_N + key[None, :], mask=(r < G)[:, None], other=0.0)
        top = tl.load(top_ptr + state, mask=r < G, other=0.0)
        inside = in_use(n, low, length, BLOCK_N, WINDOW)[:, None] & (column < D)[None, :]
        v = tl.load(v_ptr + slot[:, None] * stride_slot + head * stride_head + column[None, :], mask=inside, other=0.0)
        slot = slots(pages, n + BLOCK_N, length, PAGE, BLOCK_N, False)
        state += G
        m_new = tl.maximum(m, top * scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(tl.fma(d, tl.zeros_like(d) + scale, tl.zeros_like(d) - shift[:, None])).to(KV)
        alpha = tl.exp2(m - shift)
        l = tl.dot(p, ones, l * alpha[:, None], input_precision=PRECISION)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    place = row * heads + head
    _finish(
        m, tl.max(l, 1), acc, o_ptr + row * stride_ot + head * G * stride_oh, sinks_ptr, head, m_ptr, l_ptr, acc_ptr,
        arrived_ptr + place * slices + part, place * tl.num_programs(2), chunk, tl.cdiv(length, CHUNK_N) - skipped,
        column, stride_oh, G, D, DP, M, SPLIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "stride_bt"], do_not_specialize_on_alignment=SHARED_TABLES)
def shared_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, l_ptr, acc_ptr, tiles, members, count, block_table, chunks, scale,
    stride_qt, stride_qh, stride_slot, stride_head, stride_bt,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, CHUNK_N: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head and part of a tile's rows, first tile): the states of the tiles' rows after the shared blocks.

    The states are m, l [S, Hkv, C, G] and acc [S, Hkv, C, G, DP]. All blocks are whole and precede every row.
    """
    after_previous_kernel()
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    heads = tl.num_programs(0) // PARTS
    KV: tl.constexpr = q_ptr.dtype.element_ty
    r, column = part * M + tl.arange(0, M), tl.arange(0, DP)
    place, g = r // G, r % G
    ones = tl.full((BLOCK_N, 16), 1.0, KV)
    for tile in tl.range(tl.program_id(1), tl.load(count), tl.num_programs(1), num_stages=1):
        chunk, shared = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
        first, number = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
        if part * M < number * G:
            here = place < number
            row = tl.load(members + first + place, mask=here, other=0).to(tl.int64)
            real = here[:, None] & (column < D)[None, :]
            q_at = q_ptr + row[:, None] * stride_qt + (head * G + g)[:, None] * stride_qh + column[None, :]
            q = tl.load(q_at, mask=real, other=0.0)
            pages = block_table + tl.load(members + first).to(tl.int64) * stride_bt
            start = chunk * CHUNK_N
            end = start + shared
            m = tl.full((M,), float("-inf"), tl.float32)
            l = tl.zeros((M, 16), tl.float32)
            acc = tl.zeros((M, DP), tl.float32)
            slot = slots(pages, start, end, PAGE, BLOCK_N, False)
            m, l, acc, slot = blocks(
                q, k_ptr, v_ptr, pages, start, end, r, 0, end, head, scale, stride_slot, stride_head, slot, m, l, acc,
                ones, D, DP, PAGE, BLOCK_N, False, False, None, CAPPED, PRECISION,
            )  # fmt: skip
            state = ((row * heads + head) * chunks + chunk) * G + g
            tl.store(m_ptr + state, m, mask=here)
            tl.store(l_ptr + state, tl.max(l, 1), mask=here)
            tl.store(acc_ptr + state[:, None] * DP + column[None, :], acc, mask=here[:, None])


@triton.jit(do_not_specialize=["stride_bt", "stride_tokens"], do_not_specialize_on_alignment=SHARED_TABLES)
def own_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, sinks_ptr, m_ptr, l_ptr, acc_ptr, arrived_ptr, tokens, block_table, seqlens_k, scale,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_slot, stride_head, stride_bt, stride_tokens,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, CHUNK_N: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (KV head, sequence, chunk), as of `decode_kernel`: the chunk's blocks after the `tokens` [S, C] that are
    shared, from the state that `shared_kernel` left for them; the last of a sequence's programs merges its chunks."""
    after_previous_kernel()
    head, s, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seqlens_k + s)
    start = chunk * CHUNK_N
    if start >= length:
        return
    r, column = tl.arange(0, M), tl.arange(0, DP)
    row = s.to(tl.int64)
    place = row * tl.num_programs(0) + head
    first = place * tl.num_programs(2)
    chunks = tl.cdiv(length, CHUNK_N)
    shared = tl.load(tokens + row * stride_tokens + chunk)
    begin, end = start + shared, tl.minimum(start + CHUNK_N, length)
    o_at = o_ptr + row * stride_ot + head * G * stride_oh
    if (begin < end) | (chunks == 1):
        KV: tl.constexpr = q_ptr.dtype.element_ty
        real = (r < G)[:, None] & (column < D)[None, :]
        q_at = q_ptr + row * stride_qt + (head * G + r)[:, None] * stride_qh + column[None, :]
        q = tl.load(q_at, mask=real, other=0.0)
        state = (first + chunk) * G + r
        acc_at = acc_ptr + state[:, None] * DP + column[None, :]
        left = (r < G) & (shared > 0)
        m = tl.load(m_ptr + state, mask=left, other=float("-inf"))
        l = tl.zeros((M, 16), tl.float32) + tl.load(l_ptr + state, mask=left, other=0.0)[:, None]
        acc = tl.load(acc_at, mask=left[:, None], other=0.0)
        ones = tl.full((BLOCK_N, 16), 1.0, KV)
        pages = block_table + row * stride_bt
        q_position = tl.zeros((M,), tl.int32) + length - 1
        whole = tl.minimum(length // BLOCK_N * BLOCK_N, end)
        slot = slots(pages, begin, length, PAGE, BLOCK_N, False)
        m, l, acc, slot = blocks(
            q, k_ptr, v_ptr, pages, begin, whole, q_position, 0, length, head, scale, stride_slot, stride_head, slot,
            m, l, acc, ones, D, DP, PAGE, BLOCK_N, False, False, None, CAPPED, PRECISION,
        )  # fmt: skip
        m, l, acc, slot = blocks(
            q, k_ptr, v_ptr, pages, tl.maximum(begin, whole), end, q_position, 0, length, head, scale, stride_slot,
            stride_head, slot, m, l, acc, ones, D, DP, PAGE, BLOCK_N, False, True, None, CAPPED, PRECISION,
        )  # fmt: skip
        if SPLIT and chunks > 1:
            tl.store(m_ptr + state, m, mask=r < G)
            tl.store(l_ptr + state, tl.max(l, 1), mask=r < G)
            tl.store(acc_at, acc, mask=(r < G)[:, None])
        else:
            store_result(m, tl.max(l, 1), acc, o_at, sinks_ptr, head, column, stride_oh, G, D)
    if SPLIT and chunks > 1:  # noqa: SIM102  `and` would have a sequence of one chunk arrive, too
        if is_last_to_arrive(arrived_ptr + place, chunks, "gpu"):
            merge_chunks(o_at, sinks_ptr, head, m_ptr, l_ptr, acc_ptr, first, chunks, column, stride_oh, G, D, DP)


class DecodeCall(Protocol):
    """The fields of an `attention.Call` that this file reads."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    sinks: Tensor | None
    batch: RaggedBatch
    kv_heads: int
    group: int
    head_dim: int
    padded: int
    page: int
    rows: int
    form: tuple[int | None, float | None]
    scale: float
    strides: tuple[int, ...]


def decode(
    call: DecodeCall, shared: SharedBlocks, schedule: AttentionSchedule, chunk: int, block: int, precision: str,
    chunks: int, state: tuple[Tensor, ...],
) -> Iterator[Launch | None]:  # fmt: skip
    """Launches both parts for the decodes of a batch.

    chunk, block: tokens of one; chunks: of a sequence at most; state: memory for m, l [S, Hkv, C, G] and
    acc [S, Hkv, C, G, DP] in float32, then int32 [S, Hkv] of zeros.
    """
    stride_qt, stride_qh, _, _, *kv_strides = call.strides
    batch, sizes = call.batch, (call.group, call.head_dim, call.padded, call.page, chunk, block)
    rows = min(schedule.shared_rows, max(16, triton.next_power_of_2(TILE_DECODES * call.group)))
    parts = -(-TILE_DECODES * call.group // rows)
    programs = max(1, min(shared.most_tiles, PROGRAMS // (call.kv_heads * parts)))
    _, capped = call.form
    yield launch(
        shared_kernel,
        (call.kv_heads * parts, programs, 1),
        (call.q, call.k_cache, call.v_cache, *state[:3], shared.tiles, shared.members, shared.count, batch.block_table,
         chunks, call.scale, stride_qt, stride_qh, *kv_strides),
        (*sizes, rows, parts, capped, precision),
        schedule.shared_warps, schedule.shared_stages,
    )  # fmt: skip
    yield launch(
        own_kernel,
        (call.kv_heads, batch.num_decodes, chunks),
        (call.q, call.k_cache, call.v_cache, call.out, call.sinks, *state, shared.tokens, batch.block_table,
         batch.seqlens_k, call.scale, *call.strides, shared.tokens.stride(0)),
        (*sizes, call.rows, capped, precision, chunks > 1),
        schedule.decode_warps, schedule.decode_stages,
    )  # fmt: skip
