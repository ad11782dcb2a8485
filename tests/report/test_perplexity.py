"""Perplexities: their clustered errors, and the gate's test of them in place of a bare percent."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.errors import ConfigError
from evalengine.report.compare.metric_deltas import metric_deltas
from evalengine.report.gate.page import gate_page
from evalengine.report.gate.planned import AS_SEEN, plan_of
from evalengine.report.gate.policies import Policy, load_policy, parse_policy
from evalengine.report.gate.report import Check, Report, junit, markdown, report_lines, to_json
from evalengine.report.gate.rules import evaluate
from evalengine.report.gate.steps import SEQUENTIAL, ordered_by, steps_of
from evalengine.report.leaderboard.compose import board
from evalengine.report.read.baseline import load_baseline, to_text
from evalengine.report.read.lm_eval import ROLLING
from evalengine.report.read.run import Run
from evalengine.report.stats.loss_bound import loss_bound
from evalengine.report.stats.metric_interval import interval_cautions, metric_interval
from evalengine.report.stats.perplexity import Ratio, loss_stratum, ratio_interval, ratio_stderr
from evalengine.util.document_order import first_of_order, in_order
from tests.report.gate_runs import item, make_run

WORD, BITS = ("text", "word_perplexity", "none"), ("text", "bits_per_byte", "none")
PAGES = 62  # WikiText-2's test split has as many


def pages(rise: float, noise: float, seed: int = 0) -> tuple[Run, Run]:
    """A run of unequal pages at about 3 nats a word, and one that is worse by `rise` nats a word on the whole."""
    rng = np.random.default_rng(seed)
    words = rng.integers(500, 8000, PAGES).astype(float)
    old = -words * rng.normal(3.0, 0.3, PAGES)
    new = old - words * rng.normal(rise, noise, PAGES)
    new -= (rise - (old.sum() - new.sum()) / words.sum()) * words
    return run_of(old, words), run_of(new, words)


def run_of(totals: np.ndarray, words: np.ndarray) -> Run:
    """A run of pages with these log-likelihoods and numbers of words; five bytes are a word."""
    sizes, nats = words * 5, -totals.sum() / words.sum()
    items = [replace(item("text", doc, total=float(total)), kind=ROLLING) for doc, total in enumerate(totals)]
    pairs = [{doc: (float(t), float(w)) for doc, (t, w) in enumerate(zip(totals, weights, strict=True))}
             for weights in (words, sizes)]  # fmt: skip
    return replace(
        make_run({"text": [0.0] * len(totals)}, items),
        scores={}, answers={}, weighted=dict(zip((WORD, BITS), pairs, strict=True)),
        results={WORD: (math.exp(nats), None), BITS: (nats / 5 / math.log(2), None)},
        higher_is_better={WORD: False, BITS: False},
    )  # fmt: skip


def checks(rule: dict[str, Any], a: Run, b: Run) -> dict[str, Check]:
    """Metric -> its check under the rule."""
    results = evaluate(parse_policy({"accuracy": rule}, "test").rule, a, b)
    return {check.name.partition(",")[0]: check for check in results}


def test_a_rise_of_nine_tenths_of_a_percent_that_is_no_noise_does_not_pass() -> None:
    """The rise is 0.90 %, p 0.003 for each metric, below the 1 % that was all the policy required."""
    a, b = pages(math.log(1.009), noise=0.018)
    for rule in ({"max_regression_percent": 1.0}, {}):
        check = checks(rule, a, b)["word_perplexity"]
        assert check.status == "fail" and "(+0.90 %) over 62 documents" in check.message, rule
        assert "a loss is statistically significant (p = 0.00" in check.message
    shipped = {check.name: check for check in evaluate(load_policy("accuracy").rule, a, b)}
    of_words = shipped["word_perplexity,none"]
    assert of_words.status == "undecided"
    assert of_words.message.startswith("a loss is statistically significant (p = 0.00"), "and 1 % is not excluded"
    assert shipped["bits_per_byte,none"].message.startswith("a loss is statistically significant, but"), (
        "0.29 % of the bits"
    )


def test_a_rise_beyond_the_limit_fails() -> None:
    """2 % beside a limit of 1 %: the interval from below lies beyond it."""
    a, b = pages(math.log(1.02), noise=0.018)
    check = checks({"margin": 2.0, "margin_percent": 1.0}, a, b)["word_perplexity"]
    assert check.status == "fail" and check.message.startswith(
        "a loss above the limit is statistically significant (p = "
    )


def test_a_small_rise_is_ruled_out_or_not_by_its_spread() -> None:
    rule = {"margin": 2.0, "margin_percent": 1.0}
    steady, noisy = (checks(rule, *pages(0.001, noise))["word_perplexity"] for noise in (0.005, 0.1))
    assert (steady.status, noisy.status) == ("pass", "undecided")
    assert steady.detects.startswith("Excluded at 95 %: losses above 0.")
    assert "% is not excluded (limit 1); " in noisy.message


def test_equal_log_likelihoods_pass_and_better_ones_do() -> None:
    a, b = pages(-0.02, 0.001)
    for run in (a, b):
        assert checks({"margin": 1.0, "margin_percent": 0.5}, a, run)["word_perplexity"].status == "pass"


def test_bits_per_byte_is_the_same_in_percent_of_its_value() -> None:
    a, b = pages(0.03, 0.001)
    by_metric = checks({}, a, b)
    assert "(+3.05 %)" in by_metric["word_perplexity"].message and "(+0.97 %)" in by_metric["bits_per_byte"].message
    assert {check.status for check in by_metric.values()} == {"fail"}


def test_a_baseline_from_before_files_held_weights_is_tested_too(tmp_path: Path) -> None:
    a, b = pages(math.log(1.009), noise=0.018)
    old, new = (tmp_path / name for name in ("old.json", "new.json"))
    new.write_text(to_text(replace(a, kind="run", weighted=a.weighted)))
    old.write_text(to_text(replace(a, kind="run", weighted={})))
    assert '"weighted"' in new.read_text() and '"weighted"' not in old.read_text()
    assert load_baseline(new).weighted == a.weighted
    messages = [checks({}, load_baseline(file), b)["word_perplexity"].message for file in (old, new)]
    assert messages[0] == messages[1] and "after Holm" in messages[0]


def test_what_no_run_holds_the_parts_of_is_a_bare_value_and_undecided_with_a_margin() -> None:
    a, b = (replace(run, weighted={}) for run in pages(0.002, 0.001))
    check = checks({"margin": 1.0, "margin_percent": 1.0}, a, b)["word_perplexity"]
    assert check.status == "undecided" and "without a spread" in check.message
    other = replace(a, results={WORD: (7.0, None), BITS: (3.0, None)}, weighted=b.weighted)
    assert "one value, no spread" in checks({"max_regression_percent": 1.0}, other, other)["word_perplexity"].detects


def test_the_error_of_a_ratio_by_hand_and_by_the_jackknife() -> None:
    totals, weights = np.array([-6.0, -10.0, -9.0]), np.array([2.0, 3.0, 4.0])
    # theta = 25 / 9; residuals 6 - 50/9, 10 - 75/9, 9 - 100/9; weights of 2, 3 and 4 ninths
    by_hand = math.sqrt((4 / 9) ** 2 / (7 / 9) + (15 / 9) ** 2 / (6 / 9) + (19 / 9) ** 2 / (5 / 9)) / 9
    assert ratio_stderr(totals, weights, np.arange(3)) == pytest.approx(by_hand, rel=1e-12)
    rng = np.random.default_rng(0)
    weights = rng.uniform(5, 20, 90)
    codes = np.repeat(np.arange(30), 3)
    totals = -weights * (3 + rng.normal(size=30)[codes])
    left_out = [-totals[codes != g].sum() / weights[codes != g].sum() for g in range(30)]
    jackknife = math.sqrt(29 / 30 * np.sum((np.array(left_out) - np.mean(left_out)) ** 2))
    assert ratio_stderr(totals, weights, codes) == pytest.approx(jackknife, rel=0.05)
    assert ratio_stderr(totals, weights, np.arange(90)) < 0.8 * jackknife, "documents of a cluster are alike"


def test_few_or_heavy_pages_are_said_beside_the_interval() -> None:
    """20 pages whose nats are skewed cover .82 of the time, 62 of them .88; nothing said so."""
    rng = np.random.default_rng(0)
    words = rng.uniform(2000, 6000, 200)
    totals = -words * rng.normal(3.0, 0.3, 200)
    assert interval_cautions(run_of(totals, words), WORD) == []
    few = run_of(totals[:20], words[:20])
    assert interval_cautions(few, WORD) == ["20 documents cannot show heavy tails; the interval may be too narrow"]
    totals[0] *= 40
    assert interval_cautions(run_of(totals, words), WORD)[0].startswith("as few as 1.0 documents make the spread; ")


def test_the_interval_covers() -> None:
    """62 unequal pages around 3 nats: 3 sigma of 600 draws are 2.7 points."""
    rng, inside = np.random.default_rng(1), 0
    for _ in range(600):
        words = rng.lognormal(7, 0.8, PAGES)
        nats = 3 + 0.3 * rng.normal(size=PAGES)
        _, low, high = ratio_interval(Ratio("perplexity", -words * nats, words), np.arange(PAGES))
        inside += low <= math.exp(3.0) <= high
    assert inside / 600 == pytest.approx(0.95, abs=0.03)


def test_a_run_shows_its_interval() -> None:
    a, _ = pages(0.0, 0.0)
    bounds = metric_interval(a, WORD)
    assert bounds is not None and bounds[0] < a.results[WORD][0] < bounds[1]
    related = replace(a, clusters={"text": {doc: str(doc // 4) for doc in range(PAGES)}})
    assert metric_interval(related, WORD) not in (None, bounds)
    assert metric_interval(replace(a, weighted={}), WORD) is None


def test_a_true_rise_of_the_margin_passes_seldom() -> None:
    """1 % on 62 pages with noise: 3 sigma of 1000 draws are 2.1 points."""
    rng, passed, codes = np.random.default_rng(2), 0, np.arange(PAGES)
    for _ in range(1000):
        words = rng.integers(500, 8000, PAGES).astype(float)
        old = -words * rng.normal(3.0, 0.3, PAGES)
        new = old - words * rng.normal(math.log(1.01), 0.02, PAGES)
        worse = loss_stratum(Ratio("perplexity", old, words), Ratio("perplexity", new, words), codes)
        passed += loss_bound([worse], 0.0, 0.05).bound <= math.log(1.01)
    assert 0.005 < passed / 1000 <= 0.05 + 0.021


LAMBADA = ("lambada", "perplexity", "none")


def lambada(shift: float) -> Run:
    """LAMBADA's perplexity of documents with log-likelihoods of about `shift` - 2, which jitter by 0.01."""
    jitter = np.random.default_rng(1 if shift else 2).normal(shift, 0.01, 300)
    values = np.minimum(0, np.random.default_rng(0).normal(-2, 0.3, 300) + jitter)
    run = make_run({"lambada": [0.0] * 300}, total=-1.5 + shift)
    return replace(run, scores={LAMBADA: dict(enumerate(values.tolist()))}, answers={},
                   results={LAMBADA: (math.exp(-float(values.mean())), None)}, higher_is_better={LAMBADA: False},
                   hashes={"lambada": {doc: (f"d{doc}", f"p{doc}", f"t{doc}") for doc in range(300)}})  # fmt: skip


