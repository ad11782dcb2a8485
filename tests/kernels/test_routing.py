"""Experts are chosen by (value descending, id ascending), at `native` as in float64, and a row is chosen by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evalengine.kernels import exact_mixture
from evalengine.kernels.mixture_variant import Router
from evalengine.kernels.routing import route
from evalengine.layers.fast_mixture import route as fast_route
from tests.bitwise import assert_bitwise_equal
from tests.kernels.routers import ROUTERS, operands
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IGNORE_INTERPRETER = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CASES = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)


@CASES
def test_against_float64(router: Router) -> None:
    """The experts are the reference's, ties included, and weights are within a few roundings of float32."""
    logits, bias = operands(router)
    expected_ids, expected = reference.route(logits, bias, router)
    ids, weights = route(logits.to(DEVICE), None if bias is None else bias.to(DEVICE), router, torch.float32)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.cpu().tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-6, atol=1e-7)
    assert any(len({*row}) < len(row) for row in logits.gather(1, expected_ids).tolist()) or router.chosen == 1


@CASES
def test_other_levels_choose_alike(router: Router) -> None:
    logits, bias = operands(router)
    expected_ids, expected = reference.route(logits, bias, router)
    for ids, weights in (
        exact_mixture.route(logits, bias, router),
        fast_route(logits, bias, router, torch.float32),
    ):
        assert ids.tolist() == expected_ids.tolist()
        torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-7)


@CASES
def test_a_row_is_chosen_by_itself(router: Router) -> None:
    logits, bias = operands(router)
    wide = torch.full((23, 40), torch.nan)
    wide[:, 3 : 3 + router.experts] = logits
    bias = None if bias is None else bias.to(DEVICE)
    ids, weights = route(logits.to(DEVICE), bias, router, torch.float16)
    view_ids, view_weights = route(wide.to(DEVICE)[:, 3 : 3 + router.experts], bias, router, torch.float16)
    assert_bitwise_equal(view_ids, ids)
    assert_bitwise_equal(view_weights, weights)
    for row in (0, 5, 22):
        alone_ids, alone = route(logits[row : row + 1].to(DEVICE), bias, router, torch.float16)
        assert_bitwise_equal(alone_ids, ids[row : row + 1])
        assert_bitwise_equal(alone, weights[row : row + 1])
    rounded = weights.to(torch.float16).float()
    assert torch.equal(rounded, weights) == (router.rounded or torch.equal(rounded, weights))
    if router.rounded:
        assert torch.equal(rounded, weights)


def test_scores_that_are_rounded_tie_where_others_do_not() -> None:
    """Two sigmoids that float16 cannot tell apart: the lower id is first, though its logit is the smaller one."""
    logits = torch.zeros(1, 12, device=DEVICE)
    logits[0, 3], logits[0, 7] = 2.0, 2.0005
    router = replace(ROUTERS["lfm2"], choice_bias=False)
    for function in (route, fast_route):
        assert function(logits, None, router, torch.float16)[0][0, :2].tolist() == [3, 7]
        unrounded = replace(router, rounded_scores=False)
        assert function(logits, None, unrounded, torch.float16)[0][0, :2].tolist() == [7, 3]


@IGNORE_INTERPRETER
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("router", [ROUTERS["qwen"], ROUTERS["gpt-oss"], ROUTERS["glm"]], ids=str)
def test_a_row_that_is_not_finite_has_experts_and_no_weights(router: Router, number: float) -> None:
    logits, bias = operands(router)
    bias = None if bias is None else bias.to(DEVICE)
    expected_ids, expected = route(logits.to(DEVICE), bias, router, torch.float32)
    logits[4, 2] = number
    ids, weights = route(logits.to(DEVICE), bias, router, torch.float32)
    assert weights[4].isnan().all() and ids.min() >= 0 and ids.max() < router.experts
    others = torch.arange(23, device=DEVICE) != 4
    assert_bitwise_equal(ids[others], expected_ids[others])
    assert_bitwise_equal(weights[others], expected[others])


def test_what_a_router_cannot_be() -> None:
    assert Router(6, 7).problems and Router(6, 2, groups=4).problems and Router(6, 5, groups=2).problems
    assert Router(6, 2, groups=6).problems and Router(6, 2, groups=2, kept_groups=3).problems
    assert not any(router.problems for router in ROUTERS.values())
