"""Products of tokens with their experts have, row by row, the bytes of the dense product, however the rows are grouped.

In the interpreter NumPy's order of summation follows the tile: bytes are compared there on small integers, whose sums
are exact.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from evalengine.kernels import expert_groups, expert_matmul, matmul
from evalengine.kernels.expert_groups import are_alone, group
from evalengine.kernels.matmul_schedules import MatmulSchedule
from evalengine.layers import fast_mixture
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter computes bf16 wrongly
DTYPES = [torch.float32, torch.float16, BF16]
SCHEDULES = [
    MatmulSchedule("pointer", 16, 32, 16),
    MatmulSchedule("pointer", 16, 64, 32, swap=True),
    MatmulSchedule("pointer", 64, 32, 32),
    *(expert_matmul.plainest(rows) for rows in (16, 128)),
]
# Tokens, experts, experts of each, N, K: tails in all of them, experts without a row, one row in all.
SHAPES = [(1, 4, 2, 7, 9), (23, 6, 3, 65, 33), (40, 3, 1, 32, 48), (2, 40, 5, 16, 16)]


def ids_of(tokens: int, experts: int, chosen: int, seed: int = 0) -> Tensor:
    """int32 [T, k]: distinct experts of each token, of which the last never is one."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts - 1, generator=generator)[:chosen] for _ in range(tokens)]
    return torch.stack(rows).int().to(DEVICE)


