"""Rotary position embedding, half-split (NeoX) pairs, rounded where transformers' eager code rounds.

    T tokens, D head_dim (even; need not be a power of two).

Rounding points (`native`): cos and sin in the model dtype, each product and the sum rounded to it; or cos and sin in
float32, as are the products and the sum, and one rounding. So the result is byte-equal to `q * cos + rotate_half(q) *
sin` in torch, and with float32 tables to that of q in float32. Nothing is reduced, so any tile gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels.launching.launch import launch

TILE_WARPS = 4  # warps that share one tile; each thread holds 16 bytes of it


@triton.jit
def load_for_rows(ptr, columns, mask):
    """A vector that all rows of a tile share -> [rows, columns], of the shape of `mask`, 0 where it is False.

    It is loaded once a row, from L1, in the tile's own layout; a 1-D load might have to pass through shared memory.
    """
    return tl.load(ptr + tl.broadcast_to(columns[None, :], mask.shape), mask, other=0.0)


@triton.jit
def rotate(x1, x2, cos, sin, dtype: tl.constexpr, table: tl.constexpr):
    """float32 tiles holding values of `dtype`, cos and sin of `table` -> the two rotated halves, in `dtype`.

    x1 cos - x2 sin, x2 cos + x1 sin: each product rounded to `table` (`dtype` or float32), then each sum to `dtype`.
    """
    first = (x1 * cos).to(table).to(tl.float32) - (x2 * sin).to(table).to(tl.float32)
    second = (x2 * cos).to(table).to(tl.float32) + (x1 * sin).to(table).to(tl.float32)
    return first.to(dtype), second.to(dtype)


def tile_shape(heads: int, width: int, itemsize: int, tile_warps: int = TILE_WARPS) -> tuple[int, int, int]:
    """Heads of `width` contiguous elements -> (rows, columns, warps) of a tile: a thread holds 16 bytes.

    All are powers of two, with no more rows than the heads need. The shape changes no bit.
    """
    columns = triton.next_power_of_2(width)
    per_warp = 32 * 16 // itemsize
    rows = min(max(1, tile_warps * per_warp // columns), triton.next_power_of_2(heads))
    return rows, columns, min(max(tile_warps, columns // per_warp), max(1, rows * columns // per_warp))


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    parts: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    token = (tl.program_id(0) // parts).to(tl.int64)
    heads = (tl.program_id(0) % parts) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (heads < HEADS)[:, None] & (columns < HALF)[None, :]

    source = x_ptr + token * token_stride + heads.to(tl.int64)[:, None] * head_stride + columns[None, :]
    x1 = tl.load(source, mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF, mask, other=0.0).to(tl.float32)
    cos = load_for_rows(cos_ptr + token * HALF, columns, mask).to(tl.float32)
    sin = load_for_rows(sin_ptr + token * HALF, columns, mask).to(tl.float32)

    first, second = rotate(x1, x2, cos, sin, out_ptr.dtype.element_ty, cos_ptr.dtype.element_ty)
    target = out_ptr + (token * HEADS + heads[:, None]) * (2 * HALF) + columns[None, :]
    tl.store(target, first, mask)
    tl.store(target + HALF, second, mask)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D] (any token and head stride) and cos, sin [T, D/2] of the same dtype, or float32 -> contiguous."""
    tokens, heads, head_dim = x.shape
    half = head_dim // 2
    assert cos.dtype == sin.dtype and cos.dtype in (x.dtype, torch.float32)
    assert cos.shape == sin.shape == (tokens, half) and head_dim == 2 * half
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty((tokens, heads, head_dim), dtype=x.dtype, device=x.device)
    if tokens:
        rows, columns, warps = tile_shape(heads, half, x.element_size())
        grid = (tokens * -(-heads // rows), 1, 1)
        args = (x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1))
        launch(_rope_kernel, grid, args, (heads, half, rows, columns), warps, num_stages=1)
    return out
