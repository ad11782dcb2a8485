"""Copying slots moves exactly the named slots' bytes, in all layers."""

from __future__ import annotations

import pytest
import torch

from evalengine.kernels.copy_slots import copy_slots
from tests.bitwise import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4, 1), (2, 5, 3, 7), (3, 7, 4096), (1, 4, 8193), (2, 6, 0)])
@pytest.mark.parametrize("copies", [[], [(0, 2)], [(0, 1), (0, 3), (2, 2)]])
def test_bytes_of_named_slots(shape: tuple[int, ...], copies: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """NaN and -0 included; every other slot stays as it is."""
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    pool.view(-1)[::3] = float("nan")
    pool.view(-1)[1::3] *= -0.0
    expected = pool.clone()
    for source, destination in copies:
        expected[:, destination] = pool[:, source]
    copy_slots(pool, torch.tensor(copies, dtype=torch.int64, device=DEVICE).view(-1, 2))
    assert_bitwise_equal(pool, expected)
