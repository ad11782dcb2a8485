"""The parts that `native` attention's kernels share: one block's step, the merge of two chunks, the load of a block.

    M rows of a tile, N = BLOCK KV positions, D head_dim, DP = D padded to a power of two.

`attention.py` states the arithmetic. It is written here and, for Hopper, once more in `attention_hopper_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def online_step(q, k, v, visible, scale, m, l, acc, ones, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One block: q [M, D], k [D, N], v [N, D], visible [M, N] (if MASKED) -> the chunk's new m, l, acc."""
    d = tl.dot(q, k, input_precision=PRECISION)
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
def normalized(acc, l):
    """acc / l, -0 as +0; a row that saw nothing (l = 0: padding, or scores that are all -inf) gives NaN."""
    zero = tl.zeros_like(acc)
    divisor = zero + l[:, None]
    reciprocal = zero + tl.div_rn(tl.full(l.shape, 1.0, tl.float32), l)[:, None]
    o = acc * reciprocal
    return tl.fma(tl.fma(-o, divisor, acc), reciprocal, o) + 0.0


@triton.jit
def slots(pages, n, length, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """The pool's slots of KV positions n ... n + BLOCK_N: all [N], or for TMA the first, as a block lies in one page.

    Positions past `length` get a slot of the sequence's last page; its content is masked.
    """
    if TMA:
        slot = tl.load(pages + tl.minimum(n, length - 1) // PAGE) * PAGE + n % PAGE
    else:
        position = tl.minimum(n + tl.arange(0, BLOCK_N), length - 1)
        slot = tl.load(pages + position // PAGE).to(tl.int64) * PAGE + position % PAGE
    return slot


@triton.jit
def load_block(
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
def reduce_chunk(
    q, k_src, v_src, pages, start, unmasked_end, end, q_position, length, head, scale, stride_slot, stride_head,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Reduces the blocks of [start, end) from a fresh state. Those below `unmasked_end` need no mask for any row of
    the tile."""
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M, 16), tl.float32)
    acc = tl.zeros((M, DP), tl.float32)
    ones = tl.full((BLOCK_N, 16), 1.0, KV)
    # A block's slots are looked up one step ahead: a load that hangs on another load in the same step halves the depth
    # of the pipeline.
    slot = slots(pages, start, length, PAGE, BLOCK_N, TMA)
    for n in tl.range(start, tl.minimum(unmasked_end, end), BLOCK_N):
        k, v = load_block(k_src, v_src, slot, n, length, head, stride_slot, stride_head, D, DP, BLOCK_N, TMA, False)
        slot = slots(pages, n + BLOCK_N, length, PAGE, BLOCK_N, TMA)
        m, l, acc = online_step(q, k, v, q, scale, m, l, acc, ones, False, PRECISION)
    for n in tl.range(tl.maximum(start, unmasked_end), end, BLOCK_N):
        k, v = load_block(k_src, v_src, slot, n, length, head, stride_slot, stride_head, D, DP, BLOCK_N, TMA, True)
        slot = slots(pages, n + BLOCK_N, length, PAGE, BLOCK_N, TMA)
        visible = (n + tl.arange(0, BLOCK_N))[None, :] <= q_position[:, None]
        m, l, acc = online_step(q, k, v, visible, scale, m, l, acc, ones, True, PRECISION)
    return m, tl.max(l, 1), acc