@pytest.mark.parametrize(("shift", "status"), [(-0.5, "fail"), (-0.001, "pass"), (0.5, "pass")])
def test_lambadas_perplexity_is_judged_as_one(shift: float, status: str) -> None:
    """Its sign was reversed: 7.4 -> 12.1 passed, 7.4 -> 4.5 failed; and its loss was one of 50 "points"."""
    a, b = lambada(0.0), lambada(shift)
    (check,) = evaluate(load_policy("accuracy").rule, a, b)
    assert check.status == status and check.unit == "%" and " %) over 300 documents" in check.message
    assert check.loss == pytest.approx(100 * math.expm1(-shift), rel=0.1, abs=0.3) and not check.cautions
    if status == "fail":
        worse = [doc for doc, value in a.scores[LAMBADA].items() if b.scores[LAMBADA][doc] < value]
        assert check.details[0] == f"document {worse[0]} got worse"
    whole, documents = metric_deltas(a, b)
    assert (whole.higher_is_better, documents.higher_is_better, documents.nats) == (False, True, True)
    assert documents.paired is not None
    assert (documents.paired.p_one_sided < 0.01) == (documents.paired.losses > 290) == (shift == -0.5)
    c = board([a, b], ["a", "b"]).contests[0]
    assert [score is not None and score.interval is not None for score in c.scores] == [True, True]
    if abs(shift) == 0.5:
        assert c.leader == (0 if shift < 0 else 1)


