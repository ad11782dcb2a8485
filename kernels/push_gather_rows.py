"""Gathers fused with the arithmetic beside them, for steps of few tokens: SiLU and up, then gather; gather, then norm.

    T tokens, i columns of the intermediate size that one rank has, h of the hidden size; I and H those of all ranks.

At few tokens a launch, its flags and the way of its operands through memory cost more than the bytes that it moves
(results/reference/PROFILE.md). The arithmetic is that of `activation.times_activation` and of `rms_norm`, rounded where
they round, so the bytes are those of the op and `push_gather` one after the other. The protocol is push_gather.py's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.activation import times_activation
from evalengine.kernels.launching.launch import cache_launch, launch, operand_key
from evalengine.kernels.limits import MAX_TERMS
from evalengine.kernels.push_gather import Peers, meet, slot_of
from evalengine.kernels.rms_norm import add, normalize

_LEAST, _MOST = 512, 8192  # elements of a program that computes and pushes


def _warps(block: int) -> int:
    """Up to 16 elements a thread, where 16 warps are enough: few programs run, so each should be quick."""
    return max(4, min(16, block // 512))


@triton.jit
def _silu_and_mul_push_kernel(
    gate_up_ptr, memories_ptr, counts_ptr, slot, flags, row_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK columns of one row, pushes them, and waits for the same program of every rank."""
    device_math.after_previous_kernel()
    program = tl.program_id(0)
    turn = tl.load(counts_ptr + 1 + program) + 1
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (program // parts).to(tl.int64)
    columns = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    dtype = gate_up_ptr.dtype.element_ty
    source = gate_up_ptr + token * row_stride + columns
    up = tl.load(source + WIDTH, mask, other=0.0).to(tl.float32)
    gate = tl.load(source, mask, other=0.0).to(tl.float32)
    value = times_activation(gate, up, dtype, "silu")
    target = token * (SIZE * WIDTH) + RANK * WIDTH + columns
    for rank in tl.static_range(SIZE):
        tl.store(slot_of(memories_ptr, slot, rank, dtype) + target, value, mask)
    meet(memories_ptr, flags, counts_ptr, turn, program, RANK, SIZE)


@triton.jit
def _push_add_rms_norm_kernel(
    part_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, memories_ptr, counts_ptr, slot, flags,
    part_stride, residual_stride, eps,
    PART: tl.constexpr, PART_BLOCK: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program pushes its rank's columns of one row, waits for the other ranks' columns of it, and norms the row."""
    device_math.after_previous_kernel()
    program = tl.program_id(0)
    turn = tl.load(counts_ptr + 1 + program) + 1
    hidden: tl.constexpr = SIZE * PART
    dtype = part_ptr.dtype.element_ty
    row = program.to(tl.int64)
    own = tl.arange(0, PART_BLOCK)
    value = tl.load(part_ptr + row * part_stride + own, own < PART)
    for rank in tl.static_range(SIZE):
        tl.store(slot_of(memories_ptr, slot, rank, dtype) + row * hidden + RANK * PART + own, value, own < PART)
    # What does not come from other ranks is loaded before the wait for them.
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < hidden
    residual = tl.load(residual_ptr + row * residual_stride + column, mask, 0.0)
    weight = tl.load(weight_ptr + column, mask, 0.0)
    gathered = slot_of(memories_ptr, slot, RANK, dtype) + row * hidden
    meet(memories_ptr, flags, counts_ptr, turn, program, RANK, SIZE)
    total = add(tl.load(gathered + column, mask, 0.0, cache_modifier=".cg"), residual)
    tl.store(sum_ptr + row * hidden + column, total, mask)
    tl.store(out_ptr + row * hidden + column, normalize(total.to(tl.float32), weight, hidden, eps, dtype), mask)


def silu_and_mul_push(gate_up: Tensor, peers: Peers) -> bool:
    """[T, 2 i], any row stride, of this rank -> silu(first half) * second half of all ranks, [T, I] in every slot.

    Returns False, with nothing done, where the rows are too many.
    """
    key = (_silu_and_mul_push_kernel, operand_key(gate_up))
    if replayer := peers.launches.get(key):
        replayer(gate_up)
        return True
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    block = _LEAST
    while tokens * triton.cdiv(width, block) > peers.programs and block < _MOST:
        block *= 2
    programs = tokens * triton.cdiv(width, block)
    if not 0 < programs <= peers.programs or gate_up.stride(1) != 1:
        return False
    launched = launch(
        _silu_and_mul_push_kernel, (programs, 1, 1),
        (gate_up, peers.memories, peers.counts, peers.slot, peers.flags, gate_up.stride(0)),
        (width, block, peers.rank, peers.size), _warps(block), 1,
    )  # fmt: skip
    if launched:
        cache_launch(peers.launches, key, launched.replayer(0))
    return True


def push_add_rms_norm(
    part: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers
) -> tuple[Tensor, Tensor] | None:
    """part [T, h] of this rank, residual [T, H], weight [H] -> `rms_norm.add_rms_norm` of all parts side by side.

    Returns None, with nothing done, where the rows are too many or too long.
    """
    key = (_push_add_rms_norm_kernel, operand_key(part), operand_key(residual), operand_key(weight), eps)
    out, total = (torch.empty(residual.shape, dtype=part.dtype, device=part.device) for _ in range(2))
    if replayer := peers.launches.get(key):
        replayer(part, residual, weight, out, total)
        return out, total
    (rows, columns), hidden = part.shape, residual.shape[1]
    assert residual.shape == (rows, peers.size * columns) and weight.shape == (hidden,)
    assert part.dtype == residual.dtype == weight.dtype
    plain = part.stride(1) == residual.stride(1) == weight.stride(0) == 1
    if not 0 < rows <= peers.programs or not 0 < hidden <= MAX_TERMS or not plain:
        return None
    part_block, block = triton.next_power_of_2(columns), triton.next_power_of_2(hidden)
    launched = launch(
        _push_add_rms_norm_kernel, (rows, 1, 1),
        (part, residual, weight, out, total, peers.memories, peers.counts, peers.slot, peers.flags,
         part.stride(0), residual.stride(0), eps),
        (columns, part_block, block, peers.rank, peers.size), _warps(block), 1,
    )  # fmt: skip
    if launched:
        cache_launch(peers.launches, key, launched.replayer(0, 1, 2, 3, 4))
    return out, total
