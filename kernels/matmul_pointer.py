"""`native` products by pointer loads: any strides, and batches.

M rows, N columns, K the reduced dimension, B batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels.device_math import after_previous_kernel
from evalengine.kernels.launching.launch import Launch, launch
from evalengine.kernels.matmul_parts import load, multiply_add, rounded, tile_position
from evalengine.kernels.matmul_schedules import MatmulSchedule


@triton.jit(do_not_specialize=["M"])
def _pointer_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    EVEN_K: tl.constexpr, MASK_A: tl.constexpr, MASK_B: tl.constexpr, ROUND_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Program: one tile of one batch entry.

    Rows and columns past the end repeat the first one (without a mask in the loop) or are masked; none is stored. They
    are masked where the operand is not contiguous along K (a repeated index would hide the contiguity along rows or
    columns), and where half of the tile's rows are past the end: loads of a repeated row cost traffic, masked ones
    none.
    """
    after_previous_kernel()
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    row_block, column_block = tile_position(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    row = row_block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    row_in, column_in = row < M, column < N
    row_read = row if MASK_A else tl.where(row_in, row, 0)
    column_read = column if MASK_B else tl.where(column_in, column, 0)
    a_ptr += batch * stride_ab
    b_ptr += batch * stride_bb
    if SWAP:  # Everything is transposed: [N, K] x [K, M].
        a_pointers = a_ptr + row_read[None, :] * stride_am + k[:, None] * stride_ak
        b_pointers = b_ptr + column_read[:, None] * stride_bn + k[None, :] * stride_bk
        a_in, b_in, k_a, k_b = row_in[None, :], column_in[:, None], k[:, None], k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        a_pointers = a_ptr + row_read[:, None] * stride_am + k[None, :] * stride_ak
        b_pointers = b_ptr + column_read[None, :] * stride_bn + k[:, None] * stride_bk
        a_in, b_in, k_a, k_b = row_in[:, None], column_in[None, :], k[None, :], k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    step_a, step_b = tl.cast(stride_ak, tl.int64) * BLOCK_K, tl.cast(stride_bk, tl.int64) * BLOCK_K
    for step in range(tl.cdiv(K, BLOCK_K)):
        left = K - step * BLOCK_K
        a = load(a_pointers, a_in, k_a < left, MASK_A, EVEN_K)
        b = load(b_pointers, b_in, k_b < left, MASK_B, EVEN_K)
        acc = multiply_add(a, b, acc, SWAP)
        a_pointers += step_a
        b_pointers += step_b
    c = rounded(acc, bias_ptr, column_block * BLOCK_N, N, BLOCK_N, SWAP,
                 a_ptr.dtype.element_ty, c_ptr.dtype.element_ty, ROUND_PRODUCT)  # fmt: skip
    row, column = (row[None, :], column[:, None]) if SWAP else (row[:, None], column[None, :])
    tl.store(c_ptr + (batch * M + row) * N + column, c, mask=(row < M) & (column < N))


def by_pointers(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, b_strides: tuple[int, ...], s: MatmulSchedule,
    round_product: bool,
) -> Launch | None:  # fmt: skip
    """c [(B,) M, N] = a [(B,) M, K] times b, whose strides over (B, K, N) are `b_strides`, + bias."""
    *batch, m, n = c.shape
    k = a.shape[-1]
    a_batch, (a_row, a_k) = a.stride(0) if batch else 0, a.stride()[-2:]
    b_batch, b_k, b_column = b_strides
    tiles = -(-m // s.block_m) * -(-n // s.block_n)
    grid = (tiles * (batch[0] if batch else 1), 1, 1)
    args = (a, b, bias, c, m, n, k, a_batch, a_row, a_k, b_batch, b_k, b_column)
    mask_a, even_k = a_k != 1 or s.masks_rows(m), k % s.block_k == 0
    constants = (s.block_m, s.block_n, s.block_k, s.group_m, s.swap, even_k, mask_a, b_k != 1, round_product)
    return launch(_pointer_kernel, grid, args, constants, s.num_warps, s.num_stages)
