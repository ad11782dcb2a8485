"""`verify` of experts' products: every height of tiles is compared with dense products, and a difference is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels import expert_matmul
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.verification import comparisons
from evalengine.verification.comparisons import verify_experts
from evalengine.verification.verdict import KernelsVerdict
from tests.verification.tiny_shapes import TINY, verified
from tests.verification.verify_double import DEVICE
from tests.verification.verify_double import alone as alone  # The fixture is used by every test here.

SHAPES = replace(TINY, dense=False, mixture=Mixture(Router(6, 2, normed=True, wide=True), 24, bias=True))


def check(dtype: torch.dtype = torch.float32) -> KernelsVerdict:
    verdict = KernelsVerdict()
    verify_experts(verdict, SHAPES.expert_layers(), 2, dtype, DEVICE)
    return verdict


def test_as_they_are_all_pass() -> None:
    verdict = check()
    assert not verdict.failed and not verdict.dropped
    heights = expert_matmul.heights(torch.float32)
    assert {s.block_m for _, s in verdict.schedules} == {*heights} and verdict.checked == 4 * len(heights)


def test_a_tile_that_is_wrong_where_it_is_full_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    real, bad = expert_matmul.expert_linear, expert_matmul.preferred(torch.float32, 16, 48)

    def expert_linear(*args: Any) -> Tensor:
        y = real(*args)
        groups = args[3]
        if args[4] == bad:
            full = next(first for _, first, rows in groups.tiles.tolist() if rows == bad.block_m)
            y.view(-1, y.shape[-1])[groups.order[full], 3] += 1
        return y

    monkeypatch.setattr(comparisons.expert_matmul, "expert_linear", expert_linear)
    verdict = check()
    assert {drop["schedule"]["block_n"] for drop in verdict.dropped} == {bad.block_n} and not verdict.failed
    assert expert_matmul.choose(torch.float32, 16, 48, 32) == expert_matmul.plainest(16)


def test_without_a_schedule_in_reserve_the_level_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = expert_matmul.expert_linear
    monkeypatch.setattr(
        comparisons.expert_matmul, "expert_linear", lambda *args: real(*args) + (args[4] == expert_matmul.plainest(16))
    )
    (failed,) = check().failed
    assert "tiles of 16 rows" in failed


def test_a_models_verdict_covers_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the router's product in float32; a model without experts asks for neither."""
    asked: list[Any] = []
    monkeypatch.setattr(
        "evalengine.verification.verify.verify_experts", lambda verdict, layers, *more: asked.append((layers, more[0]))
    )
    monkeypatch.setattr(
        "evalengine.verification.verify.verify_matmul", lambda verdict, layers, dtype, *more: asked.append(dtype)
    )
    for name in ("verify_attention", "verify_rows"):
        monkeypatch.setattr(f"evalengine.verification.verify.{name}", lambda *args: None)
    verified(SHAPES)
    assert (SHAPES.expert_layers(), 2) in asked and torch.float32 in asked
    asked.clear()
    verified(TINY)
    assert asked == [torch.float16, torch.float16]
