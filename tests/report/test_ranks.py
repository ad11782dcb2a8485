"""Rank intervals and tie groups of several models: what tests separate is ordered, and nothing else is."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from evalengine.report.leaderboard.board import Contest, PairTest, Score, tie_groups, with_family
from evalengine.report.leaderboard.compose import Board, board
from evalengine.report.leaderboard.formats import board_json, comma_separated, latex, markdown
from evalengine.report.leaderboard.page import leaderboard_page
from evalengine.report.leaderboard.sheets import headline, leads, rank_cells, scores_sheet, verdict
from evalengine.report.stats.paired import paired
from tests.report.model_runs import model, rolling
from tests.report.page_content import nodes, words
from tests.report.test_board import BAD, GOOD, MIDDLE, three

NEAR = [*GOOD[:17], 0.0, 0.0, 0.0]  # one right answer fewer than GOOD


def cells(table: Board, place: int = 0) -> list[list[str]]:
    """Rank and tie group of each model, in a metric."""
    return [rank_cells(score) for score in table.tested[place].scores]


def rows(table: Board) -> list[str]:
    """The models as the first metric's rows list them."""
    return [row[1] for row in scores_sheet(table, table.tested[:1]).rows]


@pytest.fixture(scope="module")
def tied() -> Board:
    """Seven models of nearly one score, of which no test shows which is better."""
    rng = np.random.default_rng(0)
    return board([model(f"m{n}", {"sums": [*rng.choice([0.0, 1.0], 100)]}) for n in range(7)])


def test_a_table_is_in_the_order_that_tests_show() -> None:
    table = three()
    assert cells(table) == [["3", "c"], ["1", "a"], ["2", "b"]] and rows(table) == ["good", "mid", "bad"]
    lower = board([replace(run, higher_is_better=dict.fromkeys(run.results, False)) for run in table.runs], table.names)
    assert cells(lower) == [["1", "a"], ["3", "c"], ["2", "b"]] and rows(lower) == ["bad", "mid", "good"]
    assert headline(table).startswith("good is ahead of every other model") and headline(lower).startswith("bad is")
    steps = board([model(f"step-{n}", {"t": values}) for n, values in ((1, BAD), (2, GOOD), (3, MIDDLE))])
    assert rows(steps) == steps.names and cells(steps) == cells(table), "checkpoints stay in the order of their steps"


def test_what_tests_cannot_separate_is_not_ordered(tied: Board) -> None:
    (contest,) = tied.contests
    assert len({score and score.value for score in contest.scores}) > 3, "their values do differ"
    assert cells(tied) == [["1-7", "a"]] * 7 and rows(tied) == tied.names
    assert contest.leader is None and contest.first == [*range(7)]
    assert not any(leads(contest, score) for score in contest.scores)
    assert verdict(tied).endswith("no best on sums acc: 7 models are tied for first")
    assert headline(tied).startswith("All 7 models are tied on sums acc")
    page = leaderboard_page(tied)
    assert "7 tied for first m0, m1, m2 and 4 more" in words(page) and not [*nodes(page, is_="strong")]


def test_part_of_a_table_is_tied() -> None:
    table = board([model(name, {"t": values}) for name, values in (("c", BAD), ("b", NEAR), ("a", GOOD))])
    assert cells(table) == [["3", "b"], ["1-2", "a"], ["1-2", "a"]] and rows(table) == ["b", "a", "c"], "as given"
    alike = board([model(name, {"t": GOOD}) for name in "ab"])
    assert cells(alike) == [["1-2", "a"]] * 2, "equal bits"
    (unknown,) = board([model(name, {"t": GOOD}, better=None) for name in "ab"]).contests
    assert not unknown.tests and [s and s.ranks for s in unknown.scores] == [None, None], "no direction is known"
    one = board([model(name, {"t": [value]}) for name, value in (("a", 1.0), ("b", 0.0))])
    assert cells(one) == [["", ""]] * 2, "one document shows nothing"


def test_a_missing_task_leaves_ranks_of_the_others_and_the_average() -> None:
    values = {"t": GOOD, "u": GOOD}
    table = board([model("a", values), model("b", dict.fromkeys(values, BAD)), model("c", {"t": GOOD})])
    assert [entry.name for entry in table.tested] == ["t acc", "u acc", "average of 2 tasks acc (macro mean)"]
    assert cells(table, 1) == cells(table, 2) == [["1", "a"], ["2", "b"], ["", ""]]
    assert cells(table) == [["1-2", "a"], ["3", "b"], ["1-2", "a"]]


def test_ranks_of_perplexities_need_the_documents_of_their_values() -> None:
    sums = [[-50.0 - n] for n in range(12)]
    closer = [[value + 1.0] for (value,) in sums]
    runs = [rolling("a", sums, 20.0), rolling("b", closer, 18.0), rolling("c", closer[:8], 18.0)]
    whole, partly = board(runs[:2]), board(runs)
    assert [cells(whole, place) for place in (0, 1)] == [[["2", "b"], ["1", "a"]]] * 2
    assert partly.contests[0].tests and cells(partly) == [["", ""]] * 3, "values are of 12 and of 8 documents"
    without = replace(runs[1], results={("pages", "bits_per_byte", "none"): (18.0, None)})
    alone = board([runs[0], without])
    assert cells(alone) == [["1", "a"], ["", ""]] and cells(alone, 1) == [["2", "b"], ["1", "a"]], "no value, no rank"
    infinite = replace(runs[0], results=dict.fromkeys(runs[0].results, (math.inf, None)))
    assert cells(board([infinite, runs[1]])) == [["2", "b"], ["1", "a"]], "its log-likelihoods are finite"