def test_a_likelihood_metric_without_pairs_or_sums_is_never_a_mean() -> None:
    a = lambada(0.0)
    fewer = replace(a, scores={LAMBADA: dict([*a.scores[LAMBADA].items()][1:])})
    for b, why in (
        (fewer, "1 document has a value in one of the two only"),
        (replace(lambada(-0.1), results={LAMBADA: (math.nan, None)}), "not a number: "),
        (replace(lambada(-0.1), results={}), "missing from the run"),
    ):
        (check,) = evaluate(load_policy("accuracy").rule, a, b)
        assert check.status == "fail" and why in check.message
    average = {"accuracy": {"averages": {"m": {"tasks": ["lambada"], "metric": "perplexity", "margin": 1.0}}}}
    with pytest.raises(ConfigError, match="no such metric with a score per document"):
        evaluate(parse_policy(average, "test").rule, a, a)


def test_a_mean_of_perplexities_waits_for_no_spread_that_it_cannot_have() -> None:
    """The group stayed undecided once bits changed, however much better its tasks were."""
    group, second = ("both", *LAMBADA[1:]), ("second", *LAMBADA[1:])

    def two(rise: float, value: float | None = None) -> Run:
        run = lambada(rise)
        scores = {LAMBADA: run.scores[LAMBADA], second: run.scores[LAMBADA]}
        own = run.results[LAMBADA][0]
        results = {LAMBADA: (own, None), second: (own, None), group: (own if value is None else value, None)}
        return replace(run, scores=scores, results=results, groups={"both": ["lambada", "second"]},
                       higher_is_better=dict.fromkeys(results, False))  # fmt: skip

    def judged(b: Run, **tasks: dict[str, Any]) -> dict[str, str]:
        rule = parse_policy({"accuracy": {"margin_percent": 1.0, "tasks": tasks}}, "test").rule
        return {check.task: check.status for check in evaluate(rule, two(0.0), b)}

    for b, status in ((two(0.5), "pass"), (two(-0.5), "fail")):
        assert judged(b) == {"both": "skip", "lambada": status, "second": status}
    assert judged(two(0.5, math.nan))["both"] == "fail", "its own value is damaged"
    assert judged(two(-0.5), both={"max_regression_percent": 5.0})["both"] == "fail", "the policy limits its value"
    assert judged(two(0.5), second={"skip": True})["both"] == "undecided", "a task of it is not judged"
    assert judged(two(0.5), both={"margin_percent": 0.5})["both"] == "undecided", "its tasks may lose more"
    plan = plan_of(load_policy("accuracy"), two(0.0), (AS_SEEN,), [(two(0.0), two(0.5))])
    assert len(plan.checks) == 2 and not any(check.why for check in plan.checks)


