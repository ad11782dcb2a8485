"""The row kernels compile in every variant, and no multiply and add is contracted that the contract does not name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.compile_gluon import compiled_elsewhere
from tests.kernels.routers import ROUTERS

Compiled = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """Every group of cases, compiled by one process."""
    return compiled_elsewhere(program="compile_rows")


def test_norms_and_rope_compile_without_a_contraction(compiled: Compiled) -> None:
    cases = [*compiled["norms"], *compiled["heads"]]
    assert len(cases) == 16
    assert [case for case in cases if case["fma"]] == []


def test_activations_and_the_softcap_compile_without_tanh_approx(compiled: Compiled) -> None:
    """The softcap, xIELU and GELU's tanh form have the fma that they state and no branch (erff has one an element)."""
    cases = compiled["elements"]
    assert len(cases) == 19 and not any(case["tanh"] for case in cases)
    names = ("_softcap_kernel", "_xielu_kernel")
    branchless = [case for case in cases if case["kernel"] in names or case.get("ACT") == "gelu_tanh"]
    assert len(branchless) == 7 and all(case["fma"] and not case["branches"] for case in branchless)


def test_activations_in_fp8_compile_without_a_contraction(compiled: Compiled) -> None:
    cases = compiled["fp8"]
    assert len(cases) == 4 and not any(case["fma"] for case in cases)


def test_products_with_packed_weights_compile_without_a_contraction(compiled: Compiled) -> None:
    cases = compiled["packed"]
    assert len(cases) == 32 and not any(case["fma"] for case in cases)


def test_mixtures_compile_without_a_contraction(compiled: Compiled) -> None:
    """But for products in float32, which are made of them."""
    cases = compiled["mixtures"]
    assert len(cases) == 30 and {case["rule"] for case in cases if "rule" in case} == {*ROUTERS}
    contracted = [case for case in cases if case["fma"]]
    assert contracted and all((case["kernel"], case["dtype"]) == ("_expert_kernel", "fp32") for case in contracted)


def test_recurrences_compile(compiled: Compiled) -> None:
    """With the multiply-adds that they state, and those of expf."""
    cases = compiled["recurrences"]
    assert len(cases) == 12 and {case["dtype"] for case in cases} == {"bf16", "fp32"}
    stated = [case["kernel"] for case in cases if case["fma"]]
    assert {"_conv_kernel", "_gated_delta_kernel", "_mamba2_kernel"} <= {*stated}
