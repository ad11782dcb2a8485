"""The Hopper prefill kernel, in Gluon: one producer warp, two consumer warp groups. See `attention_hopper`.

    D head_dim, G query heads a KV head, ST stages of the rings of K and V blocks, TILE_M = 2 * ROWS rows of a tile.

`q_full`, `k_full[i]`, `v_full[i]`: the TMA's bytes are there. `*_empty`: both consumers have read them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.6; 3.7
ROWS = gl.constexpr(64)  # rows of one consumer: those of a warp group's matrix instruction
BLOCK = gl.constexpr(64)
TABLE_COLUMNS = gl.constexpr(5)


@gluon.jit
def _tile(table, work, items, tiles):
    """Work item -> (sequence, its first row, its rows' tokens, KV tokens, tile of it, head); past the end, any item.

    `table` has a row for each tile, the longest first. Its loads depend on no other load and are made one item ahead.
    """
    work = gl.minimum(work, items - 1)
    row = table + work % tiles * TABLE_COLUMNS
    return gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3), gl.load(row + 4), work // tiles


@gluon.jit
def _tile_end(tile, queries, length, G: gl.constexpr, TILE_M: gl.constexpr):
    """KV tokens that some row of the tile sees."""
    return gl.minimum(length, length - queries + (tile * TILE_M + TILE_M - 1) // G + 1)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, block_table, stride_bt, table, tiles, heads,
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, TILE_M: gl.constexpr, ST: gl.constexpr, Q_TMA: gl.constexpr,
):  # fmt: skip
    count = 0
    done = 0
    items = tiles * heads
    s, first_row, queries, length, tile, head = _tile(table, gl.program_id(0), items, tiles)
    for work in range(gl.program_id(0), items, gl.num_programs(0)):
        pages = block_table + s.to(gl.int64) * stride_bt
        end = _tile_end(tile, queries, length, G, TILE_M)
        slot = gl.load(pages) * PAGE
        if Q_TMA:
            token = first_row + tile * TILE_M // G
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
            for i in gl.static_range(2):
                at = [token + i * (ROWS // G), head * G, 0]
                tma.async_copy_global_to_shared(q_desc, at, q_full, q_smem.index(i))
        this_head = head
        done += 1
        s, first_row, queries, length, tile, head = _tile(table, work + gl.num_programs(0), items, tiles)
        for n in range(0, end, BLOCK):
            stage = count % ST
            phase = (count // ST) & 1
            ahead = gl.minimum(n + BLOCK, end - 1)
            next_slot = gl.load(pages + ahead // PAGE) * PAGE + (n + BLOCK) % PAGE
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [slot, this_head * D], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [slot, this_head * D], v_full.index(stage), v_smem.index(stage))
            slot = next_slot
            count += 1


@gluon.jit
def _softmax_step(d, m, n, q_position, unmasked_end, scale):
    """A block's scores d [ROWS, BLOCK] and the running maximum m -> (p float32, m', alpha)."""
    layout: gl.constexpr = d.type.layout
    if n + BLOCK > unmasked_end:
        position = n + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
        d = gl.where(position[None, :] <= q_position[:, None], d, float("-inf"))
    m_new = gl.maximum(m, gl.max(d, 1) * scale)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    zero = gl.zeros_like(d)
    p = gl.exp2(gl.fma(d, zero + scale, zero - shift[:, None]))
    return p, m_new, gl.exp2(m - shift)


@gluon.jit
def _consumer(
    q_ptr, v_ptr, o_ptr, block_table, table, tiles, heads, scale,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_slot, stride_head, stride_bt,
    q_smem, k_smem, v_smem, ones, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    WHICH: gl.constexpr, G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr,
    TILE_M: gl.constexpr, ST: gl.constexpr, Q_TMA: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    l_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    s_row: gl.constexpr = gl.SliceLayout(1, s_mma)
    o_row: gl.constexpr = gl.SliceLayout(1, o_mma)
    l_row: gl.constexpr = gl.SliceLayout(1, l_mma)
    p_for_o: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    p_for_l: gl.constexpr = gl.DotOperandLayout(0, l_mma, 2)
    # 16 bytes a thread: whole rows of q, v and o
    io: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    io_row: gl.constexpr = gl.SliceLayout(1, io)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, io))
    own = q_smem.index(WHICH).reshape([ROWS, D])
    count = 0
    done = 0
    items = tiles * heads
    following = _tile(table, gl.program_id(0), items, tiles)
    for work in range(gl.program_id(0), items, gl.num_programs(0)):
        s, first_row, queries, length, tile, head = following
        following = _tile(table, work + gl.num_programs(0), items, tiles)
        first = tile * TILE_M + WHICH * ROWS
        r = first + gl.arange(0, ROWS, layout=io_row)
        token = r // G
        row = (first_row + token).to(gl.int64)
        q_head = head * G + r % G
        real = (token < queries)[:, None] & (column >= 0)[None, :]
        if Q_TMA:  # Rows past the sequence's end are the next sequence's: computed, and not stored.
            mbarrier.wait(q_full, done & 1)
        else:
            q_offset = (row * stride_qt + q_head * stride_qh)[:, None] + column[None, :]
            own.store(gl.load(q_ptr + q_offset, mask=real, other=0.0))
            fence_async_shared()
            thread_barrier()
        done += 1
        q_position = length - queries + (first + gl.arange(0, ROWS, layout=s_row)) // G
        unmasked_end = (length - queries + first // G + 1) // BLOCK * BLOCK
        end = _tile_end(tile, queries, length, G, TILE_M)
        m_all = gl.full([ROWS], float("-inf"), gl.float32, layout=s_row)
        l_all = gl.zeros([ROWS], gl.float32, layout=o_row)
        acc_all = gl.zeros([ROWS, D], gl.float32, layout=o_mma)
        for start in range(0, end, CHUNK):
            stop = gl.minimum(start + CHUNK, end)
            m = gl.full([ROWS], float("-inf"), gl.float32, layout=s_row)
            l = gl.zeros([ROWS, 16], gl.float32, layout=l_mma)
            acc = gl.zeros([ROWS, D], gl.float32, layout=o_mma)
            none = gl.zeros([ROWS, BLOCK], gl.float32, layout=s_mma)
            stage = count % ST
            mbarrier.wait(k_full.index(stage), (count // ST) & 1)
            d = warpgroup_mma(own, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            d = warpgroup_mma_wait(0, deps=(d,))
            thread_barrier()
            mbarrier.arrive(k_empty.index(stage), count=1)
            p, m, alpha = _softmax_step(d, m, start, q_position, unmasked_end, scale)
            for n in range(start + BLOCK, stop, BLOCK):
                stage = count % ST
                phase = (count // ST) & 1
                count += 1
                ahead = count % ST
                p = p.to(DTYPE)
                mbarrier.wait(k_full.index(ahead), (count // ST) & 1)
                d = warpgroup_mma(own, k_smem.index(ahead).permute((1, 0)), none, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(stage), phase)
                l = warpgroup_mma(gl.convert_layout(p, p_for_l), ones, l, is_async=True)
                acc = warpgroup_mma(gl.convert_layout(p, p_for_o), v_smem.index(stage), acc, is_async=True)
                d = warpgroup_mma_wait(2, deps=(d,))
                p, m, alpha = _softmax_step(d, m, n, q_position, unmasked_end, scale)
                l, acc = warpgroup_mma_wait(0, deps=(l, acc))
                thread_barrier()  # One thread arrives for all: first every warp must have read the block.
                mbarrier.arrive(k_empty.index(ahead), count=1)
                mbarrier.arrive(v_empty.index(stage), count=1)
                l = l * gl.convert_layout(alpha, l_row)[:, None]
                acc = acc * gl.convert_layout(alpha, o_row)[:, None]
            stage = count % ST
            p = p.to(DTYPE)
            mbarrier.wait(v_full.index(stage), (count // ST) & 1)
            count += 1
            l = warpgroup_mma(gl.convert_layout(p, p_for_l), ones, l)
            last = (stop - 1) // BLOCK * BLOCK
            if last + BLOCK > length:  # V rows past the end are a stale page's; they become zero, in q's place.
                slot_row = gl.arange(0, BLOCK, layout=io_row)
                page = gl.load(block_table + s.to(gl.int64) * stride_bt + last // PAGE).to(gl.int64)
                slot = page * PAGE + last % PAGE + slot_row
                inside = (last + slot_row < length)[:, None] & (column >= 0)[None, :]
                v_offset = (slot * stride_slot + head * stride_head)[:, None] + column[None, :]
                own.store(gl.load(v_ptr + v_offset, mask=inside, other=0.0))
                fence_async_shared()
                thread_barrier()
                acc = warpgroup_mma(gl.convert_layout(p, p_for_o), own, acc)
            else:
                acc = warpgroup_mma(gl.convert_layout(p, p_for_o), v_smem.index(stage), acc)
            thread_barrier()
            mbarrier.arrive(v_empty.index(stage), count=1)
            # This is the merge of `attention.py`.
            m_new = gl.maximum(m_all, m)
            shift = gl.where(m_new == float("-inf"), 0.0, m_new)
            a = gl.convert_layout(gl.exp2(m_all - shift), o_row)
            b = gl.convert_layout(gl.exp2(m - shift), o_row)
            l_all = gl.fma(l_all, a, gl.convert_layout(gl.max(l, 1), o_row) * b)
            acc_all = gl.fma(acc_all, gl.zeros_like(acc_all) + a[:, None], acc * b[:, None])
            m_all = m_new
        if Q_TMA:
            thread_barrier()
            mbarrier.arrive(q_empty, count=1)
        zero = gl.zeros_like(acc_all)
        reciprocal = zero + gl.div_rn(gl.full_like(l_all, 1.0), l_all)[:, None]
        o = acc_all * reciprocal
        o = gl.fma(gl.fma(-o, zero + l_all[:, None], acc_all), reciprocal, o) + 0.0
        o_offset = (row * stride_ot + q_head * stride_oh)[:, None] + column[None, :]
        gl.store(o_ptr + o_offset, gl.convert_layout(o.to(DTYPE), io), mask=real)


@gluon.jit(do_not_specialize=["tiles", "stride_bt"])
def prefill_kernel(
    q_ptr, q_desc, k_desc, v_desc, v_ptr, o_ptr, block_table, table, tiles, heads, scale,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_slot, stride_head, stride_bt,
    G: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, CHUNK: gl.constexpr, TILE_M: gl.constexpr, ST: gl.constexpr,
    Q_TMA: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    ones_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 16], DTYPE)
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    # Every barrier that is initialised is used until the end. The compiler reuses the memory of a barrier that is not;
    # then, when the GPU switches between processes, the barrier's old word overwrites the data there (NaN in 4 columns
    # of rows 0 and 1 of a tile, once in some thousand launches next to another busy process).
    if Q_TMA:
        q_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS // G, G, D], q_desc.layout)
        q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(q_full, count=1)
        mbarrier.init(q_empty, count=2)
    else:
        q_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, D], k_desc.layout)
        q_full, q_empty = k_full, k_empty  # without Q_TMA these two are not used
    k_smem = gl.allocate_shared_memory(DTYPE, [ST, BLOCK, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [ST, BLOCK, D], v_desc.layout)
    ones = gl.allocate_shared_memory(DTYPE, [BLOCK, 16], ones_layout)
    ones.store(gl.full([BLOCK, 16], 1.0, DTYPE, layout=gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])))
    for i in gl.static_range(ST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (_consumer, (q_ptr, v_ptr, o_ptr, block_table, table, tiles, heads, scale,
                         stride_qt, stride_qh, stride_ot, stride_oh, stride_slot, stride_head, stride_bt,
                         q_smem, k_smem, v_smem, ones, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                         0, G, D, PAGE, CHUNK, TILE_M, ST, Q_TMA)),
            (_consumer, (q_ptr, v_ptr, o_ptr, block_table, table, tiles, heads, scale,
                         stride_qt, stride_qh, stride_ot, stride_oh, stride_slot, stride_head, stride_bt,
                         q_smem, k_smem, v_smem, ones, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                         1, G, D, PAGE, CHUNK, TILE_M, ST, Q_TMA)),
            (_producer, (q_desc, k_desc, v_desc, block_table, stride_bt, table, tiles, heads,
                         q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                         G, D, PAGE, TILE_M, ST, Q_TMA)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
