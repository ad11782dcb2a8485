"""The divergence map's numbers: levels, where outputs diverge, and what has no map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evalengine.report.compare.compare import compare
from evalengine.report.compare.item_differences import shared_text
from evalengine.report.html.comparison_page import divergence_map, map_section
from evalengine.report.html.page import Page
from evalengine.report.read.run import Run
from tests.report.compared_runs import BASE, BIT, TOKEN, run


def test_equal_runs_have_rows_without_a_difference() -> None:
    rows = divergence_map(compare(run(BASE), run(BASE)))
    assert [(r.key[1], r.tokens, r.parts_at, r.first, r.levels) for r in rows] == [
        (0, 3, None, None, ""),
        (1, 2, None, None, ""),
        (2, 1, None, None, ""),
    ]


def test_one_bit_is_found_at_its_token() -> None:
    first, *others = divergence_map(compare(run(BASE), run(BIT)))
    assert (first.parts_at, first.first, first.levels) == (None, 1, "01")
    assert all(row.first is None for row in others)


def test_one_token_is_found_and_nothing_after_it_is_compared() -> None:
    first, *others = divergence_map(compare(run(BASE), run(TOKEN)))
    assert (first.tokens, first.parts_at, first.first, first.levels) == (3, 2, 2, "")
    assert all(row.first is None for row in others)
    longer = run({**BASE, 1: ([8, 9, 9, 9], [-0.125, -2.0, -1.0, -1.0])})
    row = divergence_map(compare(run(BASE), longer))[1]
    assert (row.tokens, row.parts_at, row.first) == (4, 2, 2)  # the shorter output just ends


@pytest.mark.parametrize(
    ("delta", "level"),
    [(5e-7, "1"), (2e-6, "2"), (2e-5, "3"), (2e-4, "4"), (2e-3, "5"), (2e-2, "6"), (2e-1, "7"), (100.0, "7")],
)
def test_levels_are_decades_of_the_difference(delta: float, level: str) -> None:
    here = {0: ([5, 6], [0.0, -1.0])}
    there = {0: ([5, 6], [-delta, -1.0])}
    assert divergence_map(compare(run(here), run(there)))[0].levels == level


def test_logprobs_without_a_distance_have_a_level_of_their_own() -> None:
    odd = float("nan"), float("inf"), float("-inf"), -0.5
    a, b = run({0: ([1, 2, 3, 4], [-0.5] * 4)}), run({0: ([1, 2, 3, 4], odd)})
    assert divergence_map(compare(a, b))[0].levels == "888"
    assert divergence_map(compare(b, b))[0].levels == ""  # the same NaN is the same bits
    zero, minus = run({0: ([1], [0.0])}), run({0: ([1], [-0.0])})
    assert divergence_map(compare(zero, minus))[0].levels == "1"  # the numbers are equal, their bits are not


def without_tokens(whole: Run) -> Run:
    """The run as a baseline file holds it."""
    return replace(
        whole, kind="baseline", items={k: replace(i, output_ids=None, logprobs=None) for k, i in whole.items.items()}
    )


def test_runs_without_tokens_have_no_map_and_the_page_says_so() -> None:
    c = compare(run(BASE), without_tokens(run(TOKEN)))
    assert divergence_map(c) == []
    page = Page("x")
    map_section(page, c)
    assert "There is no map: it needs the tokens of both runs, and B holds none." in page.render()


def test_other_prompts_have_no_map_and_the_page_says_why() -> None:
    def page_text(asks: dict[int, list[int]], other: Any = TOKEN) -> str:
        page = Page("x")
        map_section(page, compare(run(BASE), run(other, asks=asks)))  # type: ignore[arg-type]
        return page.render()

    c = compare(run(BASE), run(BASE, asks={0: [9, 9]}))
    assert [row.key[1] for row in divergence_map(c)] == [1, 2]
    every = "the prompts of all 3 requests differ, so that their tokens do not stand side by side."
    assert f"There is no map: {every}" in page_text({0: [9, 9], 1: [9, 8], 2: [9, 7]})
    assert "One output diverges, at token 2." in page_text({1: [9, 8]})
    assert "1 more request has another prompt and no line here." in page_text({1: [9, 8]})
    equal = "the answers to 1 request with equal prompts are equal bit for bit, and 2 requests have other prompts."
    assert f"There is no map: {equal}" in page_text({0: [9, 9], 1: [9, 8]})


def test_a_map_without_a_difference_is_left_out() -> None:
    page = Page("x")
    map_section(page, compare(run(BASE), run(BASE)))
    assert "data-map" not in page.render()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 1000])
def test_shared_text_is_the_longest_common_beginning(count: int) -> None:
    draw = np.random.default_rng(count)
    text = "".join(draw.choice(list("ab"), 1000))
    assert shared_text(text, text[:count] + "\ud800" + text[count:]) == count
    assert shared_text(text[:count], text) == count
    assert shared_text("", text) == 0
