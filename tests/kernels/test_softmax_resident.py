"""Softmax of rows kept on the chip: the compiled kernel's limits, and launches whose programs wait for one another.

test_softmax and test_log_softmax compare the kernel's bytes with the other schedules'.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import evalengine.kernels
from evalengine.kernels import softmax, softmax_resident
from evalengine.kernels.log_softmax import log_softmax
from evalengine.kernels.softmax import SoftmaxSchedule
from evalengine.kernels.softmax_parts import CHUNK
from tests.bitwise import assert_bitwise_equal
from tests.kernels import softmax_contract as contract
from tests.kernels.compile_gluon import compiled_elsewhere

WALK, RESIDENT = SoftmaxSchedule(), SoftmaxSchedule(resident=True)


def test_the_kernel_compiles_into_what_an_sm_holds() -> None:
    """Shared memory suffices on Hopper and Ampere; unaligned rows are copied number by number, or without cp.async."""
    for case in compiled_elsewhere("resident"):
        limit = softmax_resident.most_shared_bytes(4 if case["dtype"] == "fp32" else 2)
        assert case["shared_bytes"] + 1024 <= limit, case  # the driver takes 1 kB of each block's shared memory
        size = {("fp32", True): 16, ("bf16", True): 8, ("fp32", False): 4, ("bf16", False): None}
        assert case["copy_bytes"] == size[case["dtype"], case["aligned"]], case


H200 = {"multi_processor_count": 132, "shared_memory_per_multiprocessor": 233_472}
L4 = {"multi_processor_count": 58, "shared_memory_per_multiprocessor": 102_400}
SLICE = {"multi_processor_count": 6, "shared_memory_per_multiprocessor": 233_472}  # MIG: 36 programs for 38 chunks


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Returns a function that makes the tensors' device look like another GPU."""
    monkeypatch.setattr(softmax, "GLUON", True)
    softmax_resident._programs.cache_clear()

    def pretend_to_be(properties: dict[str, int], capability: tuple[int, int]) -> None:
        gpu = SimpleNamespace(max_threads_per_multi_processor=1536, **properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    yield pretend_to_be
    softmax_resident._programs.cache_clear()


@pytest.mark.parametrize(
    ("gpu", "capability", "stays"),
    [(H200, (9, 0), True), (L4, (8, 9), True), (H200, (7, 5), False), (SLICE, (9, 0), False)],
)
def test_where_rows_stay(
    pretend: Callable[..., None], gpu: dict[str, int], capability: tuple[int, int], stays: bool
) -> None:
    """Few long rows stay on the chip of a GPU that can hold one; many short rows never do."""
    pretend(gpu, capability)
    assert softmax.choose(torch.empty(1, 151936)).resident is stays
    assert not softmax.choose(torch.empty(300, 4097)).resident


def test_without_gluon_rows_are_walked(pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(H200, (9, 0))
    monkeypatch.delattr(evalengine.kernels, "softmax_resident")
    monkeypatch.setitem(sys.modules, "evalengine.kernels.softmax_resident", None)  # makes the import fail
    assert not softmax.choose(torch.empty(1, 151936)).resident
    monkeypatch.undo()
    pretend(H200, (9, 0))
    monkeypatch.setattr(softmax, "GLUON", True)
    assert softmax.choose(torch.empty(1, 151936)).resident
    monkeypatch.setattr(softmax, "GLUON", False)  # Triton 3.5 imports Gluon's code, but cannot compile it
    assert not softmax.choose(torch.empty(1, 151936)).resident


@pytest.mark.gpu
def test_on_several_streams_and_in_a_graph() -> None:
    """Concurrent launches, each of which needs all its programs running at once, end with the right bytes."""
    x = torch.randn(400, 151936, device="cuda") * 4
    expected = log_softmax(x, _schedule=WALK)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(log_softmax(x, _schedule=RESIDENT))
    torch.cuda.synchronize()
    for result in results:
        assert_bitwise_equal(result, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = log_softmax(x, _schedule=RESIDENT)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert_bitwise_equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [2, 3, 31, 32, 33, 64, 65, 255, softmax_resident.MAX_CHUNKS])
def test_any_number_of_chunks(chunks: int) -> None:
    """Rows of any number of chunks up to the most, full or not, have the contract's bytes."""
    for columns in (chunks * CHUNK - CHUNK + 1, chunks * CHUNK):
        x = torch.randn(37, columns, device="cuda") * 4
        x[1, : columns // 2] = -torch.inf
        x[2, CHUNK:] = -torch.inf
        assert_bitwise_equal(log_softmax(x, _schedule=RESIDENT), contract.log_softmax(x))


@pytest.mark.gpu
def test_rows_too_long_to_stay_are_walked() -> None:
    x = torch.randn(3, (softmax_resident.MAX_CHUNKS + 1) * CHUNK, device="cuda")
    assert not softmax_resident.covers(x) and softmax_resident.covers(x[:, :CHUNK])
    assert_bitwise_equal(log_softmax(x), contract.log_softmax(x))
