"""`native` decode of sequences that share pages: what they share is read once for all of them, then each one's rest.

    S sequences, C chunks of one at most, G query heads a KV head, D head_dim, DP padded, M rows (sequence, head of the
    group) of a tile.

A chunk is reduced block by block from a fresh state, and a row's state depends on the row and on the blocks alone. So
a program may take the rows of many sequences through the blocks that they have in the same pages, as a small prefill
does, and leave every row's state (m, l, acc in float32, which loses nothing) after the last of them. The decode goes on
from there: with the chunk's other blocks if there are any, and with the merge of the chunks, in order, as ever. The
same numbers are added in the same order, so the bytes are those of a decode that reads everything itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels.attention_batch import TILE_DECODES, AttentionSchedule, RaggedBatch, SharedBlocks
from evalengine.kernels.attention_decode import merge_chunks, store_result
from evalengine.kernels.attention_parts import blocks, slots
from evalengine.kernels.device_math import after_previous_kernel, is_last_to_arrive
from evalengine.kernels.launching.launch import Launch, launch

# Programs of the shared part at most, in a CUDA graph, whose grid is laid out before the tiles are known; each takes
# one tile after another. An H100 has 132 SMs.
PROGRAMS = 512
TABLES = ("tiles", "members", "count", "tokens", "block_table", "seqlens_k")


@triton.jit(do_not_specialize=["chunks", "stride_bt"], do_not_specialize_on_alignment=TABLES)
def shared_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, l_ptr, acc_ptr, tiles, members, count, block_table, chunks, scale,
    stride_qt, stride_qh, stride_slot, stride_head, stride_bt,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, CHUNK_N: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (KV head and part of a tile's rows, first tile): the states of the tiles' rows after the shared blocks.

    The states are m, l [S, Hkv, C, G] and acc [S, Hkv, C, G, DP]. All blocks are whole and lie before every row.
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


@triton.jit(do_not_specialize=["stride_bt", "stride_tokens"], do_not_specialize_on_alignment=TABLES)
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
    """What this file reads of an `attention.Call`."""

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
