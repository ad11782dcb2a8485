"""The kernel resolves references to the last step's tokens as torch's ops do."""

from __future__ import annotations

import pytest
import torch

from evalengine.engine.execute.read_out import LastTokens
from evalengine.kernels.last_tokens import resolve
from tests.bitwise import assert_bitwise_equal
from tests.kernels.softmax_contract import DEVICE


@pytest.mark.parametrize("count", [0, 1, 7, 256, 257])
def test_the_kernel_gives_what_torchs_ops_give(count: int) -> None:
    last = LastTokens(300, 1000, torch.device("cpu"))
    last.put(torch.arange(300))
    last.tokens[33] = 1000  # the id that a row with NaN logits gets
    ids = torch.arange(count) * 37 % 1000
    ids[::3] = -1 - torch.arange(count)[::3] % 300
    resolved = resolve(ids.to(DEVICE), last.tokens.to(DEVICE), 999)
    assert_bitwise_equal(resolved, last.resolve(ids))
    assert count < 256 or resolved[33] == 999
