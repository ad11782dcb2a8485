"""All-gather by pushing: every rank writes its columns into every rank's memory, sets flags, and waits for the others.

    T rows, n columns of one rank, W = ranks x n.

The plain kernel moves bytes and does no arithmetic. It is one launch, which a CUDA graph may capture. Compared with
NCCL it saves the start-up of a collective, and the copy that puts the ranks' parts side by side: they are written there
in the first place.

**Fused.** For few tokens there are kernels that compute before they push or after they have waited: SiLU and up, then
gather; gather, then norm. Their letters: T tokens, i columns of the intermediate size that one rank has, h of the
hidden size; I and H those of all ranks. At few tokens a launch, its flags and the way of its operands through memory
cost more than the bytes that it moves (results/reference/PROFILE.md). The arithmetic is that of
`activation.times_activation` and of `rms_norm`, rounded where they round, so the bytes are those of the op and
`push_gather` one after the other.

**Turns.** Each rank has two slots, used by turns. A launch of turn k ends on a rank only after every rank's launch of
turn k has started, since it waits for flags that they set; and a launch begins when all that is before it on its stream
is done (`device_math.after_previous_kernel`). So when a rank pushes in turn k + 2, every rank is done with what it
launched before turn k + 1. Whatever reads turn k's slot must therefore be launched before turn k + 1; a launch of turn
k + 1 itself may not read it.

**Waiting.** Where there are few programs, each sets its own flag on every rank as soon as it has pushed, and then
waits for the programs of the same number on the other ranks. No program waits before it has pushed; so all waits end if
all programs of a launch get onto the GPU. They do: they are no more than its SMs (`Peers.programs`), and nothing that
stays on the SMs waits for them (the kernels before a launch end by themselves, those after it come only when all of its
programs have started). Where there are many programs, only the last one to finish sets a flag, and waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.activation import times_activation
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key
from evalengine.kernels.limits import MAX_TERMS
from evalengine.kernels.rms_norm import add, normalize

_LEAST, _MOST = 512, 8192  # elements of a program that computes and pushes

WORD = 8  # bytes: data of every type is moved as int64
MAX_PROGRAMS = 128  # programs of a launch that have a flag each
ALIGNMENT = 16  # bytes, of every slot
_BLOCK = 1024  # words that one program copies
_FEW = 128  # words that one program copies where there are few words in all, so that more programs push at once


class Peers(NamedTuple):
    """The ranks' memory as one turn uses it. All ranks call with the same shapes, and in the same order."""

    rank: int
    size: int
    memories: Tensor  # int64 [size]: the addresses of every rank's memory, in this process
    slot: int  # where in a rank's memory the slot of this turn begins, in bytes; aligned to ALIGNMENT
    flags: int  # where its flags begin, in bytes: int64 [MAX_PROGRAMS, size], zeros at first
    counts: Tensor  # int64 [1 + MAX_PROGRAMS], this rank's own: programs that are done, and turns of each flag; zeros
    programs: int  # the most programs that may wait at once: at most MAX_PROGRAMS and the SMs of every rank's GPU
    launches: dict[tuple, Replay]  # launches to be repeated


@triton.jit
def slot_of(memories_ptr, slot, rank, dtype: tl.constexpr):
    """-> pointer to `dtype`: where a rank's slot begins, `slot` bytes into its memory."""
    address = tl.load(memories_ptr + rank) + slot
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def meet(memories_ptr, flags, counts_ptr, turn, flag, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Tells every rank that this program has pushed, and waits until the same flag of every other rank says so.

    turn: one more than counts_ptr[1 + flag], loaded before. A rank's flag on another counts its turns. It is set by one
    thread, after a barrier; releasing and acquiring at the system's scope then order the pushes of all threads before
    the flag, and what they load afterwards behind it. Such loads must go by the L2 cache (".cg"), into which the other
    GPUs' writes come: the L1 cache is not coherent with it.

    A rank whose model was ended has flags that end every wait (`PeerMemory.abort`). A third rank that still pushes must
    not set them back, so it raises them only; of two ranks, the other one is the one that is gone.
    """
    tl.debug_barrier()
    tl.store(counts_ptr + 1 + flag, turn)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            theirs = (tl.load(memories_ptr + rank) + flags).to(tl.pointer_type(tl.int64))
            if SIZE > 2:
                tl.atomic_max(theirs + flag * SIZE + RANK, turn, sem="release", scope="sys")
            else:
                tl.atomic_xchg(theirs + flag * SIZE + RANK, turn, sem="release", scope="sys")
    own = (tl.load(memories_ptr + RANK) + flags).to(tl.pointer_type(tl.int64)) + flag * SIZE
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            seen = tl.atomic_add(own + rank, 0, sem="acquire", scope="sys")
            while seen < turn:
                seen = tl.atomic_add(own + rank, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def _push_kernel(
    source_ptr, memories_ptr, counts_ptr, slot, flags, words, row_words, stride, width,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Program p pushes BLOCK words. With FEW it then waits for every rank's program p, else the last one to finish
    waits for every rank's last one, which count their turns by the first flag."""
    device_math.after_previous_kernel()
    program = tl.program_id(0)
    flag = program if FEW else 0
    turn = tl.load(counts_ptr + 1 + flag) + 1
    place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < words
    row = place // row_words
    column = place % row_words
    value = tl.load(source_ptr + row * stride + column, mask)
    target = row * width + RANK * row_words + column
    for rank in tl.static_range(SIZE):
        tl.store(slot_of(memories_ptr, slot, rank, tl.int64) + target, value, mask)
    if FEW:  # noqa: SIM114  # an `or` could count arrivals in this case, too, in which there are none
        meet(memories_ptr, flags, counts_ptr, turn, flag, RANK, SIZE)
    elif device_math.is_last_to_arrive(counts_ptr, tl.num_programs(0), "sys"):
        meet(memories_ptr, flags, counts_ptr, turn, flag, RANK, SIZE)


def as_words(x: Tensor) -> Tensor:
    """View x [T, n], whose rows are whole words, as int64 [T, n words]; copy it if its rows are not aligned to words.

    One row may have any stride, and counts as contiguous wherever it starts, so `contiguous` would not copy it.
    """
    stride = x.stride(0) if len(x) > 1 else x.shape[1]
    if x.stride(1) != 1 or x.data_ptr() % WORD or stride * x.element_size() % WORD:
        x, stride = x.clone(memory_format=torch.contiguous_format), x.shape[1]
    return x.as_strided(x.shape, (stride, 1)).view(torch.int64)


def push_gather(source: Tensor, peers: Peers) -> None:
    """source: int64 [T, n words], any row stride, of this rank -> [T, size x n words] in every rank's slot."""
    key = (_push_kernel, operand_key(source))
    if replayer := peers.launches.get(key):
        replayer(source)
        return
    rows, columns = source.shape
    words = rows * columns
    block = max(_FEW, triton.next_power_of_2(triton.cdiv(words, peers.programs)))
    few = block <= _BLOCK
    block = min(block, _BLOCK)
    launched = launch(
        _push_kernel, (triton.cdiv(words, block), 1, 1),
        (source, peers.memories, peers.counts, peers.slot, peers.flags,
         words, columns, source.stride(0), peers.size * columns),
        (peers.rank, peers.size, block, few), 4, 1,
    )  # fmt: skip
    if launched:
        cache_launch(peers.launches, key, launched.replayer(0))


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
