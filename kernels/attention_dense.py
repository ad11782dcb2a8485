"""`native` attention over whole tensors: torch's scaled_dot_product_attention, with any mask.

    B batch, Hq/Hkv heads, G = Hq / Hkv, L query rows, S keys, D head_dim.

The arithmetic is that of `attention`, with key j at position j: chunks of CHUNK keys, blocks of BLOCK, the same
rounding points. A number that is added to a score (a float mask) is added to d, divided by the softmax's scale s:
`d + max(mask * (1 / s), -2^120)` in float32, or -inf where the mask is. So a mask of 0 and -inf, or of 0 and the
dtype's least number, gives the bytes of a boolean one, and of `is_causal`. A row that sees no key, or whose scores are
all -inf, gives 0; one whose keys all have bfloat16's or float32's least number gives their values' mean, as in torch.

A row's bits depend on its own numbers, on the keys that it sees and on their positions; keys after the last one that
it sees change nothing. The tile is chosen by dtype and head_dim alone, so the number of rows chooses no other
instruction. That four and eight warps (`_schedule`) give one result is held by a test on a GPU, not compared before the
first use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels.attention import BLOCK, CHUNK, LOG2_E, PRECISION
from evalengine.kernels.attention_parts import merge, normalized, online_softmax
from evalengine.kernels.device_math import after_previous_kernel
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_MASK, BOOLEAN, ADDED = 0, 1, 2
LEAST = tl.constexpr(-(2.0**120))  # of what is added to d: it hides whatever d is, and times a scale it stays finite
SCALES = (2.0**-64, 2.0**7)  # softmax scales whose inverse, and whose product with LEAST, are float32 numbers
_launches: dict[tuple, Replay] = {}


@triton.jit
def _mask_block(mask_at, position, keys, mask_key, real):
    """The mask [M, N] of rows whose masks begin at mask_at [M] and of the keys at `position` [N]; 0 past the ends."""
    seen = real[:, None] & (position < keys)[None, :]
    return tl.load(mask_at[:, None] + position.to(tl.int64)[None, :] * mask_key, mask=seen, other=0)


@triton.jit
def _chunk(
    q, k_ptr, v_ptr, mask_at, row, rows, keys, start, end, scale, mask_scale, k_row, v_row, mask_key,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Reduces the keys of [start, end) from a fresh state: m, l [M], acc [M, DP]."""
    column, key = tl.arange(0, DP), tl.arange(0, BLOCK_N)
    ones = tl.full((BLOCK_N, 16), 1.0, q.dtype)
    m = tl.full((M,), float("-inf"), tl.float32)
    l = tl.zeros((M, 16), tl.float32)
    acc = tl.zeros((M, DP), tl.float32)
    if MASK:
        mask = _mask_block(mask_at, start + key, keys, mask_key, row < rows)
    for n in tl.range(start, end, BLOCK_N):
        position = n + key
        at = position.to(tl.int64)
        inside = position < keys
        k_at = k_ptr + at[None, :] * k_row + column[:, None]
        k = tl.load(k_at, mask=inside[None, :] & (column < D)[:, None], other=0.0)
        v_at = v_ptr + at[:, None] * v_row + column[None, :]
        v = tl.load(v_at, mask=inside[:, None] & (column < D)[None, :], other=0.0)
        d = tl.dot(q, k, input_precision=PRECISION)
        visible = inside[None, :] & (row < rows)[:, None]
        if CAUSAL:
            visible = visible & (position[None, :] <= row[:, None])
        if MASK:
            if MASK == 1:
                visible = visible & (mask != 0)
            else:
                added = mask.to(tl.float32) * mask_scale
                hidden = mask == float("-inf")
                d += tl.where(hidden, float("-inf"), tl.where(added < LEAST, LEAST, added))
            # A block's mask is loaded a step ahead: its single bytes cannot be in the loop's pipeline.
            mask = _mask_block(mask_at, position + BLOCK_N, keys, mask_key, row < rows)
        d = tl.where(visible, d, float("-inf"))
        m, l, acc = online_softmax(d, v, scale, m, l, acc, ones, PRECISION)
    return m, tl.max(l, 1), acc


