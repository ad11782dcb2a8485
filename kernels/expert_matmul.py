"""`native` products of tokens with their experts' weights: each row has the bytes of the dense product.

    T tokens, k experts of each, P = T k pairs, E experts, K input features, N output features.

The arithmetic of a (pair, column) is `matmul.linear`'s of that token's row and that expert's weight: one float32 chain
over K, ascending from +0, then the bias, then one rounding. Which rows share a tile, how many a tile has and in which
order tiles run is schedule. An expert without tokens is not read. One kernel serves decode steps and prefills.

Measured on an H200, experts of Qwen3-30B-A3B in bf16, random logits: the experts in use are read at 3.9 TB/s (gate and
up) and 3.0 (down) for 4 tokens, 4.2 to 4.4 and 3.9 to 4.1 for 16 to 256; 225 TFLOP/s for 1,024 tokens, 463 for 4,096.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels.device_math import after_previous_kernel
from evalengine.kernels.expert_groups import Groups
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key
from evalengine.kernels.matmul_parts import load, multiply_add, rounded
from evalengine.kernels.matmul_schedules import POINTER, MatmulSchedule

_launches: dict[tuple, Replay] = {}
REFERENCE = MatmulSchedule(POINTER, 64, 64, 32, num_warps=4, num_stages=2)
# Schedules that evalengine/verification found wrong on this GPU; this process never chooses them.
excluded: set[MatmulSchedule] = set()
# The most pairs an expert has on average, by the height of a tile.
HEIGHTS = ((8, 16), (24, 32), (96, 64))
TALLEST = 128


@triton.jit
def _expert_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, order_ptr, tiles_ptr, N, K, stride_x, stride_expert, stride_w,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK_N columns of one tile. SHARED: so many pairs in a row have one row of x."""
    after_previous_kernel()
    column_blocks = tl.cdiv(N, BLOCK_N)
    tile, column_block = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
    expert = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    first, rows = tl.load(tiles_ptr + tile * 3 + 1), tl.load(tiles_ptr + tile * 3 + 2)
    if rows > 0:
        place = tl.arange(0, BLOCK_M)
        inside = place < rows
        pair = tl.load(order_ptr + first + place, mask=inside, other=0).to(tl.int64)
        row = pair // SHARED
        column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        column_in = column < N
        column_read = tl.where(column_in, column, 0).to(tl.int64)
        k = tl.arange(0, BLOCK_K).to(tl.int64)
        w_ptr += expert * stride_expert
        if SWAP:  # Everything is transposed: [N, K] x [K, M].
            x_pointers = x_ptr + row[None, :] * stride_x + k[:, None]
            w_pointers = w_ptr + column_read[:, None] * stride_w + k[None, :]
            x_in, w_in, k_x, k_w = inside[None, :], column_in[:, None], k[:, None], k[None, :]
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            x_pointers = x_ptr + row[:, None] * stride_x + k[None, :]
            w_pointers = w_ptr + column_read[None, :] * stride_w + k[:, None]
            x_in, w_in, k_x, k_w = inside[:, None], column_in[None, :], k[None, :], k[:, None]
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            left = K - step * BLOCK_K
            x = load(x_pointers, x_in, k_x < left, True, EVEN_K)
            w = load(w_pointers, w_in, k_w < left, False, EVEN_K)
            acc = multiply_add(x, w, acc, SWAP)
            x_pointers += BLOCK_K
            w_pointers += BLOCK_K
        if bias_ptr is not None:
            bias_ptr += expert * N
        y = rounded(acc, bias_ptr, column_block * BLOCK_N, N, BLOCK_N, SWAP,
                    x_ptr.dtype.element_ty, y_ptr.dtype.element_ty, False)  # fmt: skip
        pair, column = (pair[None, :], column[:, None]) if SWAP else (pair[:, None], column[None, :])
        x_in = inside[None, :] if SWAP else inside[:, None]
        tl.store(y_ptr + pair * N + column, y, mask=x_in & (column < N))


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, schedule: MatmulSchedule | None = None
) -> Tensor:
    """x [T, K], or [T, k, K] for a row a pair; weight [E, N, K], bias [E, N] -> [T, k, N] in the dtype of x.

    All of them contiguous along their last dimension, bias wholly. schedule: one of the height of the groups' tiles.
    """
    chosen, n = groups.chosen, weight.shape[1]
    if x.ndim == 3:
        x = x.contiguous()
    y = torch.empty((x.shape[0], chosen, n), dtype=x.dtype, device=x.device)
    key = (*map(operand_key, (x, weight, bias, groups.tiles)), groups.block_m, chosen, schedule)
    varying = (x, weight, y, groups.order, groups.tiles, *([] if bias is None else [bias]))
    if replayer := _launches.get(key):
        replayer(*varying)
        return y
    rows = x.flatten(0, 1) if x.ndim == 3 else x
    k = rows.shape[1]
    assert weight.shape[2] == k and weight.dtype == x.dtype and x.stride(-1) == weight.stride(-1) == 1
    s = schedule or choose(x.dtype, groups.block_m, n, k)
    assert s.block_m == groups.block_m, f"tiles of {groups.block_m} rows, and the schedule {s}"
    args = (rows, weight, bias, y, groups.order, groups.tiles, n, k, rows.stride(0), weight.stride(0), weight.stride(1))
    constants = (s.block_m, s.block_n, s.block_k, s.swap, k % s.block_k == 0, 1 if x.ndim == 3 else chosen)
    grid = (len(groups.tiles) * -(-n // s.block_n), 1, 1)
    launched = launch(_expert_kernel, grid, args, constants, s.num_warps, s.num_stages) if y.numel() else None
    if launched:
        cache_launch(_launches, key, launched.replayer(0, 1, 3, 4, 5, *([] if bias is None else [2])))
    return y


def forget_launches() -> None:
    """Empties the memory of launches, whose schedules may be excluded by now."""
    _launches.clear()


def height(dtype: torch.dtype, pairs: int, experts: int) -> int:
    """The rows of a tile, for so many pairs in a step."""
    average = pairs / experts
    if dtype == torch.float32:
        return 16 if average <= 16 else 64
    return next((rows for most, rows in HEIGHTS if average <= most), TALLEST)


def heights(dtype: torch.dtype) -> list[int]:
    """Every value of `height`."""
    return [16, 64] if dtype == torch.float32 else [*(rows for _, rows in HEIGHTS), TALLEST]


def choose(dtype: torch.dtype, block_m: int, n: int, k: int) -> MatmulSchedule:
    """The schedule of tiles of so many rows; the plainest of that height where the quickest one differed."""
    schedule = preferred(dtype, block_m, n)
    return plainest(block_m) if schedule in excluded else schedule


def plainest(block_m: int) -> MatmulSchedule:
    """The schedule that replaces an excluded one."""
    return MatmulSchedule(POINTER, block_m, 64, 32, num_warps=4, num_stages=2)


@cache
def preferred(dtype: torch.dtype, block_m: int, n: int) -> MatmulSchedule:
    """The first choice for tiles of so many rows of [., K] x [K, n]."""
    if dtype == torch.float32:  # FMA units: bound by registers and shared memory
        return MatmulSchedule(POINTER, block_m, 32 if block_m == 16 else 64, 64 if block_m == 16 else 16)
    if block_m <= 32:  # The weights are the MMA's 64-row side, and each is read once.
        return MatmulSchedule(POINTER, block_m, 64, 128, num_warps=4, num_stages=4, swap=True)
    if block_m == 64:
        return MatmulSchedule(POINTER, 64, 128, 64, num_warps=4, num_stages=4)
    return MatmulSchedule(POINTER, 128, 128 if n < 4096 else 256, 64, num_warps=8, num_stages=3)
