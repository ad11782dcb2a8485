"""`native` attention over the paged KV cache: causal, GQA, one arithmetic for prefill, chunked prefill and decode.

    S sequences, T query rows (tokens) in all, Hq/Hkv heads, G = Hq / Hkv, D head_dim, B pages of `block_size` tokens.

The arithmetic (the numerics contract's `native` attention), per query row and head:

* Absolute KV positions are cut into chunks of CHUNK = 1024 and blocks of BLOCK = 64.
* `scale` is float32(softmax scale * log2 e), rounded once.
* A chunk starts from m = -inf, l = 0, acc = 0 and takes its blocks in order. `d = dot(q, k)` is a float32 chain over D;
  masked positions are -inf; `m' = max(m, rowmax(d) * scale)`; `p = exp2(fma(d, scale, -m'))`, **rounded to the KV
  dtype**; `alpha = exp2(m - m')`; `acc = dot(p, v, acc * alpha)`; `l = dot(p, ones, l * alpha)`: the row sum is a dot
  product too, because the order of a shuffle reduction follows the tile's layout and a tensor core's chain does not.
* Chunks are merged left to right: `m' = max(m, m_c)`, `a = exp2(m - m')`, `b = exp2(m_c - m')`,
  `l = fma(l, a, l_c * b)`, `acc = fma(acc, a, acc_c * b)`; at the end o = acc / l as `r = div_rn(1, l)`, `q = acc * r`,
  `o = fma(fma(-q, l, acc), r, q)` (a correct rounding by Markstein's theorem, without a branch an element), -0 becomes
  +0, **rounded to the query's dtype**.

Free, and so the schedule's: rows in a tile, warps, pipeline stages, TMA or pointer loads, page size, and whether chunks
are computed in turn and merged in registers (prefill) or in parallel and merged by a second kernel (decode). A block
that is masked out for a row changes nothing in it. V rows past a sequence's length count as zero: a stale page may hold
NaN, and 0 * NaN would reach the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from evalengine.kernels.device_math import INTERPRETED
from evalengine.kernels.launch import launch

CHUNK = 1024  # KV positions that are reduced from a fresh state
BLOCK = 64  # KV positions of one online-softmax step
PRECISION = "ieee"  # never TF32; bf16 and fp16 products are exact in any case
LOG2_E = 1.4426950408889634
SEARCH = 256  # sequences looked through at once for the one a tile belongs to


@dataclass(frozen=True)
class Schedule:
    """How the rows are tiled; changes no bit."""

    block_m: int  # query rows (token, head of the group) in a prefill tile
    num_warps: int
    num_stages: int
    decode_warps: int = 4
    decode_stages: int = 3
    tma: bool = True  # KV blocks by tensor descriptor where page size and head_dim allow it
    hopper: bool = False  # prefill by `attention_hopper`, where it covers the model; block_m, num_* are its own


REFERENCE = Schedule(block_m=16, num_warps=4, num_stages=1, decode_stages=1, tma=False)
excluded: set[Schedule] = set()  # what kernels/verify.py found wrong on this GPU: never chosen in this process


# -- the arithmetic --------------------------------------------------------------------------------------------------


@triton.jit
def _online_step(q, k, v, visible, scale, m, l, acc, ones, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One block: q [M, D], k [D, N], v [N, D], visible [M, N] (if MASKED) -> the chunk's new m, l, acc."""
    d = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        d = tl.where(visible, d, float("-inf"))
    m_new = tl.maximum(m, tl.max(d, 1) * scale)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(tl.fma(d, tl.zeros_like(d) + scale, tl.zeros_like(d) - shift[:, None]))
    alpha = tl.exp2(m - shift)
    p = p.to(v.dtype)
    l = tl.dot(p, ones, l * alpha[:, None], input_precision=PRECISION)
    acc = tl.dot(p, v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l, acc


@triton.jit
def _merge(m, l, acc, m_c, l_c, acc_c):
    """A chunk's state into that of the chunks before it."""
    m_new = tl.maximum(m, m_c)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    a, b = tl.exp2(m - shift), tl.exp2(m_c - shift)
    l = tl.fma(l, a, l_c * b)
    acc = tl.fma(acc, tl.zeros_like(acc) + a[:, None], acc_c * b[:, None])
    return m_new, l, acc


@triton.jit
def _normalized(acc, l):
    """acc / l, -0 as +0; a row that saw nothing (l = 0: padding) gives 0."""
    l = tl.where(l == 0.0, 1.0, l)
    zero = tl.zeros_like(acc)
    divisor = zero + l[:, None]
    reciprocal = zero + tl.div_rn(tl.full(l.shape, 1.0, tl.float32), l)[:, None]
    o = acc * reciprocal
    return tl.fma(tl.fma(-o, divisor, acc), reciprocal, o) + 0.0


@triton.jit
def _slots(pages, n, length, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """The pool's slots of KV positions n ... n + BLOCK_N: all [N], or for TMA the first, as a block lies in one page.

    Positions past `length` get the sequence's last page: some slot, whose content is masked.
    """
    if TMA:
        slot = tl.load(pages + tl.minimum(n, length - 1) // PAGE) * PAGE + n % PAGE
    else:
        position = tl.minimum(n + tl.arange(0, BLOCK_N), length - 1)
        slot = tl.load(pages + position // PAGE).to(tl.int64) * PAGE + position % PAGE
    return slot


@triton.jit
def _load_block(
    k_src, v_src, slot, n, length, head, stride_slot, stride_head,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """KV positions n ... n + BLOCK_N of one head -> k [DP, N], v [N, DP]; TAIL: some may lie past `length`."""
    if TMA:
        k = k_src.load([slot, head * D]).T
        v = v_src.load([slot, head * D])
        if TAIL:
            v = tl.where((n + tl.arange(0, BLOCK_N) < length)[:, None], v, 0.0)
    else:
        offset, column = slot * stride_slot + head * stride_head, tl.arange(0, DP)
        real = column < D
        k = tl.load(k_src + offset[None, :] + column[:, None], mask=real[:, None], other=0.0)
        if TAIL:
            inside = n + tl.arange(0, BLOCK_N) < length
            v = tl.load(v_src + offset[:, None] + column[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        else:
            v = tl.load(v_src + offset[:, None] + column[None, :], mask=real[None, :], other=0.0)
    return k, v


@triton.jit
def _chunk(
    q, k_src, v_src, pages, start, unmasked_end, end, q_position, length, head, scale, stride_slot, stride_head,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Blocks of [start, end) from a fresh state: those below `unmasked_end` need no mask for any row of the tile."""
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M, 16), tl.float32)
    acc = tl.zeros((M, DP), tl.float32)
    ones = tl.full((BLOCK_N, 16), 1.0, KV)
    # A block's slots are looked up one step ahead: a load that hangs on another load in the same step halves the depth
    # of the pipeline.
    slot = _slots(pages, start, length, PAGE, BLOCK_N, TMA)
    for n in tl.range(start, tl.minimum(unmasked_end, end), BLOCK_N):
        k, v = _load_block(k_src, v_src, slot, n, length, head, stride_slot, stride_head, D, DP, BLOCK_N, TMA, False)
        slot = _slots(pages, n + BLOCK_N, length, PAGE, BLOCK_N, TMA)
        m, l, acc = _online_step(q, k, v, q, scale, m, l, acc, ones, False, PRECISION)
    for n in tl.range(tl.maximum(start, unmasked_end), end, BLOCK_N):
        k, v = _load_block(k_src, v_src, slot, n, length, head, stride_slot, stride_head, D, DP, BLOCK_N, TMA, True)
        slot = _slots(pages, n + BLOCK_N, length, PAGE, BLOCK_N, TMA)
        visible = (n + tl.arange(0, BLOCK_N))[None, :] <= q_position[:, None]
        m, l, acc = _online_step(q, k, v, visible, scale, m, l, acc, ones, True, PRECISION)
    return m, tl.max(l, 1), acc


# -- prefill: a tile of rows walks all its chunks -----------------------------------------------------------------------


@triton.jit
def _sequence_of(tile, cu_seqlens_q, num_seqs, G: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr):
    """The sequence whose tiles include `tile`: sequence s starts at tile (its first row) // M + s."""
    base = tl.load(cu_seqlens_q)
    count = 0
    for first in range(0, num_seqs, STEP):
        s = first + tl.arange(0, STEP)
        row = (tl.load(cu_seqlens_q + s, mask=s < num_seqs, other=0) - base) * G
        count += tl.sum(((row // M + s <= tile) & (s < num_seqs)).to(tl.int32), 0)
    s = count - 1
    return s, tile - ((tl.load(cu_seqlens_q + s) - base) * G // M + s)


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill_kernel(
    q_ptr, k_src, v_src, o_ptr, block_table, cu_seqlens_q, seqlens_k, num_seqs, scale,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_slot, stride_head, stride_bt,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, CHUNK_N: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): M rows (token, head of the group) of one sequence. The longest rows come first."""
    s, tile = _sequence_of(tl.num_programs(0) - 1 - tl.program_id(0), cu_seqlens_q, num_seqs, G, M, STEP)
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
    m, l, acc = _chunk(q, k_src, v_src, pages, 0, unmasked_end, tl.minimum(CHUNK_N, end), q_position, length, head, scale,
                       stride_slot, stride_head, M, D, DP, PAGE, BLOCK_N, TMA, PRECISION, KV)  # fmt: skip
    for start in range(CHUNK_N, end, CHUNK_N):
        m_c, l_c, acc_c = _chunk(q, k_src, v_src, pages, start, unmasked_end, tl.minimum(start + CHUNK_N, end),
                                 q_position, length, head, scale, stride_slot, stride_head,
                                 M, D, DP, PAGE, BLOCK_N, TMA, PRECISION, KV)  # fmt: skip
        m, l, acc = _merge(m, l, acc, m_c, l_c, acc_c)
    o = _normalized(acc, l).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + row * stride_ot + q_head[:, None] * stride_oh + column[None, :], o, mask=real)


# -- decode: one row a sequence; its chunks in parallel, then merged in order -------------------------------------------


@triton.jit
def _decode_kernel(
    q_ptr, k_src, v_src, o_ptr, m_ptr, l_ptr, acc_ptr, block_table, seqlens_k, scale,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_slot, stride_head, stride_bt,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, CHUNK_N: tl.constexpr,
    BLOCK_N: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (KV head, chunk, sequence): the G rows that share the head, over one chunk.

    SPLIT: the state goes to m, l [S, Hkv, chunks, G] and acc [S, Hkv, chunks, G, DP]; else there is one chunk, and the
    result is final (merging it into the fresh state would change nothing: a = 0, b = 1).
    """
    head, chunk, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seqlens_k + s)
    start = chunk * CHUNK_N
    if start >= length:
        return
    r, column = tl.arange(0, M), tl.arange(0, DP)
    real = (r < G)[:, None] & (column < D)[None, :]
    row = s.to(tl.int64)
    q_head = head * G + r
    q = tl.load(q_ptr + row * stride_qt + q_head[:, None] * stride_qh + column[None, :], mask=real, other=0.0)
    q_position = tl.zeros((M,), tl.int32) + length - 1
    KV: tl.constexpr = q_ptr.dtype.element_ty
    m, l, acc = _chunk(q, k_src, v_src, block_table + row * stride_bt, start, length // BLOCK_N * BLOCK_N,
                       tl.minimum(start + CHUNK_N, length), q_position, length, head, scale, stride_slot, stride_head,
                       M, D, DP, PAGE, BLOCK_N, TMA, PRECISION, KV)  # fmt: skip
    if SPLIT:
        state = ((row * tl.num_programs(0) + head) * tl.num_programs(1) + chunk) * G + r
        tl.store(m_ptr + state, m, mask=r < G)
        tl.store(l_ptr + state, l, mask=r < G)
        tl.store(acc_ptr + state[:, None] * DP + column[None, :], acc, mask=(r < G)[:, None])
    else:
        o = _normalized(acc, l).to(o_ptr.dtype.element_ty)
        tl.store(o_ptr + row * stride_ot + q_head[:, None] * stride_oh + column[None, :], o, mask=real)


@triton.jit(do_not_specialize=["max_chunks"])
def _merge_kernel(
    m_ptr, l_ptr, acc_ptr, o_ptr, seqlens_k, max_chunks, stride_ot, stride_oh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK_N: tl.constexpr,
):  # fmt: skip
    """Program (query head, sequence): its chunks' states, left to right. The loads of eight chunks are in flight."""
    q_head, s = tl.program_id(0), tl.program_id(1)
    head, g = q_head // G, q_head % G
    row = s.to(tl.int64)
    first = (row * (tl.num_programs(0) // G) + head) * max_chunks
    column = tl.arange(0, DP)[None, :]
    m = tl.full((1,), float("-inf"), tl.float32)
    l = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, DP), tl.float32)
    for chunk in tl.range(0, tl.cdiv(tl.load(seqlens_k + s), CHUNK_N), loop_unroll_factor=8):
        state = (first + chunk) * G + g + tl.arange(0, 1)
        acc_c = tl.load(acc_ptr + state[:, None] * DP + column)
        m, l, acc = _merge(m, l, acc, tl.load(m_ptr + state), tl.load(l_ptr + state), acc_c)
    o = _normalized(acc, l).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + row * stride_ot + q_head * stride_oh + column, o, mask=column < D)


# -- the host side ------------------------------------------------------------------------------------------------------


def choose(head_dim: int, dtype: torch.dtype, page_size: int, rows_per_sequence: int) -> Schedule:
    """The schedule for prefills of about `rows_per_sequence` (tokens * group) rows each, and for decodes."""
    schedule = _choose(
        head_dim, dtype, page_size, 16 if rows_per_sequence <= 16 else 32 if rows_per_sequence <= 32 else 64
    )
    return REFERENCE if excluded and schedule in excluded else schedule


@cache
def _choose(head_dim: int, dtype: torch.dtype, page_size: int, rows_per_sequence: int) -> Schedule:
    if dtype == torch.float32:  # FMA units: tiles are bound by registers and shared memory
        return Schedule(block_m=16, num_warps=4, num_stages=1, decode_stages=1, tma=False)
    if head_dim > 128:
        return Schedule(block_m=64, num_warps=8, num_stages=2, decode_stages=2)
    if rows_per_sequence <= 32:
        return Schedule(block_m=rows_per_sequence, num_warps=4, num_stages=3)
    return Schedule(block_m=128, num_warps=8, num_stages=3, hopper=_hopper_covers(dtype, head_dim, page_size))


def _hopper_covers(dtype: torch.dtype, head_dim: int, page_size: int) -> bool:
    if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    try:
        from evalengine.kernels import attention_hopper
    except ImportError:  # a Triton without Gluon, or with another one's names
        return False
    return attention_hopper.covers(dtype, head_dim, page_size)


def schedules(head_dim: int, page_size: int, dtype: torch.dtype) -> list[Schedule]:
    """Every schedule that `choose` may return for a model, first `REFERENCE`: what is to be proved equal."""
    chosen = [_choose(head_dim, dtype, page_size, rows) for rows in (16, 32, 64)]
    return list(dict.fromkeys([REFERENCE, *chosen]))


class RaggedBatch(Protocol):
    """What attention reads of a step's metadata (`layers.metadata.AttentionMetadata`). Decodes come first.

    block_table int32 [S, pages]; cu_seqlens_q int32 [S + 1]; seqlens_k int32 [S], KV tokens with the sequence's new
    rows; query_lens and kv_lens the same on the host; the first num_decodes sequences have one row each.
    """

    @property
    def block_table(self) -> Tensor: ...
    @property
    def cu_seqlens_q(self) -> Tensor: ...
    @property
    def seqlens_k(self) -> Tensor: ...
    @property
    def query_lens(self) -> list[int]: ...
    @property
    def kv_lens(self) -> list[int]: ...
    @property
    def num_decodes(self) -> int: ...
    @property
    def max_decode_kv_len(self) -> int: ...
    @property
    def plans(self) -> dict[Any, Any]: ...  # what a kernel has worked out of these, once a step for all layers


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, scale: float, schedule: Schedule | None = None
) -> Tensor:
    """[T, Hq, D] against the [B, block_size, Hkv, D] pools -> [T, Hq, D], each row up to its own position.

    `scale` is the softmax's (head_dim^-0.5). q's and the pools' last dimension is contiguous; all three have one dtype:
    bf16, fp16 or fp32.

    Raises ValueError for a dtype or head_dim it does not cover.
    """
    _check(q, k_cache, v_cache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decodes = batch.num_decodes
    tokens = q.shape[0] - decodes
    call = _Call(q, k_cache, v_cache, out, scale, batch)
    if schedule is None:
        rows = tokens * call.group // max(1, len(batch.query_lens) - decodes)
        schedule = choose(q.shape[2], q.dtype, k_cache.shape[1], rows)
    if decodes:
        call.decode(schedule)
    if tokens:
        call.prefill(schedule, tokens)
    return out


class _Call:
    """What the launches of one call share."""

    def __init__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, scale: float, batch: RaggedBatch
    ) -> None:
        self.q, self.k_cache, self.v_cache, self.out, self.batch = q, k_cache, v_cache, out, batch
        self.page, self.kv_heads, self.head_dim = k_cache.shape[1:]
        self.group = q.shape[1] // self.kv_heads
        self.padded = max(16, triton.next_power_of_2(self.head_dim))
        self.scale = scale * LOG2_E  # a Python float: rounded to float32 once, as the kernel's argument
        self.in_blocks = self.page % BLOCK == 0 and self.padded == self.head_dim and k_cache.is_contiguous()
        self.strides = (
            *(q.stride(0), q.stride(1), out.stride(0), out.stride(1), k_cache.stride(1), k_cache.stride(2)),
            batch.block_table.stride(0),
        )

    def prefill(self, schedule: Schedule, tokens: int) -> None:
        batch, first = self.batch, self.batch.num_decodes
        if schedule.hopper and self.in_blocks:
            from evalengine.kernels import attention_hopper

            attention_hopper.prefill(
                self.q, self.k_cache, self.v_cache, self.out, batch, self.scale, self.strides, CHUNK
            )
            return
        rows, num_seqs = schedule.block_m, len(batch.query_lens) - first
        k, v, tma = self._kv(schedule)
        launch(
            _prefill_kernel,
            (tokens * self.group // rows + num_seqs, self.kv_heads, 1),
            (self.q, k, v, self.out, batch.block_table[first:], batch.cu_seqlens_q[first:], batch.seqlens_k[first:],
             num_seqs, self.scale, *self.strides),
            (self.group, self.head_dim, self.padded, self.page, CHUNK, BLOCK, rows, tma, PRECISION, SEARCH),
            schedule.num_warps, schedule.num_stages,
        )  # fmt: skip

    def decode(self, schedule: Schedule) -> None:
        batch, num_seqs = self.batch, self.batch.num_decodes
        chunks = -(-batch.max_decode_kv_len // CHUNK)
        states = num_seqs * self.kv_heads * chunks * self.group if chunks > 1 else 0
        state = torch.empty(states * (2 + self.padded), dtype=torch.float32, device=self.q.device)
        acc, m, l = state, state[states * self.padded :], state[states * (self.padded + 1) :]  # acc's rows stay aligned
        rows = max(16, triton.next_power_of_2(self.group))
        k, v, tma = self._kv(schedule)
        launch(
            _decode_kernel,
            (self.kv_heads, chunks, num_seqs),
            (self.q, k, v, self.out, m, l, acc, batch.block_table, batch.seqlens_k, self.scale, *self.strides),
            (self.group, self.head_dim, self.padded, self.page, CHUNK, BLOCK, rows, tma, PRECISION, chunks > 1),
            schedule.decode_warps, schedule.decode_stages,
        )  # fmt: skip
        if chunks > 1:
            launch(
                _merge_kernel,
                (self.q.shape[1], num_seqs, 1),
                (m, l, acc, self.out, batch.seqlens_k, chunks, self.out.stride(0), self.out.stride(1)),
                (self.group, self.head_dim, self.padded, CHUNK),
                1, 1,
            )  # fmt: skip

    def _kv(self, schedule: Schedule) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor, bool]:
        if schedule.tma and self.in_blocks:
            return _descriptor(self.k_cache), _descriptor(self.v_cache), True
        return self.k_cache, self.v_cache, False


def _descriptor(cache: Tensor) -> TensorDescriptor:
    """The pool as [slots, Hkv * D], read in blocks of BLOCK slots and one head."""
    pages, page, heads, dim = cache.shape
    return TensorDescriptor(cache, [pages * page, heads * dim], [heads * dim, 1], [BLOCK, dim])


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            f"attention takes q and a KV cache of one dtype, bfloat16, float16 or float32; got {q.dtype}, "
            f"{k_cache.dtype}, {v_cache.dtype}"
        )
    if not 16 <= q.shape[2] <= 256:
        raise ValueError(f"attention takes a head_dim of 16 to 256; got {q.shape[2]}")
    assert q.stride(2) == k_cache.stride(3) == 1 and k_cache.stride() == v_cache.stride()
    assert q.shape[1] % k_cache.shape[2] == 0