@triton.jit
def _dense_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, o_ptr, heads, tiles, rows, keys, scale, mask_scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_key, o_batch, o_head, o_row,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK_N: tl.constexpr, BLOCK_N: tl.constexpr, M: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """M query rows over all keys. Programs are numbered by query head, then tile (of causal rows those of most keys
    first), then batch: all in one number, since only the first of a grid's three may exceed 65,535.

    SPLIT: there are several chunks; merging a single one into the fresh state would change nothing, and cost registers.
    """
    after_previous_kernel()
    head, tile = tl.program_id(0) % heads, tiles - 1 - tl.program_id(0) // heads % tiles
    b = (tl.program_id(0) // heads // tiles).to(tl.int64)
    row, column = tile * M + tl.arange(0, M), tl.arange(0, DP)
    wide_row, wide_head = row.to(tl.int64), head.to(tl.int64)
    real = (row < rows)[:, None] & (column < D)[None, :]
    q = tl.load(q_ptr + b * q_batch + wide_head * q_head + wide_row[:, None] * q_row + column[None, :], real, 0.0)
    k_ptr += b * k_batch + wide_head // G * k_head
    v_ptr += b * v_batch + wide_head // G * v_head
    mask_at = mask_ptr + b * mask_batch + wide_head * mask_head + wide_row * mask_row
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, (tile + 1) * M)
    if SPLIT:
        m = tl.full((M,), float("-inf"), tl.float32)
        l = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, DP), tl.float32)
        for start in tl.range(0, end, CHUNK_N):
            m_c, l_c, acc_c = _chunk(
                q, k_ptr, v_ptr, mask_at, row, rows, keys, start, tl.minimum(start + CHUNK_N, end), scale, mask_scale,
                k_row, v_row, mask_key, D, DP, BLOCK_N, M, CAUSAL, MASK, PRECISION,
            )  # fmt: skip
            m, l, acc = merge(m, l, acc, m_c, l_c, acc_c)
    else:
        m, l, acc = _chunk(
            q, k_ptr, v_ptr, mask_at, row, rows, keys, 0, end, scale, mask_scale,
            k_row, v_row, mask_key, D, DP, BLOCK_N, M, CAUSAL, MASK, PRECISION,
        )  # fmt: skip
    o = tl.where((l == 0.0)[:, None], 0.0, normalized(acc, l)).to(q.dtype)
    tl.store(o_ptr + b * o_batch + wide_head * o_head + wide_row[:, None] * o_row + column[None, :], o, mask=real)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """q [B, Hq, L, D], k and v [B, Hkv, S, D] -> [B, Hq, L, D], in memory [B, L, Hq, D].

    bf16, fp16 or fp32, all three alike; any strides. mask: boolean (true where a row sees a key) or float (added to the
    scaled scores), broadcastable to [B, Hq, L, S]. is_causal: row i sees keys 0 ... i. scale: of the scores, within
    SCALES, head_dim^-0.5 by default.
    """
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
    key = (operand_key(q), operand_key(k), operand_key(v), operand_key(mask), is_causal, scale)
    if replayer := _launches.get(key):
        replayer(q, k, v, out, q if mask is None else mask)
        return out
    batch, heads, rows, head_dim = q.shape
    keys = k.shape[2]
    assert q.dtype == k.dtype == v.dtype and q.dtype in DTYPES and k.shape == v.shape and heads % k.shape[1] == 0
    if out.numel() == 0:
        return out
    if keys == 0:
        return out.zero_()
    used = [x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v)]
    q_used, k_used, v_used = used
    seen = None if mask is None else mask.expand(batch, heads, rows, keys)
    form = NO_MASK
    if seen is not None:
        form = BOOLEAN if seen.dtype == torch.bool else ADDED
        seen = seen.view(torch.uint8) if form == BOOLEAN else seen
    factor = head_dim**-0.5 if scale is None else scale
    strides = [stride for x in (q_used, k_used, v_used) for stride in x.stride()[:3]]
    mask_strides = [0] * 4 if seen is None else [*seen.stride()]
    split = keys > CHUNK
    tile, warps, stages = _schedule(q.dtype, head_dim, split)
    padded = max(16, triton.next_power_of_2(head_dim))
    tiles = -(-rows // tile)
    launched = launch(
        _dense_kernel,
        (heads * tiles * batch, 1, 1),
        (q_used, k_used, v_used, q_used if seen is None else seen, out, heads, tiles, rows, keys, factor * LOG2_E,
         1 / factor, *strides, *mask_strides, *out.stride()[:3]),
        (heads // k.shape[1], head_dim, padded, CHUNK, BLOCK, tile, is_causal, form, PRECISION, split),
        warps, stages,
    )  # fmt: skip
    as_given = all(given is one for given, one in zip((q, k, v), used, strict=True))
    if launched and as_given:  # Every tensor varies, the one in the mask's place too: others would stay alive.
        cache_launch(_launches, key, launched.replayer(0, 1, 2, 4, 3))
    return out


def _schedule(dtype: torch.dtype, head_dim: int, split: bool) -> tuple[int, int, int]:
    """(rows of a tile, warps, stages). Float32 runs on FMA units, where registers bound the tile; wide heads must leave
    room in 99 KiB of shared memory (sm_86, sm_89). Four warps have no registers for two states of 128 columns."""
    if dtype == torch.float32:
        return 16, 4, 1
    if head_dim > 128:
        return 32, 4, 1
    return 64, 8 if split and head_dim > 64 else 4, 2
