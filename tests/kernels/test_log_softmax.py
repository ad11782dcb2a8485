"""log_softmax and read_out are the contract's arithmetic, close to float64, under any batch and any schedule."""

from __future__ import annotations

import pytest
import torch

from evalengine.kernels.log_softmax import log_softmax, read_out
from evalengine.kernels.softmax import SoftmaxSchedule
from evalengine.kernels.softmax_parts import CHUNK
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels import softmax_contract as contract
from tests.kernels.softmax_contract import DEVICE, DTYPES, SCHEDULES, UNIT, randn
from tests.references import reference

VOCABULARIES = [1, 7, 65, 577, 4095, 4096, 4097, 9001]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy warns on rows of NaN


def test_other_chunks_give_other_bits() -> None:
    """CHUNK is arithmetic: another chunk, or columns moved to other chunks, gives other bytes."""
    x = randn(32, 9001) * 8  # l is 1 to 2, where log(l) changes with l's last bits
    assert count_differing(contract.log_softmax(x, 1000), log_softmax(x)) > 0
    moved = torch.cat((x[:, CHUNK:], x[:, :CHUNK]), 1)  # the same numbers in other chunks
    back = log_softmax(moved)
    assert count_differing(torch.cat((back[:, -CHUNK:], back[:, :-CHUNK]), 1), log_softmax(x)) > 0


@pytest.mark.parametrize("columns", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.1, 30.0])
def test_against_float64(dtype: torch.dtype, columns: int, scale: float) -> None:
    """log_softmax is within its roundings of float64."""
    x = (randn(3, columns) * scale).to(dtype)
    truth = reference.log_softmax(x)
    error = (log_softmax(x) - truth).abs()
    # z - M, log(l) and their difference are each rounded; log(l) < 13
    assert (error <= (1.01 * UNIT[dtype] + 2.0**-23) * truth.abs() + 13 * 2.0**-23).all()


def test_a_chunk_of_minus_infinity_changes_nothing() -> None:
    x = randn(3, CHUNK) * 4
    hidden = torch.full_like(x, -torch.inf)
    for parts in [(x, hidden), (hidden, x), (hidden, x, hidden)]:
        place = next(i for i, part in enumerate(parts) if part is x) * CHUNK
        for schedule in SCHEDULES:
            out = log_softmax(torch.cat(parts, 1), _schedule=schedule)
            assert_bitwise_equal(out[:, place : place + CHUNK], log_softmax(x))


def test_misaligned_rows() -> None:
    """Rows that start or end off an alignment have the bytes of a contiguous copy."""
    x = randn(4, 4102, dtype=torch.float16)
    for view in (x[:, 1:], x[:, 2:4099], x[1::2, 3:70]):
        assert_bitwise_equal(log_softmax(view), log_softmax(view.contiguous()))


@pytest.mark.parametrize("columns", [65, 5000])
def test_edges(columns: int) -> None:
    """Rows with NaN or +inf, or of -inf only, are NaN, and their greedy id is out of range; huge numbers are right."""
    x = randn(8, columns)
    x[0], x[1, 64], x[2, columns - 1], x[3, 0] = -torch.inf, torch.inf, torch.nan, -torch.nan
    x[4], x[5] = 1e38, -3e38
    x[6, 1:] = -torch.inf
    for schedule in SCHEDULES:
        out = log_softmax(x, _schedule=schedule)
        assert out[:4].isnan().all()
        assert (out[4:6] - reference.log_softmax(x[4:6])).abs().max() < 2e-6
        assert out[6, 0] == 0 and out[6, 1:].eq(-torch.inf).all()
        assert_bitwise_equal(out[7:], log_softmax(x[7:]))
    greedy, logprobs = read_out(x, torch.arange(8, device=DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE))
    assert greedy.tolist() == [columns] * 4 + [0, 0, 0, int(x[7].argmax())]
    assert torch.equal(logprobs.isnan(), out[:, 0].isnan())
    assert_bitwise_equal(logprobs[4:], out[4:, 0])


def test_empty_scalar_and_refused() -> None:
    """Empty tensors and scalars work; float64, and read_out of float16, are a ValueError."""
    assert log_softmax(torch.empty(0, 9, device=DEVICE)).shape == (0, 9)
    assert log_softmax(torch.empty(3, 0, device=DEVICE)).shape == (3, 0)
    assert log_softmax(torch.tensor(3.0, device=DEVICE)).item() == 0
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        log_softmax(torch.zeros(2, 2, dtype=torch.float64, device=DEVICE))
    with pytest.raises(ValueError, match="read_out takes"):
        read_out(torch.zeros(2, 2, dtype=torch.float16), torch.zeros(1).long(), torch.zeros(1).long())