def test_lambadas_perplexity_is_judged_after_the_last_step() -> None:
    """Betting bounds are for shares: a perplexity waits until all documents are evaluated."""
    policy, a, worse = load_policy("accuracy"), lambada(0.0), lambada(-0.5)
    order = first_of_order(in_order(ordered_by(a), "lambada", range(300), None), 300)
    for count, status in ((100, "undecided"), (300, "fail")):
        scores = {doc: worse.scores[LAMBADA][doc] for doc in order[:count]}
        value = math.exp(-sum(scores.values()) / count)
        identity = {**a.identity, SEQUENTIAL: {"step": 100, "baseline": ordered_by(a)}}
        b = replace(worse, identity=identity, scores={LAMBADA: scores}, results={LAMBADA: (value, None)})
        steps = steps_of(policy, a, b)
        assert steps is not None
        (check,) = evaluate(policy.rule, steps.part, b, steps)
        assert check.status == status and ("once all documents are evaluated" in check.message) == (count < 300)


def test_lambadas_perplexity_is_planned_by_two_runs() -> None:
    rule = Policy("own", load_policy("accuracy").rule)
    (check,) = plan_of(rule, lambada(0.0), (0.0,)).checks
    assert "known only from two runs" in check.why and check.limit == "1 %"
    (check,) = plan_of(rule, lambada(0.0), (AS_SEEN,), [(lambada(0.0), lambada(0.001))]).checks
    assert check.needs[0] is not None and 10 < check.needs[0] < 300


def test_a_gate_says_why_its_bound_may_be_too_narrow() -> None:
    """One page makes the spread, or few clusters do: the short line and the machine-readable forms say so."""
    a, b = pages(0.0, 0.0001)
    totals = {doc: total for doc, (total, _) in b.weighted[WORD].items()}
    words = np.array([weight for _, weight in a.weighted[WORD].values()])
    b = run_of(np.array([*totals.values()]) - np.where(np.arange(PAGES) == 5, 0.02 * words, 0), words)
    check = checks({"margin": 2.0, "margin_percent": 1.0}, a, b)["word_perplexity"]
    assert check.status == "pass" and check.cautions[0].startswith("as few as 1.")
    few = {"text": {doc: str(doc % 15) for doc in range(300)}}
    old = make_run({"text": [1.0, 0.0] * 150})
    new = replace(make_run({"text": [1.0, 0.0] * 150}, total=-1.6), clusters=few)
    (clustered,) = evaluate(parse_policy({"accuracy": {"margin": 25.0}}, "test").rule, old, new)
    assert clustered.status == "pass" and clustered.cautions[0].startswith("15 clusters are few")
    for one in (check, clustered):
        assert one.line == f"{one.brief}; caution: {one.cautions[0]}" and one.text.endswith(one.cautions[0])
    report = Report("pass", "own", "", "a", "b", checks=(clustered,))
    terminal = "\n".join(map(str, report_lines(report)))
    for text, times in ((markdown(report), 1), (gate_page(report).render(), 1), (terminal, 1), (junit(report), None)):
        count = text.count("caution: 15 clusters are few; intervals and bounds may be too narrow")
        assert count == times if times else count
    assert to_json(report).count("clusters are few") == 1
    assert json.loads(to_json(report))["checks"][0]["cautions"] == [*clustered.cautions]
