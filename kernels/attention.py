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
* Softcap c: before the mask `d = tanh(dot(q, k) * u)`, u = float32(softmax scale / c), and `scale` is
  float32(c * log2 e); all else is as above.
* Sinks: after the last chunk the head's sink t = float32(sink * log2 e) is merged in, as a chunk with m_c = t, l_c = 1
  and acc_c = 0.
* Window: a key outside it is a masked position. Chunks and blocks stay where they are; those without a visible key
  would change nothing, and are not read.

A schedule may choose: rows in a tile, warps, pipeline stages, TMA or pointer loads, page size, and whether chunks
are computed in turn and merged in registers (prefill) or in parallel and merged by the last of them (decode). A block
that is masked out for a row changes nothing in it. V rows past a sequence's length count as zero, and so do
those before the lowest position that a tile's rows see: a stale page may hold NaN, and 0 * NaN would reach the output.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from evalengine.kernels import attention_decode
from evalengine.kernels.attention_batch import AttentionSchedule, KVCache, RaggedBatch
from evalengine.kernels.attention_decode import decode_kernel, score_kernel, value_kernel
from evalengine.kernels.attention_parts import merge, merge_sink, normalized, reduce_chunk
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.device_math import GLUON
from evalengine.kernels.launching.launch import Launch, Replay, launch, operand_key
from evalengine.kernels.limits import HEAD_DIMS

CHUNK = 1024  # KV positions that are reduced from a fresh state
BLOCK = 64  # KV positions of one online-softmax step
PRECISION = "ieee"  # never TF32; bf16 and fp16 products are exact in any case
LOG2_E = 1.4426950408889634
SEARCH = 256  # sequences that a prefill program searches at once for the one its tile belongs to

REFERENCE = AttentionSchedule(16, 4, num_stages=1, tma=False, decode_stages=1, extra_stage_max=0, by_block_max=0)
# Schedules that evalengine/verification found wrong on this GPU; this process never chooses them.
excluded: set[AttentionSchedule] = set()


def choose(head_dim: int, dtype: torch.dtype, page_size: int, rows_per_sequence: int, device: int) -> AttentionSchedule:
    """The schedule for prefills of about `rows_per_sequence` (tokens * group) rows each, and for decodes.

    `device` is a CUDA device's index, negative for the CPU (the interpreter).
    """
    rows = 16 if rows_per_sequence <= 16 else 32 if rows_per_sequence <= 32 else 64
    schedule = _choose(head_dim, dtype, page_size, rows, device)
    return REFERENCE if excluded and not excluded.isdisjoint(_forms(schedule)) else schedule


@cache
def _choose(
    head_dim: int, dtype: torch.dtype, page_size: int, rows_per_sequence: int, device: int
) -> AttentionSchedule:
    tma = device < 0 or torch.cuda.get_device_capability(device) >= (9, 0)
    if dtype == torch.float32:  # Float32 runs on FMA units: registers and shared memory bound the tiles.
        return AttentionSchedule(
            16, 4, num_stages=1, tma=False, decode_stages=1, extra_stage_max=0, shared_rows=16, shared_stages=1
        )
    if head_dim > 128:
        stages = 2 if tma else 1  # sm_86 and sm_89 have 99 KiB of shared memory.
        rows, shared_rows = (64, 32) if tma else (16, 16)
        return AttentionSchedule(
            rows, 8, stages, tma, decode_stages=stages, extra_stage_max=0, shared_rows=shared_rows, shared_stages=stages
        )
    extra, stages = (256, 3) if tma else (0, 2)
    if rows_per_sequence <= 32:
        return AttentionSchedule(rows_per_sequence, 4, stages, tma=tma, extra_stage_max=extra, shared_rows=64)
    if not tma:
        return AttentionSchedule(64, 4, stages, tma=False, extra_stage_max=extra, shared_rows=64)
    hopper = _hopper_covers(dtype, head_dim, page_size, device)
    return AttentionSchedule(128, num_warps=8, num_stages=3, hopper=hopper, shared_rows=64)


