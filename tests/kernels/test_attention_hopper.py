"""The Hopper prefill form: what its compiled code must hold to, and its bytes while other processes use the GPU."""

from __future__ import annotations

import pytest
import torch

from evalengine.certify.busy import busy_neighbour
from tests.kernels.compile_gluon import compiled_elsewhere
from tests.kernels.paged_batch import PagedBatch

SHARED_BYTES = 227 << 10  # of an SM


def test_no_barrier_is_initialised_that_nobody_uses() -> None:
    """The compiler gives an unused barrier's memory to others, and a switch between processes writes the barrier back
    over what they put there: NaN, once in some thousand launches. Four rings of barriers, and two for q by TMA."""
    cases = compiled_elsewhere("prefill")
    found = {(case["group"], case["head_dim"]): case["initialised"] for case in cases}
    assert found == {(3, 64): 16, (1, 64): 18, (4, 128): 14, (7, 128): 12}
    assert all(case["shared_bytes"] <= SHARED_BYTES for case in cases)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128)])
def test_bytes_beside_a_busy_process(heads: int, kv_heads: int, head_dim: int) -> None:
    """Of the launches that went wrong, 1 in 4,000 or so did: 20,000 of them."""
    lens = [(1, 900 + i) for i in range(40)] + [(403, 1145), (1075, 1077), (837, 840), (1058, 1061)]
    batch = PagedBatch.random(lens, heads, kv_heads, head_dim, 64, torch.bfloat16)
    expected = batch.run().view(torch.int16)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    with busy_neighbour("cuda"):
        for _ in range(20_000):
            differing += (batch.run().view(torch.int16) != expected).any()
    assert differing.item() == 0
