"""The pushing all-gather writes every rank's columns into every rank's memory; one process plays all ranks here."""

from __future__ import annotations

import pytest
import torch

from evalengine.kernels.push_gather import push_gather
from tests.bitwise import assert_bitwise_equal
from tests.kernels.softmax_contract import DEVICE


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (1, 129), (5, 64), (17, 131)])
def test_every_slot_has_all_columns_side_by_side(rows: int, columns: int, size: int) -> None:
    """After every turn each rank's memory holds all ranks' columns in order, and nothing is written past them."""
    sources = [torch.arange(rows * (columns + 3)).view(rows, -1)[:, :columns].to(DEVICE) * (r + 1) for r in range(size)]
    slots = torch.full((size, rows * size * columns + 5), -7, device=DEVICE)
    flags = torch.zeros(size, size, dtype=torch.int32, device=DEVICE)
    states = torch.zeros(size, 2, dtype=torch.int32, device=DEVICE)
    addresses, tables = (
        torch.tensor([own.data_ptr() for own in each], dtype=torch.int64, device=DEVICE) for each in (slots, flags)
    )
    for turn in (1, 2, 3):
        for rank, source in enumerate(sources):
            flags[rank, rank + 1 :] = 1 << 20  # later ranks run later here, so none may wait for them
            push_gather(source + turn, addresses, tables, flags[rank], states[rank], rank, size)
        wanted = torch.cat([source + turn for source in sources], dim=1)
        for slot in slots:
            assert_bitwise_equal(slot[: rows * size * columns].view(rows, -1), wanted)
            assert (slot[rows * size * columns :] == -7).all(), "written past the rows"
        assert states.tolist() == [[0, turn]] * size
    assert flags.diagonal().tolist() == [3] * size