def _hopper_covers(dtype: torch.dtype, head_dim: int, page_size: int, device: int) -> bool:
    if not GLUON or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from evalengine.kernels import attention_hopper
    except (ImportError, AttributeError):  # This Triton's Gluon has other names.
        return False
    return attention_hopper.covers(dtype, head_dim, page_size)


def _forms(schedule: AttentionSchedule) -> set[AttentionSchedule]:
    """The schedule itself, and for each way in which its decodes can run a schedule that always runs so. Where blocks
    are shared, the schedule itself reads them once."""
    always, alone = 1 << 30, replace(schedule, shared_rows=0)
    limits = {0, always} if schedule.extra_stage_max else {0}
    chunked = {replace(alone, by_block_max=0, extra_stage_max=limit) for limit in limits}
    return {schedule, replace(alone, by_block_max=always), *chunked}


def _order(schedule: AttentionSchedule) -> tuple[bool, int, int]:
    return not schedule.shared_rows, schedule.by_block_max, schedule.extra_stage_max


def schedules(head_dim: int, page_size: int, dtype: torch.dtype, device: int) -> list[AttentionSchedule]:
    """Every schedule that `choose` may return for a model, `REFERENCE` first; all must be proved equal."""
    chosen = [_choose(head_dim, dtype, page_size, rows, device) for rows in (16, 32, 64)]
    forms = [form for schedule in chosen for form in sorted(_forms(schedule), key=_order)]
    return list(dict.fromkeys([REFERENCE, *forms]))


def paged_attention(
    q: Tensor,
    kv: KVCache,
    batch: RaggedBatch,
    variant: AttentionVariant,
    sinks: Tensor | None = None,
    schedule: AttentionSchedule | None = None,
) -> Tensor:
    """[T, Hq, D] against the pools -> [T, Hq, D], each row up to its own position.

    q's and the pools' last dimension is contiguous; all three have one dtype: bf16, fp16 or fp32. sinks: [Hq] of any
    float dtype if the variant has them. The block table's entries for pages that lie wholly before a sequence's
    window may name any page of the pool, and those pages may hold anything.

    Raises ValueError for a dtype or head_dim it does not cover.
    """
    k_cache, v_cache = kv
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A step's layers differ in q and the pools alone: the first one lays the launches out, the others repeat them.
    key = (__name__, operand_key(q), operand_key(k_cache), operand_key(v_cache), operand_key(sinks), variant, schedule)
    if (plan := batch.plans.get(key)) is not None:
        operands = (q, k_cache, v_cache, out, sinks)
        for replayer, places in plan:
            replayer(*(operands[place] for place in places))
        return out
    _check(q, k_cache, v_cache)
    assert variant.sinks == (sinks is not None)
    decodes = batch.num_decodes
    tokens = q.shape[0] - decodes
    call = Call(q, kv, out, variant, sinks, batch)
    if schedule is None:
        rows = tokens * call.group // max(1, len(batch.query_lens) - decodes)
        schedule = choose(q.shape[2], q.dtype, k_cache.shape[1], rows, q.get_device())
    if decodes:
        call.decode(schedule)
    if tokens:
        call.prefill(schedule, tokens)
    if call.plan:
        batch.plans[key] = call.plan
    return out


