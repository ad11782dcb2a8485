"""The pushing gathers: each fills every rank's memory, with the bytes of the op and a gather one after the other.

In Triton's interpreter every rank is a process of its own, in turn or at once, and the slots lie in shared memory. On a
GPU one process plays all ranks, so none may wait: flags of the others are set before (two GPUs: tests/engine).
"""

from __future__ import annotations

import itertools
import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels import push_gather as module
from evalengine.kernels.activation import silu_and_mul
from evalengine.kernels.push_gather import (
    MAX_PROGRAMS,
    Peers,
    as_words,
    push_add_rms_norm,
    push_gather,
    silu_and_mul_push,
)
from evalengine.kernels.rms_norm import add_rms_norm
from tests.bitwise import assert_bitwise_equal
from tests.kernels.softmax_contract import CUDA, DEVICE, randn

SLOT_BYTES = 1 << 16
FLAG_BYTES = MAX_PROGRAMS * 8
EPS = 1e-6
LATER = 1 << 40  # a turn that never comes


class Ranks:
    """The memory of all ranks: two slots each, filled with sevens, and flags."""

    def __init__(self, size: int, programs: int = MAX_PROGRAMS) -> None:
        self.size, self.programs = size, programs
        self.memory = torch.full((size, 2 * SLOT_BYTES + FLAG_BYTES * size), 7, dtype=torch.uint8, device=DEVICE)
        self.counts = torch.zeros(size, 1 + MAX_PROGRAMS, dtype=torch.int64, device=DEVICE)
        if not CUDA:
            self.memory, self.counts = self.memory.share_memory_(), self.counts.share_memory_()
        self.flags = self.memory[:, 2 * SLOT_BYTES :].view(torch.int64).view(size, MAX_PROGRAMS, size)
        self.flags.zero_()
        self._peers: dict[tuple[int, int], Peers] = {}

    def peers(self, rank: int, turn: int) -> Peers:
        slot = turn % 2 * SLOT_BYTES
        if (rank, slot) not in self._peers:  # They remember launches, which later turns repeat.
            addresses = torch.tensor([own.data_ptr() for own in self.memory], device=DEVICE)
            where = addresses, slot, 2 * SLOT_BYTES, self.counts[rank], self.programs
            self._peers[rank, slot] = Peers(rank, self.size, *where, {})
        return self._peers[rank, slot]

    def slot(self, rank: int, turn: int, wanted: Tensor) -> Tensor:
        """The beginning of a rank's slot, as a tensor like `wanted`."""
        begin = turn % 2 * SLOT_BYTES
        return self.memory[rank, begin : begin + wanted.nbytes].view(wanted.dtype).view(wanted.shape)

    def check_nothing_beyond(self, turn: int, used: int) -> None:
        begin = turn % 2 * SLOT_BYTES
        assert (self.memory[:, begin + used : begin + SLOT_BYTES] == 7).all(), "written past the rows"

    def do_not_wait(self, rank: int) -> None:
        """Sets this rank's flags of the others."""
        for other in range(self.size):
            if other != rank:
                self.flags[rank, :, other] = LATER


def wide(part: Tensor) -> Tensor:
    """The same numbers as a view of a wider tensor."""
    return torch.cat([part, part[:, :3]], dim=1)[:, : part.shape[1]]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("programs", [MAX_PROGRAMS, 1], ids=["a flag each", "one flag"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (1, 129), (5, 64), (17, 131)])