@pytest.mark.parametrize("columns", [1, 65, 4096, 9001])
@pytest.mark.parametrize("count", [0, 1, 7, 130])
def test_read_out_gives_what_log_softmax_gives(columns: int, count: int) -> None:
    x = randn(3, columns) * 4
    table = log_softmax(x)
    rows = torch.arange(count, device=DEVICE) % 3
    wanted = (torch.arange(count, device=DEVICE) * 997) % columns
    greedy, logprobs = read_out(x, rows, wanted)
    assert greedy.tolist() == x.argmax(1).tolist()
    assert_bitwise_equal(logprobs, table[rows, wanted])


@pytest.mark.parametrize("columns", [1, 2, 7, 65, 4095, 4096, 4097, 9001])
def test_read_out_of_one_column_a_row(columns: int) -> None:
    """Without row numbers read_out takes one column per row, and refuses another number of columns."""
    x = randn(5, columns) * 4
    x[1] = 0.5
    x[2] = -torch.inf
    wanted = torch.tensor([-1, columns - 1, 0, columns + 5, columns // 2], device=DEVICE)
    all_rows = torch.arange(5, device=DEVICE)
    for actual, expected in zip(read_out(x, None, wanted), read_out(x, all_rows, wanted), strict=True):
        assert_bitwise_equal(actual, expected)
    with pytest.raises(ValueError, match="one column for each of 5 rows"):
        read_out(x, None, wanted[:3])


@pytest.mark.parametrize("columns", [4093, pytest.param(4096, marks=pytest.mark.slow)])  # without a rest to mask
def test_read_out_where_the_nearest_are_not_equal(columns: int) -> None:
    """A logit just below the maximum may round to the same logprob, and then the lower id is the greedy one."""
    step = 2.0**-25  # the spacing of float32 below 0.5; log l is 1 to 8 here, and half its ulp is 2 to 8 steps
    numbers = (*range(4), *range(32, 48))  # With these a row's first is at each of the three places below.
    x = torch.full((len(numbers), columns), -30.0, device=DEVICE)
    for row, number in enumerate(numbers):
        x[row, 200 : 203 + 50 * number] = 0.0
        x[row, 4092 - number] = 0.5
        x[row, 5 + number] = 0.5 - step * (1 + number % 12)
        x[row, 90 + number] = 0.5 - step * (number % 9)
    table = log_softmax(x)
    first = (table == table.amax(1, keepdim=True)).float().argmax(1)
    assert min((first < 90).sum(), ((first >= 90) & (first < 200)).sum(), (first > 200).sum()) >= 2
    assert read_out(x, None, first)[0].tolist() == first.tolist()


def test_read_out_takes_the_lowest_of_equals_and_clamps_columns() -> None:
    x = randn(4, 9001).clamp(max=3.0)
    x[0, [8500, 4200, 4100]] = 5.0
    x[1, [8191, 4096, 4095]] = 5.0
    x[2] = 0.0
    x[2, :50] = -0.0  # equal to +0
    x[3, [17, 16]] = 5.0
    rows = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    greedy, logprobs = read_out(x, rows, torch.tensor([9001, 1 << 40, -1], device=DEVICE))
    assert greedy.tolist() == [4100, 4095, 0, 16]
    table = log_softmax(x)
    assert_bitwise_equal(logprobs, table[0, [9000, 9000, 4100]])  # column -1 means the row's greedy token
    padded = torch.cat((x, torch.full_like(x, torch.nan)), 1)[:, :9001]  # rows have the stride of a padded vocabulary
    assert_bitwise_equal(read_out(padded, rows, rows)[1], table[0, [0, 0, 0]])
    assert read_out(x[:0], rows[:0], rows[:0])[0].shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32000, 128256, 151936, 50257, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 300])
def test_a_whole_vocabulary(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Real vocabularies: more rows than programs, fewer, and rows that asynchronous copies cannot take."""
    x = (torch.randn(rows, columns, device=DEVICE) * 4).to(dtype)
    expected = contract.log_softmax(x)
    for schedule in (None, SoftmaxSchedule(), SoftmaxSchedule(resident=True)):
        assert_bitwise_equal(log_softmax(x, _schedule=schedule), expected.to(dtype))
    assert_bitwise_equal(log_softmax(x, out_dtype=torch.float32), expected)
    row_ids, wanted = torch.randint(0, rows, (1000,), device=DEVICE), torch.randint(0, columns, (1000,), device=DEVICE)
    greedy, logprobs = read_out(x.float(), row_ids, wanted)
    assert_bitwise_equal(logprobs, expected[row_ids, wanted])
    assert torch.equal(x.gather(1, greedy[:, None])[:, 0], x.amax(1))


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31() -> None:
    """The last rows of a tensor of more than 2^31 elements have the bytes of a small tensor."""
    columns = 151936
    x = torch.zeros((1 << 31) // columns + 3, columns, dtype=torch.float32, device=DEVICE)
    x[-3:] = randn(3, columns)
    expected = log_softmax(x[-3:].clone())
    last = torch.full((1,), len(x) - 1, device=DEVICE)
    assert_bitwise_equal(read_out(x, last, last)[1], expected[-1, last])
    x = x.bfloat16()
    assert_bitwise_equal(log_softmax(x)[-3:], log_softmax(x[-3:].clone()))
