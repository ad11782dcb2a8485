"""Groups the (token, expert) pairs of a step by expert, without a word from the device to the host.

    T tokens, k experts of each, P = T k pairs, numbered in the order of [T, k] in memory, E experts.

A tile is up to BLOCK_M pairs of one expert. How many tiles there are depends on the choice, which the host does not
know; so there is room for P // BLOCK_M + E of them, and those without pairs are skipped: of the b pairs of the experts
before it, expert e has the tiles from b // BLOCK_M + e on, at least as many as it needs, and no two experts share one.
So shapes are static, and a decode step can be captured as a CUDA graph.

Where there are few pairs (a decode step of a few sequences), each is a separate tile: there is nothing to sort, and
no empty tile is launched.

The sort is stable and counts: every expert's program counts the pairs of the experts before it, and places its own in
their order. Integers alone are added. Nothing here can change a bit of a product (`kernels/expert_matmul.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key

BLOCK = 4096  # pairs that a program looks at in one go, at most
FEW = 4  # so many times as many experts as pairs, or more, are few pairs
_launches: dict[tuple, Replay] = {}


class Groups(NamedTuple):
    """Which pairs each tile has."""

    order: Tensor  # int32 [P]: the pairs, tile by tile
    tiles: Tensor  # int32 [tiles, 3]: an expert, the place in `order` of the tile's first pair, its number of pairs
    block_m: int
    chosen: int  # k


@triton.jit(do_not_specialize=["P"])
def _group_kernel(ids_ptr, order_ptr, tiles_ptr, P, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Program: one expert."""
    device_math.after_previous_kernel()
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    before, own = expert * 0, expert * 0
    for start in range(0, P, BLOCK):
        ids = tl.load(ids_ptr + start + place, mask=start + place < P, other=0x7FFFFFFF)
        before += tl.sum((ids < expert).to(tl.int32), 0)
        own += tl.sum((ids == expert).to(tl.int32), 0)
    first = before // BLOCK_M + expert
    for tile in range(first, (before + own) // BLOCK_M + expert + 1):
        done = (tile - first) * BLOCK_M
        tl.store(tiles_ptr + tile * 3, expert)
        tl.store(tiles_ptr + tile * 3 + 1, before + done)
        tl.store(tiles_ptr + tile * 3 + 2, tl.minimum(tl.maximum(own - done, 0), BLOCK_M))
    for start in range(0, P, BLOCK):
        ids = tl.load(ids_ptr + start + place, mask=start + place < P, other=0x7FFFFFFF)
        mine = (ids == expert).to(tl.int32)
        tl.store(order_ptr + before + tl.cumsum(mine, 0) - 1, start + place, mask=ids == expert)
        before += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["P"])
def _alone_kernel(ids_ptr, order_ptr, tiles_ptr, P, BLOCK: tl.constexpr):
    """Program: all pairs, each of which is a tile."""
    device_math.after_previous_kernel()
    pair = tl.arange(0, BLOCK)
    inside = pair < P
    tl.store(order_ptr + pair, pair, mask=inside)
    tl.store(tiles_ptr + pair * 3, tl.load(ids_ptr + pair, mask=inside, other=0), mask=inside)
    tl.store(tiles_ptr + pair * 3 + 1, pair, mask=inside)
    tl.store(tiles_ptr + pair * 3 + 2, tl.full((BLOCK,), 1, tl.int32), mask=inside)


def are_alone(pairs: int, experts: int) -> bool:
    """Whether each of so many pairs is a tile: few of them share an expert, whose weight the L2 cache still holds."""
    return FEW * pairs <= experts


def group(ids: Tensor, experts: int, block_m: int) -> Groups:
    """int32 [T, k], contiguous, each below `experts` -> the pairs in tiles of up to `block_m`, a power of two."""
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    alone = are_alone(pairs, experts)
    count = pairs if alone else pairs // block_m + experts
    tiles = torch.empty((count, 3), dtype=torch.int32, device=ids.device)
    key = (operand_key(ids), experts, block_m)
    if replayer := _launches.get(key):
        replayer(ids, order, tiles)
    else:
        assert ids.is_contiguous() and ids.dtype == torch.int32
        args = (ids, order, tiles, pairs)
        block = min(BLOCK, max(16, triton.next_power_of_2(pairs)))
        kernel, programs, constants = (
            (_alone_kernel, 1, (block,)) if alone else (_group_kernel, experts, (block_m, block))
        )
        warps = 4 if block <= 1024 else 8
        launched = launch(kernel, (programs, 1, 1), args, constants, warps, num_stages=1)
        if launched:
            cache_launch(_launches, key, launched.replayer(0, 1, 2))
    return Groups(order, tiles, block_m, ids.shape[1])
