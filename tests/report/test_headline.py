"""A comparison's first sentence: how much better or worse, how sure, and how many documents would settle it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evalengine.report.compare.compare import Comparison, compare
from evalengine.report.compare.headline import (
    ALPHA,
    FEW_CHANGED,
    WITHIN_CHANCE,
    asked_for,
    changed_words,
    documents_to_tell,
    headline,
)
from evalengine.report.compare.matrix import what_differs
from evalengine.report.compare.report import report
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.leaderboard.compose import board
from evalengine.report.leaderboard.sheets import headline as board_headline
from evalengine.report.stats.detectable import mcnemar_power
from evalengine.report.stats.paired import PairedResult, paired
from evalengine.report.stats.significance import mcnemar
from evalengine.util.sheet import Sheet
from tests.report.compared_runs import BASE, BIT, run
from tests.report.model_runs import model
from tests.report.page_content import words


def compared(a: dict[str, Sequence[float]], b: dict[str, Sequence[float]], **how: Any) -> Comparison:
    """Two runs with these scores, and with outputs that differ."""
    left, right = model("a", a, **how), model("b", b, **how)
    items = {key: replace(item, output_sha256="o", text="B") for key, item in right.items.items()}
    asked = {key: replace(item, output_sha256="a", text="A") for key, item in left.items.items()}
    return compare(replace(left, items=asked), replace(right, items=items))


def ones(count: int, wrong: int, first: int = 0) -> list[float]:
    """So many 0/1 scores, of which `wrong` are 0, from document `first` on."""
    return [0.0 if first <= n < first + wrong else 1.0 for n in range(count)]


def test_equal_bits_of_two_contracts_are_not_called_the_same() -> None:
    same, other = compare(run(BASE), run(BASE)), compare(run(BASE), run(BASE, contract_version=2))
    assert same.verdict == other.verdict == "IDENTICAL"
    assert headline(same) == "A and B are the same, bit for bit"
    assert [*report(same)][-1] == "verdict: IDENTICAL (every bit of 3 outputs and their logprobs)"
    assert [*report(other)][
        -1
    ] == "verdict: IDENTICAL (every bit of 3 outputs and their logprobs, by contracts 1 and 2)"
    assert what_differs(same) == ("identical", "") and what_differs(other) == ("identical", "by contracts 1 and 2")
    assert headline(other) == (
        "A and B have equal outputs and logprobs, by contracts 1 and 2, under which bits may differ"
    )


def test_an_open_difference_says_how_many_documents_would_tell() -> None:
    c = compared({"t": ones(200, 46)}, {"t": ones(200, 38, first=12)})
    sentence = "B 4.0 points better (95 % CI -0.2 to +8.2): not significant; "
    sentence += "detecting a difference this large takes about 430 documents (power 0.8)"
    assert headline(c) == sentence
    assert next(iter(report(c))) == f"{sentence}."  # the first line
    assert comparison_page(c).render().index(sentence) < comparison_page(c).render().index("DIFFERENT")


def test_a_set_without_more_documents_is_said() -> None:
    c = compared({"t": ones(200, 46)}, {"t": ones(200, 38, first=12)}, limit=None)
    assert headline(c).endswith(" documents (power 0.8), and the task has 200")


def test_few_changed_documents_name_no_number() -> None:
    """Of 4 changed documents, the number said had a power of .02 to .27."""
    c = compared({"t": ones(24, 6)}, {"t": ones(24, 2)})
    assert headline(c).endswith("only 4 documents changed, too few to estimate how many it takes")


@pytest.mark.parametrize(("count", "flipping"), [(24, 0.6), (50, 0.3), (200, 0.1), (500, 0.05)])
def test_the_number_said_has_its_power_although_the_flips_are_not_known(count: int, flipping: float) -> None:
    """If the difference is as seen: the mean over the comparisons that name a number."""
    likely, rng, powers = 1.6 * math.sqrt(flipping / count), np.random.default_rng(1), []
    chances = ((flipping + likely) / 2, (flipping - likely) / 2, 1 - flipping)
    some = paired([0, 1], [1, 1])
    for wins, losses, _ in np.unique(rng.multinomial(count, chances, size=60), axis=0).tolist():
        if wins + losses < FEW_CHANGED or not ALPHA <= mcnemar(wins, losses)[0] <= WITHIN_CHANCE:
            continue
        seen = abs(wins - losses) / count
        said = documents_to_tell(
            replace(some, n=count, clusters=count, wins=wins, losses=losses, difference=(wins - losses) / count)
        )
        assert said is not None
        powers.append(mcnemar_power(max(said, count + 1), max(flipping, seen), seen, ALPHA))
    assert len(powers) > 5 and 0.75 <= np.mean(powers) <= 0.9


def test_a_change_within_chance_names_no_number() -> None:
    c = compared({"t": ones(200, 46)}, {"t": ones(200, 45)})
    assert headline(c) == "B 0.5 points better (95 % CI -1.5 to +2.5): not significant over 200 documents"


def test_a_loss_beyond_chance_is_a_real_difference() -> None:
    c = compared({"t": ones(200, 20)}, {"t": ones(200, 50)})
    assert headline(c).endswith(": significant (p 1.9e-09)") and headline(c).startswith("B 15.0 points worse")


def test_better_is_better_where_less_is_better() -> None:
    c = compared({"t": [3.0, 4.0, 5.0, 9.0]}, {"t": [2.0, 3.0, 4.0, 9.0]}, better=False)
    assert headline(c).startswith("B 0.75 better (95 % CI -")


def test_a_change_of_one_sign_is_real_only_outside_its_interval() -> None:
    """0.12 more on 10 of 60: a total loss of another, of which none was seen, could take that back."""
    said = headline(compared({"t": [0.5] * 60}, {"t": [0.62] * 10 + [0.5] * 50}))
    assert said.startswith("B 2.0 points better (95 % CI -") and said.endswith(": not significant over 60 documents")
    assert ": significant (" in headline(compared({"t": [0.5] * 60}, {"t": [0.52] * 60}))


def test_the_number_said_holds_after_the_correction_for_all_tests() -> None:
    """Of 9 tasks one changed; a comparison of models tests their average, too. On the documents that the test alone
    needs, the corrected one has a power of about .5."""
    a = {f"t{n}": ones(300, 60) for n in range(9)}
    b = {**a, "t5": [1.0] * 2 + [0.0] * 58 + [0.0] * 13 + [1.0] * 227}
    c = compared(a, b)
    for said, tests in ((headline(c), 9), (board_headline(board([c.a, c.b], ["A", "B"])), 10)):
        count = int(said.split("about ")[1].split()[0].replace(",", ""))
        assert 0.8 <= mcnemar_power(count, 15 / 300, 11 / 300, ALPHA / tests) < 0.84, said


def test_one_cluster_is_no_document() -> None:
    c = compared({"t": ones(20, 5)}, {"t": ones(20, 10)})
    alone = replace(c.metrics[0], paired=paired(ones(20, 5), ones(20, 10), clusters=["x"] * 20))
    said = headline(replace(c, metrics=[alone]))
    assert said.endswith("25.0 points worse: 20 related documents, one cluster, cannot be tested")
    assert alone.paired is not None and not alone.paired.cautions, "there is no interval to be careful with"
    few = paired(ones(600, 60), ones(600, 120), clusters=[doc // 30 for doc in range(600)])
    assert (documents_to_tell(few) or 0) > 600, "also where two documents are less than a cluster"


def test_equal_scores_are_no_difference_that_was_seen() -> None:
    c = compared({"t": ones(100, 2)}, {"t": ones(100, 2, first=50)})
    assert headline(c).startswith("B no better and no worse (95 % CI -")
    assert headline(c).endswith(": not significant over 100 documents")


def test_of_several_tasks_the_surest_change_is_said_and_the_others_are_counted() -> None:
    a = {"first": ones(100, 10), "second": ones(100, 10), "third": ones(100, 10)}
    c = compared(a, {**a, "second": ones(100, 40)})
    said = headline(c)
    assert said.startswith("On second acc, B 30.0 points worse")
    assert said.endswith("no other of the 3 metrics changed significantly")


def test_equal_bits_and_equal_tokens_are_said_as_such() -> None:
    assert headline(compare(run(BASE), run(BASE))) == "A and B are the same, bit for bit"
    assert headline(compare(run(BASE), run(BASE)), ("x", "y")) == "x and y are the same, bit for bit"
    other = headline(compare(run(BASE), run(BIT)))
    assert other == "Every output and every answer is the same; logprobs differ in 1 of 3 requests"


def test_changed_documents_are_counted_by_what_changed() -> None:
    outputs = {doc: ([5, doc], [-0.5, -0.5]) for doc in range(10)}
    others = {doc: ([6, doc], [-0.5, -0.5]) for doc in range(10)}
    wrong = dict.fromkeys(range(10), 0.0)
    c = compare(run(outputs, scores=wrong), run(others, scores={**wrong, 1: 1.0, 2: 1.0}))
    assert changed_words(c) == "10 documents changed: 2 scores, 8 answers only"
    assert changed_words(compare(run(BASE), run(BASE))) == "no answer changed"


def grouped(name: str, x: Sequence[float], y: Sequence[float]) -> Any:
    """A run of two tasks in a group, whose mean is over all documents."""
    base = model(name, {"x": x, "y": y})
    mean = (sum(x) + sum(y)) / (len(x) + len(y))
    items = {key: replace(item, output_sha256=name, text=name) for key, item in base.items.items()}
    results = {**base.results, ("both", "acc", "none"): (mean, None)}
    better = {**base.higher_is_better, ("both", "acc", "none"): True}
    return replace(base, items=items, results=results, higher_is_better=better, groups={"both": ["x", "y"]})


def test_a_group_is_one_test_over_all_its_documents() -> None:
    c = compare(grouped("a", ones(40, 5), ones(60, 5)), grouped("b", ones(40, 9), ones(60, 12)))
    (group,) = asked_for(c)
    assert group.key[0] == "both" and group.paired is not None
    assert (group.paired.n, group.paired.losses, group.paired.test) == (100, 11, "mcnemar-exact")
    assert group.p_holm == group.paired.p_value == pytest.approx(mcnemar(0, 11)[0])  # one test, not three
    assert {m.key[0]: m.p_holm for m in c.metrics if m.key[0] != "both"} == {"x": None, "y": None}
    assert headline(c).startswith("B 11.0 points worse") and ": significant (" in headline(c)


@pytest.mark.slow  # hundreds of draws take a quarter of a minute
@pytest.mark.parametrize("kind", ["0/1", "mean"])
def test_that_many_documents_find_such_a_difference_four_times_in_five(kind: str) -> None:
    """By simulation: the chance that the test is significant on as many documents as are named."""
    draw = np.random.default_rng(4)

    def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
        if kind == "mean":
            return np.full(count, 0.4), 0.4 + draw.uniform(-0.1, 0.3, count) * (draw.random(count) < 0.3)
        worse, better = draw.random((2, count)) < np.array([[0.03], [0.10]])
        return (~better).astype(float), (~worse).astype(float)

    seen: PairedResult = paired(*pairs(20_000))
    count = documents_to_tell(seen)
    assert count is not None
    found = np.mean([paired(*pairs(count)).p_value < 0.05 for _ in range(200 if kind == "mean" else 400)])
    assert 0.72 <= found <= 0.88
    assert documents_to_tell(paired(np.ones(20), np.ones(20))) is None


def many(name: str, worse: int) -> Any:
    """A run of 14 tasks of 8 documents in a group, the first of which lost so many."""
    values = {f"t{n:02}": ones(8, worse if n == 0 else 0) for n in range(14)}
    base = model(name, values)
    mean = (14 * 8 - worse) / (14 * 8)
    items = {key: replace(item, output_sha256=name, text=name) for key, item in base.items.items()}
    results = {**base.results, ("all", "acc", "none"): (mean, None)}
    better = {**base.higher_is_better, ("all", "acc", "none"): True}
    return replace(base, items=items, results=results, higher_is_better=better, groups={"all": [*values]})


def test_the_tasks_of_a_large_group_are_folded_and_those_that_did_not_change_are_left_out() -> None:
    c = compare(many("a", 0), many("b", 2))
    page = words(comparison_page(c))
    assert "Two runs of all" in page
    assert "14 metrics of the groups' own tasks, outside the family of tests" in page
    lines = [*report(c)]
    assert "13 metrics of tasks in groups, whose documents score the same, are left out." in lines
    (table,) = [line for line in lines if isinstance(line, Sheet) and line.head[-1] == "MDE"]
    assert [row[0] for row in table.rows] == ["all acc ↑", "t00 acc ↑"] and table.notes in lines
    assert "there is one test; none for tasks of a group, whose mean is the test." in table.notes