def movable(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers; in the interpreter small integers, whose sums are exact in any place of a tile."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values if DEVICE == "cuda" else (values * 3).round()).to(dtype).to(DEVICE)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """The dense kernel's product of each expert's rows with its weight."""
    y = torch.full((*ids.shape, weight.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    rows = x.unsqueeze(1).expand(-1, ids.shape[1], -1) if x.ndim == 2 else x
    for expert in ids.unique().tolist():
        own = ids == expert
        y[own] = matmul.matmul(
            rows[own], weight[expert].t(), None if bias is None else bias[expert], schedule=matmul.REFERENCE
        )
    return y


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_groups_hold_each_pair_once_in_order(shape: tuple[int, ...], block_m: int) -> None:
    tokens, experts, chosen = shape[:3]
    ids = ids_of(tokens, experts, chosen)
    groups = group(ids, experts, block_m)
    flat = ids.flatten().tolist()
    alone = are_alone(len(flat), experts)
    by_expert = sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert groups.order.tolist() == (list(range(len(flat))) if alone else by_expert)
    seen: list[int] = []
    for expert, first, rows in groups.tiles.tolist():
        assert 0 <= rows <= block_m and 0 <= expert < experts
        own = groups.order[first : first + rows].tolist()
        assert [flat[pair] for pair in own] == [expert] * rows
        seen += own
    assert seen == groups.order.tolist()
    assert len(groups.tiles) == (len(flat) if alone else len(flat) // block_m + experts)


def test_more_pairs_than_a_program_sees_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sorted as fewer are."""
    ids = ids_of(41, 7, 3)
    whole = group(ids, 7, 16)
    monkeypatch.setattr(expert_groups, "BLOCK", 32)
    monkeypatch.setattr(expert_groups, "_launches", {})
    parts = group(ids, 7, 16)
    assert torch.equal(whole.order, parts.order) and torch.equal(whole.tiles, parts.tiles)


def test_whether_pairs_are_sorted_or_alone_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the pairs have one expert."""
    ids = torch.tensor([[4, 1, 0], [1, 2, 30]], dtype=torch.int32, device=DEVICE)
    x, weight = movable(2, 24, dtype=torch.float16), movable(32, 20, 24, dtype=torch.float16, seed=1)
    alone = group(ids, 32, 16)
    monkeypatch.setattr(expert_groups, "FEW", 1000)
    monkeypatch.setattr(expert_groups, "_launches", {})
    grouped = group(ids, 32, 16)
    assert len(alone.tiles) == 6 and len(grouped.tiles) == 32
    outputs = [expert_matmul.expert_linear(x, weight, None, groups) for groups in (alone, grouped)]
    assert_bitwise_equal(*outputs)
    assert_bitwise_equal(outputs[0], dense(x, weight, None, ids))


def test_one_expert_takes_all_tokens() -> None:
    """Its tiles are full but for the last; those of the others are empty."""
    ids = torch.full((70, 1), 2, dtype=torch.int32, device=DEVICE)
    rows = [rows for _, _, rows in group(ids, 4, 16).tiles.tolist()]
    assert [n for n in rows if n] == [16, 16, 16, 16, 6] and len(rows) == 70 // 16 + 4


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_rows_are_the_dense_kernels(schedule: MatmulSchedule, dtype: torch.dtype, biased: bool) -> None:
    """Of rows that k experts share, and of a row for each expert; an expert without rows may hold anything."""
    for tokens, experts, chosen, n, k in SHAPES:
        ids = ids_of(tokens, experts, chosen)
        groups = group(ids, experts, schedule.block_m)
        weight, bias = movable(experts, n, k, dtype=dtype), movable(experts, n, dtype=dtype, seed=1) if biased else None
        expected_of = weight.clone()
        weight[-1] = torch.nan
        for x in (movable(tokens, k, dtype=dtype, seed=2), movable(tokens, chosen, k, dtype=dtype, seed=3)):
            y = expert_matmul.expert_linear(x, weight, bias, groups, schedule)
            assert_bitwise_equal(y, dense(x, expected_of, bias, ids))
            assert count_differing(y, y.flip(0)) or tokens == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixtures_of_equal_shapes_do_not_share_launches(dtype: torch.dtype) -> None:
    """Two mixtures in one process whose operands and tiles have the same shapes, and that choose 2 and 3 experts: the
    launch of one was once repeated for the other, which read the wrong tokens' rows."""
    x, weight = movable(3, 20, dtype=dtype), movable(6, 24, 20, dtype=dtype, seed=1)
    for chosen in (2, 3, 1):
        ids = ids_of(3, 6, chosen, seed=chosen)
        groups = group(ids, 6, 16)
        assert len(groups.tiles) == 6
        for _ in range(2):  # the second launch is a repeated one
            assert_bitwise_equal(expert_matmul.expert_linear(x, weight, None, groups), dense(x, weight, None, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [3, 6, 64, 256])
def test_steps_and_replays_against_a_plain_loop(experts: int, dtype: torch.dtype) -> None:
    """Steps of 1 to 300 tokens, 1 to 10 experts of each, in one process, each launched and repeated: the bytes of the
    dense kernel, and torch's loop over the experts up to rounding."""
    n, k = 148, 96
    weight, bias = movable(experts, n, k, dtype=dtype), movable(experts, n, dtype=dtype, seed=1)
    for tokens, chosen in product((1, 3, 19, 129, 300), (1, 2, 3, 10)):
        if chosen >= experts:
            continue
        ids = ids_of(tokens, experts, chosen, seed=tokens)
        groups = group(ids, experts, expert_matmul.height(dtype, ids.numel(), experts))
        for x in (movable(tokens, k, dtype=dtype, seed=2), movable(tokens, chosen, k, dtype=dtype, seed=3)):
            first, repeated = (expert_matmul.expert_linear(x, weight, bias, groups) for _ in range(2))
            assert_bitwise_equal(repeated, first)
            truth = fast_mixture.expert_linear(x.double(), weight.double(), bias.double(), ids.long())
            plain = fast_mixture.expert_linear(x, weight, bias, ids.long())
            ours, theirs = ((y.double() - truth).square().mean().sqrt() for y in (first, plain))
            assert ours <= 3 * theirs + 1e-12, f"{tokens} tokens, {chosen} experts: {ours:.2e}, torch {theirs:.2e}"
            assert_bitwise_equal(first, dense(x, weight, bias, ids))


def test_against_float64() -> None:
    tokens, experts, chosen, n, k = SHAPES[1]
    ids = ids_of(tokens, experts, chosen)
    x, weight = torch.randn(tokens, k).to(DEVICE), torch.randn(experts, n, k).to(DEVICE)
    truth = reference.expert_linear(x.cpu(), weight.cpu(), None, ids.cpu())
    y = expert_matmul.expert_linear(x, weight, None, group(ids, experts, 16))
    torch.testing.assert_close(y.cpu().double(), truth, rtol=1e-5, atol=1e-5)


def test_a_part_of_a_weight_is_multiplied_as_it_lies() -> None:
    """As a rank's rows of every expert do; and rows of x may be a part of wider ones."""
    ids = ids_of(9, 5, 2)
    whole, wide = movable(5, 40, 24, dtype=torch.float32), movable(9, 50, dtype=torch.float32, seed=1)
    groups = group(ids, 5, 16)
    weight, x = whole[:, 8:24], wide[:, 5:29]
    y = expert_matmul.expert_linear(x, weight, None, groups)
    assert_bitwise_equal(y, expert_matmul.expert_linear(x.contiguous(), weight.contiguous(), None, groups))


def test_heights_are_those_that_are_chosen() -> None:
    """Each height that a step can have is among those that `heights` lists, whose schedules are verified."""
    for dtype in (torch.float32, torch.bfloat16):
        found = {expert_matmul.height(dtype, pairs, 8) for pairs in range(1, 2000, 7)}
        assert found == {*expert_matmul.heights(dtype)}


def test_an_excluded_schedule_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first = expert_matmul.choose(torch.bfloat16, 16, 768, 2048)
    monkeypatch.setattr(expert_matmul, "excluded", {first})
    assert expert_matmul.choose(torch.bfloat16, 16, 768, 2048) == expert_matmul.plainest(16) != first