class Call:
    """The operands and sizes that the launches of one call share."""

    def __init__(
        self, q: Tensor, kv: KVCache, out: Tensor, variant: AttentionVariant, sinks: Tensor | None, batch: RaggedBatch
    ) -> None:
        k_cache, v_cache = kv
        self.q, self.k_cache, self.v_cache, self.out, self.sinks = q, k_cache, v_cache, out, sinks
        self.variant, self.batch = variant, batch
        self.page, self.kv_heads, self.head_dim = k_cache.shape[1:]
        self.group = q.shape[1] // self.kv_heads
        self.padded = max(16, triton.next_power_of_2(self.head_dim))
        self.rows = max(16, triton.next_power_of_2(self.group))  # rows of a decode's tile
        # The kernels' constants WINDOW and CAPPED. The latter and `scale` are rounded to float32 in the kernels.
        self.form = variant.window, None if variant.softcap is None else variant.scale / variant.softcap
        self.scale = (variant.softcap or variant.scale) * LOG2_E
        self.in_blocks = self.page % BLOCK == 0 and self.padded == self.head_dim and k_cache.is_contiguous()
        self.strides: tuple[int, ...] = (
            *(q.stride(0), q.stride(1), out.stride(0), out.stride(1), k_cache.stride(1), k_cache.stride(2)),
            batch.block_table.stride(0),
        )
        # The launches made, to be repeated; each with the places in (q, k_cache, v_cache, out, sinks) of its operands.
        self.plan: list[tuple[Replay, list[int]]] = []

    def _memory(self, count: int) -> Tensor:
        """float32 [count], memory for the numbers that one kernel hands to the next."""
        workspace = self.batch.plans.get("workspace")
        return torch.empty(count, dtype=torch.float32, device=self.q.device) if workspace is None else workspace(count)

    def _launched(self, launched: Launch | None) -> None:
        if launched is None:
            return
        operands = (self.q, self.k_cache, self.v_cache, self.out, self.sinks)
        bases = [getattr(arg, "base", arg) for arg in launched.args]  # a tensor descriptor keeps its tensor in `base`
        given = [(place, x) for place, x in enumerate(operands) if x is not None]
        varying = [(i, place) for i, base in enumerate(bases) for place, x in given if base is x]
        self.plan.append((launched.replayer(*(i for i, _ in varying)), [place for _, place in varying]))

    def prefill(self, schedule: AttentionSchedule, tokens: int) -> None:
        batch, first = self.batch, self.batch.num_decodes
        if schedule.hopper and self.in_blocks and self.variant.is_plain:
            from evalengine.kernels import attention_hopper

            operands = (self.q, self.k_cache, self.v_cache, self.out)
            self._launched(attention_hopper.prefill(*operands, batch, self.scale, self.strides, CHUNK))
            return
        rows, num_seqs = schedule.block_m, len(batch.query_lens) - first
        tma = schedule.tma and self.in_blocks
        k, v = (_descriptor(cache) if tma else cache for cache in (self.k_cache, self.v_cache))
        self._launched(launch(
            prefill_kernel,
            (tokens * self.group // rows + num_seqs, self.kv_heads, 1),
            (self.q, k, v, self.out, self.sinks, batch.block_table[first:], batch.cu_seqlens_q[first:],
             batch.seqlens_k[first:], num_seqs, self.scale, *self.strides),
            (self.group, self.head_dim, self.padded, self.page, CHUNK, BLOCK, rows, tma, *self.form, PRECISION,
             SEARCH),
            schedule.num_warps, schedule.num_stages,
        ))  # fmt: skip

    def decode(self, schedule: AttentionSchedule) -> None:
        batch, num_seqs = self.batch, self.batch.num_decodes
        chunks = self._reached(CHUNK)
        # A window leaves most of what sequences share behind, and begins elsewhere in each of them.
        shared = batch.shared if schedule.shared_rows and self.variant.window is None else None
        states = num_seqs * self.kv_heads * chunks * self.group if chunks > 1 or shared is not None else 0
        state = self._memory(states * (2 + self.padded))
        acc, m, l = state, state[states * self.padded :], state[states * (self.padded + 1) :]  # acc's rows are aligned
        programs = num_seqs * self.kv_heads * self._filled_chunks()
        if shared is not None:
            places = m, l, acc, self._arrivals(self.kv_heads, chunks)
            for launched in attention_decode.decode(self, shared, schedule, CHUNK, BLOCK, PRECISION, chunks, places):
                self._launched(launched)
            return
        if programs <= schedule.by_block_max:
            self._by_block(schedule, m, l, acc, chunks)
            return
        self._launched(launch(
            decode_kernel,
            (self.kv_heads, num_seqs, chunks),
            (self.q, self.k_cache, self.v_cache, self.out, self.sinks, m, l, acc,
             self._arrivals(self.kv_heads, chunks), batch.block_table, batch.seqlens_k, self.scale, *self.strides),
            (self.group, self.head_dim, self.padded, self.page, CHUNK, BLOCK, self.rows, *self.form, PRECISION,
             chunks > 1),
            schedule.decode_warps, schedule.decode_stages + (programs <= schedule.extra_stage_max),
        ))  # fmt: skip

    def _reached(self, size: int) -> int:
        """How many of the parts of `size` positions, at multiples of it, a decode reads at most."""
        parts, window = -(-self.batch.max_decode_kv_len // size), self.variant.window
        return parts if window is None else min(parts, -(-(window - 1) // size) + 1)

    def _filled_chunks(self) -> int:
        """How many whole chunks hold as many positions as a decode reads.

        One sequence with a window of 4,096 that began within a chunk was 40 programs of 8 KV heads, too many to work by
        blocks, and took 25 us instead of 20 us for a context of 4,096 (H200).
        """
        read = self.batch.max_decode_kv_len
        return -(-(read if self.variant.window is None else min(read, self.variant.window)) // CHUNK)

    def _arrivals(self, programs: int, chunks: int) -> Tensor:
        """int32 of zeros, which the kernel leaves as zeros: how many chunks of a sequence have come, for each of its
        `programs` a chunk."""
        count = self.batch.num_decodes * programs if chunks > 1 else 0
        return torch.zeros(count, dtype=torch.int32, device=self.q.device)

    def _by_block(self, schedule: AttentionSchedule, m: Tensor, l: Tensor, acc: Tensor, chunks: int) -> None:
        batch, num_seqs = self.batch, self.batch.num_decodes
        blocks = self._reached(BLOCK)
        tops = num_seqs * self.kv_heads * blocks * self.group
        state = torch.empty(tops * (1 + BLOCK), dtype=torch.float32, device=self.q.device)
        d, top = state, state[tops * BLOCK :]
        stride_qt, stride_qh, stride_ot, stride_oh, *kv_strides = self.strides
        self._launched(launch(
            score_kernel,
            (self.kv_heads, blocks, num_seqs),
            (self.q, self.k_cache, d, top, batch.block_table, batch.seqlens_k, stride_qt, stride_qh, *kv_strides),
            (self.group, self.head_dim, self.padded, self.page, BLOCK, self.rows, *self.form, PRECISION),
            schedule.decode_warps, 1,
        ))  # fmt: skip
        columns = min(32, self.padded)
        programs = self.kv_heads * self.padded // columns
        self._launched(launch(
            value_kernel,
            (programs, num_seqs, chunks),
            (d, top, self.v_cache, self.out, self.sinks, m, l, acc, self._arrivals(programs, chunks), batch.block_table,
             batch.seqlens_k, blocks, self.scale, stride_ot, stride_oh, *kv_strides),
            (self.group, self.head_dim, self.padded, self.page, CHUNK, BLOCK, self.rows, self.variant.window, PRECISION,
             chunks > 1, columns),
            schedule.decode_warps, 8 if self.rows <= 64 else 4,  # A stage is 256 bytes a row, and V: 160 KB at most.
        ))  # fmt: skip


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
    smallest, largest = HEAD_DIMS
    if not smallest <= q.shape[2] <= largest:
        raise ValueError(f"attention takes a head_dim of {smallest} to {largest}; got {q.shape[2]}")
    assert q.stride(2) == k_cache.stride(3) == 1 and k_cache.stride() == v_cache.stride()
    assert q.shape[1] % k_cache.shape[2] == 0


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
