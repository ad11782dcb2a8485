"""Rows kept on the chip: what the compiled kernel must hold to, and launches whose programs wait for one another.

test_softmax and test_log_softmax compare its bytes with the other schedules'.
"""

from __future__ import annotations

import pytest
import torch

from evalengine.kernels import softmax_resident
from evalengine.kernels.log_softmax import log_softmax
from evalengine.kernels.softmax import CHUNK, Schedule
from tests.bitwise import assert_bitwise_equal
from tests.kernels import softmax_contract as contract
from tests.kernels.compile_gluon import compiled_elsewhere

WALK, RESIDENT = Schedule(), Schedule(resident=True)


def test_it_compiles_into_what_an_sm_holds() -> None:
    """Also for Ampere; of half precision, too; and where nothing is aligned, copies of a number each or none."""
    for case in compiled_elsewhere("resident"):
        limit = softmax_resident.most_shared_bytes(4 if case["dtype"] == "fp32" else 2)
        assert case["shared_bytes"] + 1024 <= limit, case  # the driver takes 1 kB
        size = {("fp32", True): 16, ("bf16", True): 8, ("fp32", False): 4, ("bf16", False): None}
        assert case["copy_bytes"] == size[case["dtype"], case["aligned"]], case


@pytest.mark.gpu
def test_on_several_streams_and_in_a_graph() -> None:
    """Each launch must have all of its programs running at once."""
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
