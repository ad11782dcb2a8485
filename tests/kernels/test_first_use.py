"""Batch-invariant mode compares a product's schedule with the reference before its first use, once per variant."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.invariant import cuda, set_batch_invariant_mode
from evalengine.kernels import matmul, matmul_schedules
from tests.bitwise import assert_bitwise_equal

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
N, K = 48, 40
RANDOM_LIKE = cuda._random_like


def integers(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns small integers, whose sums are exact: the interpreter's NumPy adds in an order that follows the tile."""
    return torch.randint(-2, 3, x.shape, generator=generator, device=x.device).to(x.dtype)


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(matmul_schedules, "excluded", set())
    for memory in ("_compared", "_unproved", "_known"):
        monkeypatch.setattr(cuda, memory, set())
    if not GPU:
        monkeypatch.setattr(cuda, "_random_like", integers)
    matmul._launches.clear()
    yield
    matmul._launches.clear()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> matmul.MatmulSchedule:
    """Makes every choice this one schedule."""
    schedule = matmul.MatmulSchedule("pointer", 16, 16, 64)
    monkeypatch.setattr(matmul_schedules, "_choose", lambda *key: schedule)
    return schedule


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, matmul.MatmulSchedule | None]]:
    """Records the (rows, schedule) of every product."""
    recorded: list[tuple[int, matmul.MatmulSchedule | None]] = []
    real = matmul.matmul

    def product(a: Tensor, *rest: Any, **more: Any) -> Tensor:
        recorded.append((len(a), more.get("schedule")))
        return real(a, *rest, **more)

    monkeypatch.setattr(matmul, "matmul", product)
    return recorded


def run(rows: int, bias: bool = False, zeros: bool = False, dtype: torch.dtype = torch.float16) -> Tensor:
    a, b = torch.ones(rows, K, dtype=dtype, device=DEVICE), torch.ones(K, N, dtype=dtype, device=DEVICE)
    product = partial(matmul.matmul, out_dtype=None, round_product=False)
    operands = (a * 0 if zeros else a, b, *([b[0]] if bias else []))
    return cuda.checked(product, *operands)


def test_each_way_is_compared_once(small: matmul.MatmulSchedule, products: list[tuple[int, Any]]) -> None:
    """Few rows, which mask the tile, many rows, and a bias are variants that are each compared at their first use."""
    assert small.masks_rows(8) and not small.masks_rows(15)
    for rows in (8, 8, 7, 15, 15, 8, 16):
        assert float(run(rows)[0, 0]) == K
    # 16 rows use the variant of 15 rows, and 7 rows that of 8
    first = [(8, matmul.REFERENCE), (8, small), (8, None), (8, None), (7, None)]
    assert products == [*first, (15, matmul.REFERENCE), (15, small), (15, None), (15, None), (8, None), (16, None)]
    assert not matmul_schedules.excluded
    products.clear()
    run(8, bias=True)
    assert len(products) == 3, "a bias is another way"
    run(8, bias=True)
    assert len(products) == 4


@pytest.mark.parametrize("zeros", [False, True])
def test_a_wrong_schedule_is_dropped_before_its_first_use(
    zeros: bool, small: matmul.MatmulSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison uses random operands, for a product of zeros would hide the fault."""
    real = matmul.matmul

    def product(a: Tensor, b: Tensor, *rest: Any, schedule: Any = None, **more: Any) -> Tensor:
        taken = schedule or matmul.schedule_for(a, b)
        return real(a, b, *rest, schedule=taken, **more) * (1.5 if taken == small else 1)

    monkeypatch.setattr(matmul, "matmul", product)
    assert float(run(1, zeros=zeros)[0, 0]) == (0 if zeros else K)
    assert matmul_schedules.excluded == {small} and float(run(1)[0, 0]) == K


@pytest.mark.usefixtures("small")
def test_without_the_comparison_a_wrong_schedule_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: its fault shows where nothing is compared."""
    monkeypatch.setattr(cuda.KernelsVerdict, "compare", lambda *args: None)
    real = matmul.matmul
    wrong = {None: 1.5, small: 1.5}
    monkeypatch.setattr(
        matmul, "matmul", lambda *args, **more: real(*args, **more) * wrong.get(more.get("schedule"), 1)
    )
    assert float(run(1)[0, 0]) == 1.5 * K


@pytest.mark.usefixtures("small")
def test_a_schedule_that_cannot_be_compared_now_is_not_used(
    products: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without memory for the comparison the reference serves, and the warning appears once."""

    def compare(*args: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cuda, "_compare", compare)
    with caplog.at_level(logging.WARNING):
        run(8)
        monkeypatch.setattr(cuda, "_compare", lambda *args: pytest.fail("asked once"))
        run(8)
    assert products == [(8, matmul.REFERENCE)] * 2 and not cuda._compared and not cuda._known
    assert caplog.text.count("no memory to compare") == 1


@pytest.mark.parametrize("shape", [(0, K, N), (3, 0, N), (3, K, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    """An empty product compares nothing and gives zeros of the right shape."""
    m, k, n = shape
    product = partial(matmul.matmul, out_dtype=None, round_product=False)
    out = cuda.checked(product, torch.ones(m, k, device=DEVICE), torch.ones(k, n, device=DEVICE))
    assert out.shape == (m, n) and not out.any() and not cuda._compared


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shape", [(7, 9), (1, 8), (3, 7, 9)])
def test_random_operands_lie_as_the_real_ones_do(shape: tuple[int, ...], across: bool) -> None:
    """The comparison's random operands are contiguous along the real ones' axis, with rows that a descriptor takes."""
    x = torch.ones(shape).mT if across else torch.ones(shape)
    random = RANDOM_LIKE(x, torch.Generator().manual_seed(0))
    assert random.shape == x.shape and random.dtype == x.dtype and random.unique().numel() > 4
    row, k = random.stride(-1 if across else -2), random.stride(-2 if across else -1)
    assert k == 1 and row % 8 == 0, "a descriptor can address its rows"


@pytest.mark.gpu
def test_in_the_mode() -> None:
    """A layer under the mode compares its schedule and keeps it; a graph captured before that holds the reference."""
    x, weight = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((33, 512), (768, 512)))
    graph = torch.cuda.CUDAGraph()
    with set_batch_invariant_mode(), torch.no_grad():
        torch.mm(x[:1, :16], x[:16, :16].contiguous())  # the libraries are loaded before the capture
        matmul.matmul(x, weight.t(), schedule=matmul.REFERENCE)
        with torch.cuda.graph(graph):
            captured = F.linear(x, weight)
        compared = len(cuda._compared)
        graph.replay()
        assert_bitwise_equal(F.linear(x, weight), captured)
        assert len(cuda._compared) == compared + 1
    assert not matmul_schedules.excluded
