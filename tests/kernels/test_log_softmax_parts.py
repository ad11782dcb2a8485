"""Rows whose columns lie on several devices: the sum of the devices' parts has the bytes of `read_out`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evalengine.kernels import log_softmax_parts as parts
from evalengine.kernels.log_softmax import read_out
from evalengine.kernels.softmax_parts import CHUNK
from evalengine.layers.parallel import vocabulary_ranges
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels.softmax_contract import DEVICE, randn

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy warns on rows of NaN


def merged(
    logits: Tensor, rows: Tensor | None, columns: Tensor, size: int, block: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Splits the columns over `size` devices and returns the sums of their (greedy ids, logprobs)."""
    vocabulary = logits.shape[1]
    ranges = vocabulary_ranges(vocabulary, size, block)
    own = [logits[:, part.start : part.stop] for part in ranges]
    statistics = torch.cat([parts.statistics(part_logits) for part_logits in own], dim=2)
    results = [
        parts.read_out_part(part_logits, statistics, part.start, vocabulary, rows, columns)
        for part_logits, part in zip(own, ranges, strict=True)
    ]
    return sum(greedy for greedy, _ in results), sum(logprobs for _, logprobs in results)  # type: ignore[return-value]


# Every width is split over three devices, and one width over each number of them; the other pairs repeat that.
PAIRS = [
    pytest.param(columns, size, marks=() if size == 3 or columns == 4097 else pytest.mark.slow)
    for columns in (1, 65, 4096, 4097, 9001, 13_000)
    for size in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("columns", "size"), PAIRS)
def test_the_parts_add_up_to_read_out(columns: int, size: int) -> None:
    x = randn(5, columns) * 4
    x[1] = 0.5
    x[2] = -torch.inf
    x[3, columns // 2] = torch.nan
    rows = torch.arange(11, device=DEVICE) % 5
    wanted = (torch.arange(11, device=DEVICE) * 997) % (columns + 1) - 1  # column -1 means the row's greedy token
    for of_rows, of_columns in ((rows, wanted), (None, wanted[:5])):
        greedy, logprobs = merged(x, of_rows, of_columns, size)
        expected_greedy, expected = read_out(x, of_rows, of_columns)
        assert_bitwise_equal(greedy, expected_greedy)
        assert torch.equal(logprobs.isnan(), expected.isnan()), "a NaN has no sign that anybody reads"
        assert_bitwise_equal(logprobs.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_ties_across_devices_go_to_the_lowest_id() -> None:
    x = randn(3, 3 * CHUNK).clamp(max=3.0)
    x[0, [CHUNK - 1, CHUNK, 2 * CHUNK + 7]] = 5.0
    x[1, [2 * CHUNK, 3 * CHUNK - 1]] = 5.0
    x[2, 2 * CHUNK + 9] = 5.0
    x[2, CHUNK + 3] = 5.0 - 2.0**-22  # a lower logit with the same logprob, as the row's log l is above 2
    greedy = torch.full((3,), -1, device=DEVICE)
    for size in (2, 3):
        assert_bitwise_equal(merged(x, None, greedy, size)[0], read_out(x, None, greedy)[0])


def test_borders_inside_a_chunk_would_give_other_bits() -> None:
    """Devices must split columns between chunks: a split inside a chunk gives other bytes."""
    x = randn(32, 9001) * 8
    all_rows, greedy = torch.arange(32, device=DEVICE), torch.full((32,), -1, device=DEVICE)
    assert count_differing(merged(x, all_rows, greedy, 2, block=1000)[1], read_out(x, all_rows, greedy)[1]) > 0


def test_no_rows_and_nothing_wanted() -> None:
    """Without rows everything is empty; without requested columns the greedy ids are still there."""
    x, none = randn(2, 5000), torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert merged(x[:0], None, none, 2)[0].shape == (0,)
    greedy, logprobs = merged(x, none, none, 2)
    assert greedy.tolist() == x.argmax(1).tolist() and logprobs.shape == (0,)
