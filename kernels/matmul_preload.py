"""`native` products of few rows that have every weight on its way before their input is there.

    M rows, N columns, K the reduced dimension.

One row of a small model is bound by latency: of a product of Qwen3-0.6B on an H200 some 5 us, its bytes are 1 to 3.
From Hopper on a kernel may be on the GPU while the one in front of it still computes (`device_math`), and no kernel
writes weights. So a program reads all of its weights into registers, waits for its input, and has the chain of
multiply-accumulates left to do: at most PRELOADED blocks of K, in ascending order, as every schedule.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels.device_math import after_previous_kernel
from evalengine.kernels.launching.launch import Launch, launch
from evalengine.kernels.matmul_parts import load, multiply_add, rounded
from evalengine.kernels.matmul_schedules import Schedule


@triton.jit
def _weights(b_ptr, block, column, inside, stride_bn, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of the weights [N, K]."""
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    return load(b_ptr + column[None, :] * stride_bn + k[:, None], inside[None, :], k[:, None] < K, True, EVEN_K)


@triton.jit(do_not_specialize=["M"])
def _preload_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K, stride_am, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, EVEN_K: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
):  # fmt: skip
    """a [M, K] with M <= BLOCK_M, b [N, K] (the weights' own layout), c [M, N]. Program: BLOCK_N columns.

    The weights, which no kernel writes, are read before the wait; so only the chain itself comes after it.
    """
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    b0 = _weights(b_ptr, 0, column, inside, stride_bn, K, BLOCK_K, EVEN_K)
    if BLOCKS > 1:
        b1 = _weights(b_ptr, 1, column, inside, stride_bn, K, BLOCK_K, EVEN_K)
    if BLOCKS > 2:
        b2 = _weights(b_ptr, 2, column, inside, stride_bn, K, BLOCK_K, EVEN_K)
    if BLOCKS > 3:
        b3 = _weights(b_ptr, 3, column, inside, stride_bn, K, BLOCK_K, EVEN_K)
    after_previous_kernel()
    row, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    a_at = a_ptr + row.to(tl.int64)[:, None] * stride_am + k[None, :]
    row_in = (row < M)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.static_range(BLOCKS):
        a = load(a_at + block * BLOCK_K, row_in, k[None, :] < K - block * BLOCK_K, True, EVEN_K)
        if block == 0:
            acc = multiply_add(a, b0, acc, False)
        elif block == 1:
            acc = multiply_add(a, b1, acc, False)
        elif block == 2:
            acc = multiply_add(a, b2, acc, False)
        else:
            acc = multiply_add(a, b3, acc, False)
    c = rounded(acc, bias_ptr, tl.program_id(0) * BLOCK_N, N, BLOCK_N, False,
                 a_ptr.dtype.element_ty, c_ptr.dtype.element_ty, ROUND_PRODUCT)  # fmt: skip
    tl.store(c_ptr + row[:, None] * N + column[None, :], c, mask=row_in & inside[None, :])


def preloaded(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, row_strides: tuple[int, int], s: Schedule, round_product: bool
) -> Launch | None:
    """c [M, N] = a [M, K] b^T + bias, b [N, K]; row_strides: a's and b's."""
    (m, k), n = a.shape, c.shape[1]
    grid = (-(-n // s.block_n), 1, 1)
    args = (a, b, bias, c, m, n, k, *row_strides)
    constants = (s.block_m, s.block_n, s.block_k, -(-k // s.block_k), k % s.block_k == 0, round_product)
    return launch(_preload_kernel, grid, args, constants, s.num_warps, 1)
