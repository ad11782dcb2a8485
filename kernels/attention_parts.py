"""The parts that `native` attention's kernels share: one block's step, the merge of two chunks, the load of a block.

    M rows of a tile, N = BLOCK KV positions, D head_dim, DP = D padded to a power of two.

`attention.py` states the arithmetic. It is written here and, for Hopper, once more in `attention_hopper_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from evalengine.kernels.device_math import tanh


@triton.jit
def scores(q, k, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """d [M, N] of q [M, D] and k [D, N], before the mask. With a softcap it is tanh(d CAPPED), where CAPPED is the
    softmax's scale over the cap; else CAPPED is None."""
    d = tl.dot(q, k, input_precision=PRECISION)
    if CAPPED is not None:
        d = tanh(d * CAPPED)
    return d


@triton.jit
def online_step(
    q, k, v, visible, scale, m, l, acc, ones, MASKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One block: q [M, D], k [D, N], v [N, D], visible [M, N] (if MASKED) -> the chunk's new m, l, acc."""
    d = scores(q, k, CAPPED, PRECISION)
    if MASKED:
        d = tl.where(visible, d, float("-inf"))
    return online_softmax(d, v, scale, m, l, acc, ones, PRECISION)


@triton.jit
def online_softmax(d, v, scale, m, l, acc, ones, PRECISION: tl.constexpr):
    """`online_step` from the block's d [M, N] on, which is -inf where a row does not see a position."""
    m_new = tl.maximum(m, tl.max(d, 1) * scale)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # A block without a mask can be full of -inf, too.
    p = tl.exp2(tl.fma(d, tl.zeros_like(d) + scale, tl.zeros_like(d) - shift[:, None]))
    alpha = tl.exp2(m - shift)
    p = p.to(v.dtype)
    l = tl.dot(p, ones, l * alpha[:, None], input_precision=PRECISION)
    acc = tl.dot(p, v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l, acc


@triton.jit
def merge(m, l, acc, m_c, l_c, acc_c):
    """Merges a chunk's state into that of the chunks before it."""
    m_new = tl.maximum(m, m_c)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    a, b = tl.exp2(m - shift), tl.exp2(m_c - shift)
    l = tl.fma(l, a, l_c * b)
    acc = tl.fma(acc, tl.zeros_like(acc) + a[:, None], acc_c * b[:, None])
    return m_new, l, acc


@triton.jit
def merge_sink(m, l, acc, sink):
    """Merges the heads' sinks [M], logits without a value, into the state after the last chunk."""
    t = sink.to(tl.float32) * 1.4426950408889634
    m_new = tl.maximum(m, t)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp2(m - shift)
    return tl.fma(l, a, tl.exp2(t - shift)), acc * a[:, None]


@triton.jit
def normalized(acc, l):
    """acc / l, -0 as +0; a row that saw nothing (l = 0: padding, or scores that are all -inf) gives NaN."""
    zero = tl.zeros_like(acc)
    divisor = zero + l[:, None]
    reciprocal = zero + tl.div_rn(tl.full(l.shape, 1.0, tl.float32), l)[:, None]
    o = acc * reciprocal
    return tl.fma(tl.fma(-o, divisor, acc), reciprocal, o) + 0.0


@triton.jit
def slots(pages, n, length, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """The pool's slots of KV positions n ... n + BLOCK_N: all [N], or for TMA the first, as a block is in one page.

    Positions past `length` get a slot of the sequence's last page; its content is masked.
    """
    if TMA:
        slot = tl.load(pages + tl.minimum(n, length - 1) // PAGE) * PAGE + n % PAGE
    else:
        position = tl.minimum(n + tl.arange(0, BLOCK_N), length - 1)
        slot = tl.load(pages + position // PAGE).to(tl.int64) * PAGE + position % PAGE
    return slot


@triton.jit
def in_use(n, low, length, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Whether each of the positions n ... n + BLOCK_N is before `length` and, with a WINDOW, not before `low`."""
    position = n + tl.arange(0, BLOCK_N)
    inside = position < length
    if WINDOW is not None:
        inside = inside & (position >= low)
    return inside


@triton.jit
def load_block(
    k_src, v_src, slot, n, low, length, head, stride_slot, stride_head,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """KV positions n ... n + BLOCK_N of one head -> k [DP, N], v [N, DP]. TAIL: some may lie past `length`, or, with a
    WINDOW, before `low`, where no row of the tile sees them: V is 0 there, whatever the page holds."""
    if TMA:
        k = k_src.load([slot, head * D]).T
        v = v_src.load([slot, head * D])
        if TAIL:
            v = tl.where(in_use(n, low, length, BLOCK_N, WINDOW)[:, None], v, 0.0)
    else:
        offset, column = slot * stride_slot + head * stride_head, tl.arange(0, DP)
        real = column < D
        k = tl.load(k_src + offset[None, :] + column[:, None], mask=real[:, None], other=0.0)
        if TAIL:
            inside = in_use(n, low, length, BLOCK_N, WINDOW)
            v = tl.load(v_src + offset[:, None] + column[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        else:
            v = tl.load(v_src + offset[:, None] + column[None, :], mask=real[None, :], other=0.0)
    return k, v


@triton.jit
def blocks(
    q, k_src, v_src, pages, begin, end, q_position, low, length, head, scale, stride_slot, stride_head, slot, m, l, acc,
    ones, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the blocks of [begin, end) into a chunk's state. `slot`: the slots of the first one.

    A block's slots are looked up one step ahead: a load that hangs on another load in the same step halves the depth of
    the pipeline.
    """
    for n in tl.range(begin, end, BLOCK_N):
        k, v = load_block(
            k_src, v_src, slot, n, low, length, head, stride_slot, stride_head, D, DP, BLOCK_N, TMA, MASKED, WINDOW
        )  # fmt: skip
        slot = slots(pages, n + BLOCK_N, length, PAGE, BLOCK_N, TMA)
        visible = q
        if MASKED:
            position = (n + tl.arange(0, BLOCK_N))[None, :]
            visible = position <= q_position[:, None]
            if WINDOW is not None:
                visible = visible & (position > q_position[:, None] - WINDOW)
        m, l, acc = online_step(q, k, v, visible, scale, m, l, acc, ones, MASKED, CAPPED, PRECISION)
    return m, l, acc, slot


@triton.jit
def reduce_chunk(
    q, k_src, v_src, pages, start, unmasked_end, end, q_position, low, length, head, scale, stride_slot, stride_head,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, KV: tl.constexpr,
    MASK_ALL: tl.constexpr = False,
):  # fmt: skip
    """Reduces the blocks of [start, end) from a fresh state. Those below `unmasked_end` need no mask for any row of
    the tile, unless they are before some row's WINDOW. `low`: the lowest position that a row of the tile sees; blocks
    before it would change nothing, and are skipped. MASK_ALL: one loop, whose blocks are all masked, instead of
    three: less code and fewer registers where there is little to compute."""
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M, 16), tl.float32)
    acc = tl.zeros((M, DP), tl.float32)
    ones = tl.full((BLOCK_N, 16), 1.0, KV)
    if WINDOW is not None:
        start = tl.maximum(start, low // BLOCK_N * BLOCK_N)
    slot = slots(pages, start, length, PAGE, BLOCK_N, TMA)
    if MASK_ALL:
        unmasked_end = 0
    elif WINDOW is not None:
        # The last row's window begins last: what is before it is masked for this row, if for no other.
        last_begin = tl.maximum(tl.max(q_position, 0) - WINDOW + 1, 0)
        seen_by_all = tl.minimum(tl.maximum(tl.cdiv(last_begin, BLOCK_N) * BLOCK_N, start), end)
        m, l, acc, slot = blocks(
            q, k_src, v_src, pages, start, seen_by_all, q_position, low, length, head, scale, stride_slot, stride_head,
            slot, m, l, acc, ones, D, DP, PAGE, BLOCK_N, TMA, True, WINDOW, CAPPED, PRECISION,
        )  # fmt: skip
        start = seen_by_all
    if not MASK_ALL:
        m, l, acc, slot = blocks(
            q, k_src, v_src, pages, start, tl.minimum(unmasked_end, end), q_position, low, length, head, scale,
            stride_slot, stride_head, slot, m, l, acc, ones, D, DP, PAGE, BLOCK_N, TMA, False, WINDOW, CAPPED,
            PRECISION,
        )  # fmt: skip
    m, l, acc, slot = blocks(
        q, k_src, v_src, pages, tl.maximum(start, unmasked_end), end, q_position, low, length, head, scale, stride_slot,
        stride_head, slot, m, l, acc, ones, D, DP, PAGE, BLOCK_N, TMA, True, WINDOW, CAPPED, PRECISION,
    )  # fmt: skip
    return m, tl.max(l, 1), acc