def test_a_chain_of_tests_separates_its_ends() -> None:
    """0 beats 1 and 1 beats 2 surely; 0 against 2 alone would be undecided, 3 is undecided against all."""
    result = [paired([0.0] * 4, [x] * 4) for x in (-0.1, -0.2, -0.3, -0.1, -0.2, -0.1)]
    tests = [PairTest(i + 1, j + 1, r) for (i, j), r in zip(combinations(range(4), 2), result, strict=True)]
    scores: list[Score | None] = [Score(1 - n / 10, None) for n in range(4)]
    raw = Contest(("t", "acc", "none"), True, True, 4, scores, tests)
    (done,) = with_family([raw], [0.01, 0.2, 0.9, 0.01, 0.9, 0.9])
    assert [rank_cells(s) for s in done.scores] == [["1-2", "a"], ["2-3", "b"], ["3-4", "c"], ["1-4", "abc"]]
    (mirrored,) = with_family([replace(raw, higher_is_better=False)], [0.01, 0.2, 0.9, 0.01, 0.9, 0.9])
    assert [s and s.ranks for s in mirrored.scores] == [(3, 4), (2, 3), (1, 2), (1, 4)]


@pytest.mark.parametrize("seed", range(4))
def test_two_models_share_a_letter_exactly_if_nothing_separates_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ahead = {n: {int(m) for m in range(n) if rng.random() < 0.4} for n in range(9)}
    letters = tie_groups(range(9), ahead)
    for a, b in combinations(range(9), 2):
        assert bool({*letters[a]} & {*letters[b]}) == (a not in ahead[b]), (a, b)
    assert all(letters.values()), "a model that all others differ from has a letter for itself"


def test_few_letters_are_enough() -> None:
    """Neighbours of a chain share one each. Of twenty pairs that differ only within a pair there are 2^20 largest
    groups; a few of them show all ties."""
    chain = tie_groups(range(4), {n: {*range(n - 1)} for n in range(4)})
    assert [*chain.values()] == ["a", "ab", "bc", "c"]
    pairs = tie_groups(range(40), {n: {n - 1} if n % 2 else set() for n in range(40)})
    assert len({*"".join(pairs.values())}) <= 20 and not {*pairs[0]} & {*pairs[1]} and {*pairs[0]} & {*pairs[3]}
    apart = tie_groups(range(60), {n: {*range(n)} for n in range(60)})
    assert all(a != b for a, b in pairwise(apart.values())) and apart[51] == "Z" and apart[52] == "(53)"


def test_every_form_has_rank_intervals_and_tie_groups() -> None:
    names = {"c": BAD, "b": NEAR, "a": GOOD}
    table = board([model(name, {"t": values, "u": values}) for name, values in names.items()])
    ranked = {"c": ([3, 3], "b"), "b": ([1, 2], "a"), "a": ([1, 2], "a")}
    content = board_json(table)
    for entry in (*content["metrics"], *(mean for group in content["groups"] for mean in group["means"])):
        assert {s["model"]: (s["ranks"], s["tie_group"]) for s in entry["scores"]} == ranked, entry["task"]
        assert all("rank" not in score for score in entry["scores"]), "no rank by value"
    lines = list(csv.DictReader(io.StringIO(comma_separated(table))))
    scores = [line for line in lines if line["row"] == "score"]
    assert len(scores) == 9 and not any("rank" in line or line["tie_group"] for line in lines if line not in scores)
    for line in scores:
        assert ([int(line["rank_best"]), int(line["rank_worst"])], line["tie_group"]) == ranked[line["model"]]
    for text in (markdown(table).replace("|", "&"), latex(table)):
        assert text.count("& 3 b & 1-2 a & 1-2 a ") == 3 and "share a tie group's letter" in text
    page = leaderboard_page(table)
    sheets = [sheet for sheet in nodes(page, is_="sheet") if sheet["head"][2:3] == ["Rank"]]
    ranks = [list(row[2:4]) for sheet in sheets for row in sheet["rows"]]
    assert ranks.count(["1-2", "a"]) == 6 and "2 tied for first" in words(page)


def test_the_first_sentence_counts_the_models_that_have_a_value() -> None:
    """c did not run u; a value that is not a number is compared with none."""
    right, unknown = [1.0] * 60 + [0.0] * 40, [math.nan] + [1.0] * 59 + [0.0] * 40
    a, b, c = (
        model("a", {"t": right, "u": right}),
        model("b", {"t": right, "u": [0.0] * 100}),
        model("c", {"t": right}),
    )
    assert headline(board([a, b, c])).startswith("a is ahead of the only other model with a value on u acc (60.0 %)")
    tied = board([model("a", {"t": right}), model("b", {"t": unknown}), model("c", {"t": right[::-1]})])
    assert headline(tied).startswith("The 2 models with a value are tied on t acc")
    assert headline(board([model(n, {"t": right}) for n in "abc"])) == "All 3 models are tied on t acc"
