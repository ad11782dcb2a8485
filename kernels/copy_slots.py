"""Copying slots of the pools of states.

    L layers, R slots.

Torch needs at least a launch for each copy and pool, or holds all copied slots a second time. With Qwen3.5-4B's states,
101 MB each in seven pools, it took 18 launches and 118 us for a copy on an H200, since it divides tensors of more than
2^31 elements; this takes 36 us for each of three copies of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import launch

BLOCK_BYTES = 1 << 14  # that a program copies, 128 of each thread


@triton.jit
def _copy_kernel(pool_ptr, copies_ptr, layer_size, slot_size, BLOCK: tl.constexpr):
    """Program (part of a slot, copy, layer)."""
    device_math.after_previous_kernel()
    copy = copies_ptr + 2 * tl.program_id(1)
    source, destination = tl.load(copy), tl.load(copy + 1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pool_ptr += tl.program_id(2).to(tl.int64) * layer_size
    x = tl.load(pool_ptr + source * slot_size + i, mask=i < slot_size)
    tl.store(pool_ptr + destination * slot_size + i, x, mask=i < slot_size)


def copy_slots(pool: Tensor, copies: Tensor) -> None:
    """Copies slots of pool [L, R, ...] (contiguous): copies, int64 [n, 2], has (source, destination) of each.

    All at once: no slot may be the destination of one copy and the source or the destination of another."""
    assert pool.is_contiguous() and copies.is_contiguous()
    layers, slots = pool.shape[:2]
    size = pool[0].numel() // max(1, slots)
    block = BLOCK_BYTES // pool.element_size()
    grid = -(-size // block), len(copies), layers
    launch(_copy_kernel, grid, (pool, copies, slots * size, size), (block,), 4, 1)