def test_every_slot_has_all_columns_side_by_side(rows: int, columns: int, programs: int, size: int) -> None:
    """After every turn each rank's memory holds all ranks' columns in order, and nothing is written past them."""
    ranks = Ranks(size, programs)
    sources = [wide(torch.arange(rows * columns, device=DEVICE).view(rows, -1) * (rank + 1)) for rank in range(size)]
    for turn in (1, 2, 3):
        for rank, source in enumerate(sources):
            ranks.do_not_wait(rank)
            push_gather(source + turn, ranks.peers(rank, turn))
        wanted = torch.cat([source + turn for source in sources], dim=1)
        for rank in range(size):
            assert_bitwise_equal(ranks.slot(rank, turn, wanted), wanted)
        ranks.check_nothing_beyond(turn, wanted.nbytes)
        used = max(1, int((ranks.counts[0, 1:] > 0).sum()))
        assert ranks.counts.tolist() == [[0, *[turn] * used, *[0] * (MAX_PROGRAMS - used)]] * size
    assert used == min(programs, -(-rows * columns // 128))
    assert (ranks.flags[:, used:].diagonal(dim1=0, dim2=2) == 0).all(), "a rank needs no flag of its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_rows_become_words_wherever_they_lie(rows: int, dtype: torch.dtype) -> None:
    """Rows of whole words in tensors with an odd stride or start: views of 8 columns among 8 to 15."""
    for width, first in itertools.product(range(8, 16), range(4)):
        whole = randn(rows, width + 4).to(dtype)
        part = whole.flatten()[first:].as_strided((rows, 8), (width, 1)) if rows else whole[:, :8]
        words = as_words(part)
        assert words.dtype == torch.int64 and words.shape[0] == rows and words.data_ptr() % 8 == 0
        assert_bitwise_equal(words.contiguous().view(dtype).view(rows, 8), part)
        aligned = dtype == torch.int64 or (
            first * dtype.itemsize % 8 == 0 and (rows < 2 or width * dtype.itemsize % 8 == 0)
        )
        assert not rows or (words.data_ptr() == part.data_ptr()) == aligned, "copied without need, or not copied"


def test_flags_that_end_all_waits_are_not_set_back() -> None:
    """Of three ranks one is lost and one is ended: what the third still pushes leaves the ended one's flags alone."""
    ranks = Ranks(3)
    ranks.flags[0] = LATER
    ranks.do_not_wait(1)
    push_gather(torch.arange(6, device=DEVICE).view(2, 3), ranks.peers(1, 1))
    assert (ranks.flags[0] == LATER).all() and ranks.flags[2, 0, 1] == 1


DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (3, 7), (2, 513), (5, 131), (1, 2048)]


def gate_ups(size: int, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [wide(randn(rows, 2 * columns, dtype=dtype, seed=seed + rank)) for rank in range(size)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_silu_and_mul_push_is_the_op_and_a_gather(rows: int, columns: int, size: int, dtype: torch.dtype) -> None:
    ranks = Ranks(size)
    for turn in (1, 2, 3):
        parts = gate_ups(size, rows, columns, dtype, seed=10 * turn)
        wanted = torch.cat([silu_and_mul(part) for part in parts], dim=1)
        for rank, part in enumerate(parts):
            ranks.do_not_wait(rank)
            assert silu_and_mul_push(part, ranks.peers(rank, turn))
        for rank in range(size):
            assert_bitwise_equal(ranks.slot(rank, turn, wanted), wanted)
        ranks.check_nothing_beyond(turn, wanted.nbytes)
        assert set(ranks.counts[:, 1:].flatten().tolist()) == {0, turn}


def operands(
    size: int, rows: int, columns: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Every rank's part, the residual, the weight."""
    parts = [wide(randn(rows, columns, dtype=dtype, seed=seed + rank)) for rank in range(size)]
    residual = wide(randn(rows, size * columns, dtype=dtype, seed=seed + 8))
    return parts, residual, randn(size * columns, dtype=dtype, seed=seed + 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_push_add_rms_norm_is_a_gather_and_the_op(rows: int, columns: int, size: int, dtype: torch.dtype) -> None:
    ranks = Ranks(size)
    for turn in (1, 2, 3):
        parts, residual, weight = operands(size, rows, columns, dtype, seed=10 * turn)
        gathered = torch.cat(parts, dim=1)
        wanted = add_rms_norm(gathered, residual, weight, EPS)
        for again in (False, True):  # Nobody waits here: all have pushed when each is called again.
            for rank, part in enumerate(parts):
                ranks.do_not_wait(rank)
                result = push_add_rms_norm(part, residual, weight, EPS, ranks.peers(rank, turn))
                assert result is not None
                if again:
                    assert_bitwise_equal(ranks.slot(rank, turn, gathered), gathered)
                    for actual, expected in zip(result, wanted, strict=True):
                        assert_bitwise_equal(actual, expected)
        ranks.check_nothing_beyond(turn, gathered.nbytes)
        assert ranks.counts.tolist() == [[0, *[2 * turn] * rows, *[0] * (MAX_PROGRAMS - rows)]] * size


def test_many_rows_are_left_to_the_ops() -> None:
    """Programs that could not all be on the GPU may not wait for each other: the fused forms do nothing."""
    ranks = Ranks(2, programs=4)
    (part, _), residual, weight = operands(2, 5, 8, torch.float32)
    assert push_add_rms_norm(part, residual, weight, EPS, ranks.peers(0, 0)) is None
    assert not silu_and_mul_push(gate_ups(1, 5, 8, torch.float32)[0], ranks.peers(0, 0))
    too_wide = randn(1, 2 * 5 * module._MOST)
    assert not silu_and_mul_push(too_wide, ranks.peers(0, 0))
    assert (ranks.memory[:, : 2 * SLOT_BYTES] == 7).all() and not ranks.counts.any() and not ranks.flags.any()


def a_layer(rank: int, ranks: Ranks, layer: int, seed: int) -> None:
    """A rank's four gathers of a layer, the forms as in a model, compared with the ops on all ranks' operands."""
    size, rows = ranks.size, 1 + (layer + seed) % 5
    sources = [torch.arange(rows * 300).view(rows, -1) * (seed + other) for other in range(size)]
    push_gather(sources[rank], ranks.peers(rank, 0)._replace(programs=1 if layer % 2 else MAX_PROGRAMS))
    assert_bitwise_equal(ranks.slot(rank, 0, wanted := torch.cat(sources, dim=1)), wanted)
    halves = gate_ups(size, rows, 600, torch.float32, seed)
    activated = torch.cat([silu_and_mul(half) for half in halves], dim=1)
    for turn in (1, 3):
        parts, residual, weight = operands(size, rows, 70 + turn, torch.float32, seed + turn)
        result = push_add_rms_norm(parts[rank], residual, weight, EPS, ranks.peers(rank, turn))
        assert result is not None
        for actual, expected in zip(result, add_rms_norm(torch.cat(parts, 1), residual, weight, EPS), strict=True):
            assert_bitwise_equal(actual, expected)
        if turn == 1:
            assert silu_and_mul_push(halves[rank], ranks.peers(rank, 2))
            assert_bitwise_equal(ranks.slot(rank, 2, activated), activated)


def _play(rank: int, ranks: Ranks, layers: int, done: Any) -> None:
    for layer in range(layers):
        a_layer(rank, ranks, layer, seed=100 * layer)
    done.put(rank)


@pytest.mark.skipif(CUDA, reason="on GPUs, tests/engine/test_tensor_parallel_cuda.py has a process for each rank")
def test_ranks_at_once_wait_for_each_other() -> None:
    """Two processes that push at once, each as fast as it can, see each other's columns in every one of 60 gathers."""
    context = multiprocessing.get_context("fork")
    ranks, done = Ranks(2), context.Queue()
    processes = [context.Process(target=_play, args=(rank, ranks, 15, done)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert sorted(done.get() for _ in processes) == [0, 1]
