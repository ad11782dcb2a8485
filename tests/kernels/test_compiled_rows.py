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
    assert len(cases) == 8 and not any(case["fma"] for case in cases)


def test_mixtures_compile_without_a_contraction(compiled: Compiled) -> None:
    """Only float32 products, which consist of them, and the sigmoid, which uses explicit ones, have multiply-adds."""
    cases = compiled["mixtures"]
    assert len(cases) == 32 and {case["rule"] for case in cases if "rule" in case} == {*ROUTERS}
    contracted = {(case["kernel"], case["dtype"]) for case in cases if case["fma"]}
    assert contracted == {("_expert_kernel", "fp32"), ("_gate_kernel", "bf16")}


def test_recurrences_compile(compiled: Compiled) -> None:
    """With the multiply-adds that they state and no others, and each product by one instruction in both phases."""
    cases = {(case["what"], case["kernel"]): case for case in compiled["recurrences"]}
    assert len(compiled["recurrences"]) == 29 and len(cases) == 24
    assert {kernel for kernel, case in cases.items() if case["fma"]} == {
        *(("conv", kernel) for kernel in ("_conv_kernel", "_conv_decode_kernel")),
        *(("delta", kernel) for kernel in ("_solve_kernel", "_m_kernel", "_coefficients_kernel", "_decode_kernel")),
        *(("scan", kernel) for kernel in ("_output_kernel", "_decode_kernel")),
    }
    for what, prefill, decode in (
        ("delta", "_products_kernel", "_decode_kernel"),
        ("delta", "_prefill_kernel", "_decode_kernel"),
        ("delta", "_coefficients_kernel", "_decode_kernel"),
        ("delta", "_rows_kernel", "_decode_kernel"),
        ("scan", "_products_kernel", "_decode_row_kernel"),
        ("scan", "_output_kernel", "_decode_kernel"),
        ("scan", "_added_kernel", "_close_kernel"),
    ):
        both = [{name for name in ("wgmma", "mma") if cases[what, kernel][name]} for kernel in (prefill, decode)]
        assert both[0] == both[1] and len(both[0]) == 1, (what, prefill, decode)
    # K' of the delta rule; its close has another product, of mma.sync.
    assert cases["delta", "_keys_kernel"]["wgmma"] and not cases["delta", "_keys_kernel"]["mma"]
    assert cases["delta", "_close_kernel"]["wgmma"] and cases["delta", "_close_kernel"]["mma"]
