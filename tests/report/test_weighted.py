"""Perplexities: a difference is of the same documents, or there is none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.harness.metrics import bits_per_byte, weighted_perplexity
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.compare import compare
from evalengine.report.compare.metric_deltas import MetricDelta, metric_deltas, ratio_value
from evalengine.report.compare.report import report
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.read.baseline import to_text
from evalengine.report.read.load import load_run
from evalengine.report.read.run import Run, ScoreKey
from evalengine.util.sheet import Sheet
from tests.report.compared_runs import KEY, TASK, run
from tests.report.page_content import words
from tests.report.test_rolling import rolling

WORDS = {0: 2.0, 1: 4.0, 2: 3.0, 3: 5.0}  # the words of each document
PPL, BITS = (TASK, "word_perplexity", "none"), (TASK, "bits_per_byte", "none")
BETTER = {0: -4.0, 1: -6.0, 2: -9.0, 3: -20.0}  # the log-likelihood of each document
WORSE = {0: -4.5, 1: -7.0, 2: -9.0, 3: -21.0}


def perplexities(sums: Mapping[int, float], words: Mapping[int, float] = WORDS, held: bool = True) -> Run:
    """A run of these documents, a window each. held: whether it tells what its perplexities are made of."""
    base = rolling({doc: [[value]] for doc, value in sums.items()})
    pairs = {doc: (value, words[doc]) for doc, value in sums.items()}
    results: dict[ScoreKey, tuple[float, float | None]] = {
        PPL: (weighted_perplexity([*pairs.values()]), None),  # type: ignore[arg-type]
        BITS: (bits_per_byte([*pairs.values()]), None),  # type: ignore[arg-type]
    }
    made = {"results": results, "higher_is_better": dict.fromkeys(results, False)}
    return replace(base, weighted={PPL: pairs, BITS: pairs} if held else {}, **made)  # type: ignore[arg-type]


def metric(deltas: list[MetricDelta], key: ScoreKey) -> MetricDelta:
    """The delta of this metric."""
    return next(m for m in deltas if m.key == key)


def test_the_formulas_are_those_of_the_run() -> None:
    pairs = [(value, int(WORDS[doc])) for doc, value in BETTER.items()]
    assert ratio_value("word_perplexity", pairs) == weighted_perplexity(pairs)
    assert ratio_value("bits_per_byte", pairs) == bits_per_byte(pairs)
    assert ratio_value("word_perplexity", [(-1e6, 1.0)]) == math.inf


def test_the_same_documents_are_compared_as_reported() -> None:
    a, b = perplexities(BETTER), perplexities(WORSE)
    delta = metric(metric_deltas(a, b), PPL)
    assert (delta.common_a, delta.common_b) == (a.results[PPL][0], b.results[PPL][0]) and not delta.apart
    assert delta.difference == b.results[PPL][0] - a.results[PPL][0] > 0


def test_of_other_documents_the_common_ones_are_compared() -> None:
    """One run holds four documents and the other two of them."""
    a, b = perplexities(BETTER), perplexities({0: WORSE[0], 1: WORSE[1]})
    c = compare(a, b)
    delta = metric(c.metrics, PPL)
    expected = math.exp((4.0 + 6.0) / 6), math.exp((4.5 + 7.0) / 6)
    assert (delta.common_a, delta.common_b) == pytest.approx(expected, rel=1e-15)
    assert delta.difference == pytest.approx(expected[1] - expected[0])
    bits = metric(c.metrics, BITS)
    assert bits.common_a == pytest.approx(10.0 / 6 / math.log(2))
    assert abs(delta.difference or 0) < abs(b.results[PPL][0] - a.results[PPL][0]), "which was no like with like"
    lines = [line for line in report(c) if isinstance(line, str)]
    assert any("sums, word_perplexity, none: over the documents of both runs; as reported" in line for line in lines)
    table = [t for t in report(c) if isinstance(t, Sheet)][-1]
    columns = dict(zip(table.head, zip(*table.rows, strict=True), strict=True))
    assert columns["A"][1] == f"{expected[0]:.4f}" and columns["B - A"][1] == f"{expected[1] - expected[0]:+.4f}"
    windows = c.metrics[-1]
    assert (windows.common_a, windows.common_b) == (-5.0, -5.75), "their log-likelihoods too"


@pytest.mark.parametrize("held", [(False, True), (True, False), (False, False)])
def test_what_cannot_be_paired_is_not_subtracted(held: tuple[bool, bool]) -> None:
    a, b = perplexities(BETTER, held=held[0]), perplexities({0: -4.5, 1: -7.0}, held=held[1])
    c = compare(a, b)
    delta = metric(c.metrics, PPL)
    why = "A's is of 4 documents and B's of 2, of which they share 2, and nothing says what each of them adds"
    assert delta.difference is None and delta.apart == why
    assert f"sums, word_perplexity, none: no difference is given: {why}." in [*report(c)]
    content = next(m for m in comparison_json(c)["metrics"] if m["metric"] == "word_perplexity")
    assert (content["delta"], content["no_delta_because"]) == (None, why) and content["a"] is not None
    assert why in words(comparison_page(c))


def test_documents_of_the_same_number_that_are_others_are_left_out() -> None:
    a, b = perplexities(BETTER), perplexities(WORSE, words={**WORDS, 3: 6.0})
    delta = metric(metric_deltas(a, b), PPL)
    assert delta.left_out == 1 and delta.common_a == pytest.approx(math.exp(19.0 / 9))
    other = {doc: (f"other{doc}" if doc < 2 else h[0], *h[1:]) for doc, h in b.hashes[TASK].items()}
    changed = replace(perplexities(WORSE), hashes={TASK: other})
    delta = metric(metric_deltas(a, changed), PPL)
    assert delta.left_out == 2 and delta.common_b == pytest.approx(math.exp(30.0 / 8))
    assert metric_deltas(a, changed)[-1].paired.n == 2  # type: ignore[union-attr]
    lacking = replace(changed, weighted={})
    assert metric(metric_deltas(a, lacking), PPL).apart.startswith("2 of 4 documents differ in content")
    every = replace(changed, hashes={TASK: {doc: (f"other{doc}", *h[1:]) for doc, h in b.hashes[TASK].items()}})
    delta = metric(metric_deltas(a, every), PPL)
    assert delta.difference is None and delta.apart == "the runs share no document that this is a number of"


def test_a_value_that_its_parts_do_not_give_is_not_made_anew() -> None:
    a, b = perplexities(BETTER), perplexities({0: -4.5, 1: -7.0})
    odd = replace(a, results={**a.results, PPL: (12.5, None)})
    assert metric(metric_deltas(odd, b), PPL).difference is None


def test_scores_of_other_documents_are_means_of_the_common_ones() -> None:
    outputs = {doc: ([doc + 1], [-0.5]) for doc in range(4)}
    a, b = run(outputs, scores={3: 0.0}), run({doc: outputs[doc] for doc in (2, 3)}, scores={2: 0.0})
    delta = metric(compare(a, b).metrics, KEY)
    assert (delta.value_a, delta.common_a, delta.common_b, delta.difference) == (0.75, 0.5, 0.5, 0.0)
    single = metric(compare(a, run({2: outputs[2]}, scores={2: 0.0})).metrics, KEY)
    assert single.paired is None and (single.common_a, single.common_b, single.difference) == (1.0, 0.0, -1.0)
    (line,) = [str(line) for line in report(compare(a, b)) if "over the documents of both runs" in str(line)]
    assert line.endswith("as reported, over all of each: 0.7500 and 0.5000.")


def test_values_of_groups_are_refused_over_other_documents() -> None:
    group = ("a_group", "acc", "none")
    outputs = {doc: ([doc + 1], [-0.5]) for doc in range(4)}
    a, b = (replace(run(o), results={group: (0.5, None)}) for o in (outputs, {0: outputs[0], 1: outputs[1]}))
    assert metric(metric_deltas(a, b), group).apart.startswith("A's is of 4 documents and B's of 2")
    assert metric(metric_deltas(a, a), group).difference == 0.0


def test_a_metric_that_is_no_mean_of_its_numbers_is_not_given_their_statistics() -> None:
    """lm-eval's `perplexity` of lambada: exp(-mean) of log-likelihoods."""
    key = (TASK, "perplexity", "none")
    values = {0: -1.0, 1: -2.0, 2: -4.0}
    runs = []
    for shift in (0.0, -0.5):
        moved = {doc: value + shift * doc for doc, value in values.items()}
        base = run({doc: ([1], [value]) for doc, value in moved.items()}, kind="loglikelihood")
        mean = math.fsum(moved.values()) / 3
        runs.append(replace(base, scores={key: moved}, results={key: (math.exp(-mean), None)}))
    whole, documents = metric_deltas(*runs)
    assert whole.paired is None and whole.difference == pytest.approx(math.exp(17 / 6) - math.exp(7 / 3))
    assert documents.key == (TASK, "perplexity per document", "none") and documents.nats
    assert documents.paired is not None and documents.difference == pytest.approx(-0.5)


def test_a_baseline_carries_what_perplexities_are_made_of(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    a = replace(perplexities({**BETTER, 3: float("-inf")}), kind="lm-eval", digest=None)
    file.write_text(to_text(a), encoding="utf-8")
    assert load_run(file).weighted == a.weighted
    content = json.loads(to_text(perplexities(BETTER)))
    assert [row[3] for row in content["weighted"]] == [4, 4]
