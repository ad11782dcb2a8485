"""`native` products by tensor descriptors: both operands contiguous along K, on Hopper or newer.

M rows, N columns, K the reduced dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from evalengine.kernels.device_math import after_previous_kernel
from evalengine.kernels.launching.launch import Replay, launch
from evalengine.kernels.matmul_parts import multiply_add, rounded, tile_position
from evalengine.kernels.matmul_schedules import MatmulSchedule


@triton.jit
def _store_tile(c_desc, c, row, column, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr):
    """Stores c [BLOCK_M, BLOCK_N] in SUBTILES = 1, 2 or 4 column parts, each of which needs that much less shared
    memory."""
    if SUBTILES == 1:
        c_desc.store([row, column], c)
    else:
        PART: tl.constexpr = BLOCK_N // 2
        left, right = c.reshape(c.shape[0], 2, PART).permute(0, 2, 1).split()
        _store_tile(c_desc, left, row, column, PART, SUBTILES // 2)
        _store_tile(c_desc, right, row, column + PART, PART, SUBTILES // 2)


@triton.jit
def _tma_tile(
    tile, a_desc, b_desc, c_desc, b_rest, c_rest, bias_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAP: tl.constexpr, SUBTILES: tl.constexpr, ROUND_PRODUCT: tl.constexpr,
):  # fmt: skip
    row_block, column_block = tile_position(tile, M, N, BLOCK_M, BLOCK_N + REST_N, GROUP_M)
    row, column = row_block * BLOCK_M, column_block * (BLOCK_N + REST_N)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    if REST_N == 0:
        for step in range(tl.cdiv(K, BLOCK_K)):
            a = a_desc.load([row, step * BLOCK_K])
            b = b_desc.load([column, step * BLOCK_K])
            acc = multiply_add(a.T, b, acc, SWAP) if SWAP else multiply_add(a, b.T, acc, SWAP)
    else:
        rest = tl.zeros((BLOCK_M, REST_N), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            a = a_desc.load([row, step * BLOCK_K])
            b = b_desc.load([column, step * BLOCK_K])
            more = b_rest.load([column + BLOCK_N, step * BLOCK_K])
            acc = multiply_add(a, b.T, acc, False)
            rest = multiply_add(a, more.T, rest, False)
        c = rounded(rest, bias_ptr, column + BLOCK_N, N, REST_N, False, a_desc.dtype, c_desc.dtype, ROUND_PRODUCT)
        c_rest.store([row, column + BLOCK_N], c)
    c = rounded(acc, bias_ptr, column, N, BLOCK_N, SWAP, a_desc.dtype, c_desc.dtype, ROUND_PRODUCT)
    _store_tile(c_desc, c.T if SWAP else c, row, column, BLOCK_N, SUBTILES)


@triton.jit(do_not_specialize=["M"])
def _tma_kernel(
    a_desc, b_desc, c_desc, b_rest, c_rest, bias_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SWAP: tl.constexpr, SUBTILES: tl.constexpr, PERSISTENT: tl.constexpr, ROUND_PRODUCT: tl.constexpr,
):  # fmt: skip
    """a [M, K] times b [N, K] (the weights' own layout) into c [M, N], all by descriptor: elements outside a tensor are
    read as 0 and not stored.

    A program computes one tile, or (PERSISTENT) every num_programs-th; the loads of its next tile then overlap the end
    of the tile before. A tile is BLOCK_N + REST_N columns wide, a sum of two powers of two, or BLOCK_N alone (REST_N =
    0; b_rest, c_rest: None): widths like 160 cut some N into one tile for every SM, where 128 or 256 would leave a
    third of the SMs idle.
    """
    after_previous_kernel()
    if PERSISTENT:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N + REST_N)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _tma_tile(tile, a_desc, b_desc, c_desc, b_rest, c_rest, bias_ptr, M, N, K,
                      BLOCK_M, BLOCK_N, REST_N, BLOCK_K, GROUP_M, SWAP, SUBTILES, ROUND_PRODUCT)  # fmt: skip
    else:
        _tma_tile(tl.program_id(0), a_desc, b_desc, c_desc, b_rest, c_rest, bias_ptr, M, N, K,
                  BLOCK_M, BLOCK_N, REST_N, BLOCK_K, GROUP_M, SWAP, SUBTILES, ROUND_PRODUCT)  # fmt: skip


def by_descriptors(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    row_strides: tuple[int, int],
    s: MatmulSchedule,
    round_product: bool,
    multiprocessors: int,
) -> Replay | None:
    """c [M, N] = a [M, K] b^T + bias, b [N, K]; row_strides: a's and b's; multiprocessors: the GPU's number of SMs.

    Returns the same launch for other a, b, c (and bias), or None under the interpreter.
    """
    (m, k), n = a.shape, c.shape[1]
    a_row, b_column = row_strides
    tiles = -(-m // s.block_m) * -(-n // s.block_n)
    subtiles = s.subtiles * c.element_size() // 2  # Storing a float32 tile takes twice the shared memory.
    grid = (min(multiprocessors, tiles) if s.persistent else tiles, 1, 1)
    main, rest = s.columns
    blocks = (
        _descriptor(a, [m, k], a_row, [s.block_m, s.block_k]),
        _descriptor(b, [n, k], b_column, [main, s.block_k]),
        _descriptor(c, [m, n], n, [s.block_m, main // subtiles]),
        _descriptor(b, [n, k], b_column, [rest, s.block_k]) if rest else None,
        _descriptor(c, [m, n], n, [s.block_m, rest]) if rest else None,
    )
    constants = (s.block_m, main, rest, s.block_k, s.group_m, s.swap, subtiles, s.persistent, round_product)
    launched = launch(_tma_kernel, grid, (*blocks, bias, m, n, k), constants, s.num_warps, s.num_stages)
    if launched is None:
        return None
    replayer = launched.replayer(0, 1, 2, *([3, 4] if rest else []), *([5] if bias is not None else []))
    return (lambda a, b, c, *bias: replayer(a, b, c, b, c, *bias)) if rest else replayer


def _descriptor(base: Tensor, shape: list[int], row_stride: int, block_shape: list[int]) -> TensorDescriptor:
    return TensorDescriptor(base, shape, [row_stride, 1], block_shape)
