"""docs/models.md says of every decoder of transformers whether its own module can serve it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine.models.registry import find_family_of_type
from tests.parity.module_list import RUNS, group_of, rows
from tests.parity.modules import CASES

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def listed(group: str) -> set[str]:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {group} |")]
    return {name.strip("` ") for name in row.split("|")[2].split(",")}


@pytest.mark.parametrize("model_type", ["gpt2", "phimoe", "bloom", "mamba", "bert", "dbrx"])
def test_the_page_has_a_model_type_in_its_row(model_type: str) -> None:
    assert model_type in listed(group_of(model_type))


def test_every_case_of_the_parity_tests_runs() -> None:
    """(but nemotron, whose default configuration names no number of key and value heads; and what runs natively)"""
    others = {model_type for model_type, _ in CASES.values() if find_family_of_type(model_type) is None}
    assert others - listed(RUNS) == {"nemotron"}
    assert len(others) >= 10 and "granitemoeshared" in others, "ten that are not native, one of them with experts"


@pytest.mark.slow
def test_the_page_lists_every_decoder_of_transformers() -> None:
    assert [row for row in rows() if row not in PAGE.splitlines()] == []
