"""The row kernels compile in every variant, and no multiply and add is contracted that the contract does not name."""

from __future__ import annotations

from tests.kernels.compile_gluon import compiled_elsewhere


def test_norms_and_rope_compile_without_a_contraction() -> None:
    cases = [*compiled_elsewhere("norms", "compile_rows"), *compiled_elsewhere("heads", "compile_rows")]
    assert len(cases) == 14
    assert [case for case in cases if case["fma"]] == []


def test_activations_and_the_softcap_compile_without_tanh_approx() -> None:
    """The softcap and the tanh form of GELU have no branch (erff has one an element), and the fma that they state."""
    cases = compiled_elsewhere("elements", "compile_rows")
    assert len(cases) == 13 and not any(case["tanh"] for case in cases)
    branchless = [case for case in cases if case["kernel"] == "_softcap_kernel" or case.get("ACT") == "gelu_tanh"]
    assert len(branchless) == 5 and all(case["fma"] and not case["branches"] for case in branchless)
