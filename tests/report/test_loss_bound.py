"""The bound of a loss: by hand, its errors by enumeration and simulation, and what a plain one would get wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.statistics_cases import bonett_price_bound, passing
from evalengine.report.compare.metric_deltas import metric_deltas
from evalengine.report.gate.evidence import TESTS, Mean
from evalengine.report.gate.policies import Limits
from evalengine.report.read.groups import members_of_both
from evalengine.report.read.run import Run
from evalengine.report.stats import significance
from evalengine.report.stats.detectable import Detectable
from evalengine.report.stats.intervals import clustered_stderr
from evalengine.report.stats.loss_bound import LossBound, Losses, Stratum, bound_cautions, joined, loss_bound, stratum
from evalengine.report.stats.metric_interval import scaled
from evalengine.report.stats.paired import paired
from evalengine.report.stats.pass_probability import Design
from tests.report.gate_runs import METRIC, make_run
from tests.report.paired_counts import binary

ALPHA = 0.05


def bound_of(losses: np.ndarray, codes: np.ndarray | None = None, alpha: float = ALPHA) -> LossBound:
    """The bound of these documents' losses; each is a cluster of its own where `codes` are not given."""
    codes = np.arange(len(losses)) if codes is None else codes
    return loss_bound([stratum(losses.astype(float), codes)], 1.0, alpha)


def test_the_bound_by_hand() -> None:
    """3 lost and 1 won of 50: parts of +-1/50, all of one size, so t = 1/50."""
    losses = np.array([1.0] * 3 + [-1.0] + [0.0] * 46)
    result, t, z = bound_of(losses), 1 / 50, 1.6448536269514722
    assert (result.loss, result.groups) == (pytest.approx(2 / 50), 50)
    assert result.stderr == pytest.approx(np.std(losses, ddof=1) / math.sqrt(50))
    assert result.shift == pytest.approx((z * z + 2) / 3) and result.unit == pytest.approx(t)
    assert result.error == pytest.approx(stats.t.isf(ALPHA, 49) * math.sqrt(result.stderr**2 + t**2))
    assert result.bound == pytest.approx(result.loss + result.shift * t + result.error)


@pytest.mark.parametrize("count", [30, 200, 1319])
def test_no_flip_is_a_little_more_than_the_rule_of_three(count: int) -> None:
    exact = 1 - ALPHA ** (1 / count)  # n documents without a loss leave this one possible
    assert exact < bound_of(np.zeros(count)).bound < 1.15 * exact
    shares = loss_bound([stratum(np.zeros(count), np.arange(count))], 1.0, ALPHA, 1.0)
    assert shares.bound == pytest.approx(exact, rel=1e-12) and shares.p_beyond(exact) == pytest.approx(ALPHA)


def test_one_document_and_one_cluster_rule_out_nothing() -> None:
    for losses, codes in ((np.zeros(1), None), (np.zeros(4), np.zeros(4, dtype=np.intp))):
        result = loss_bound([stratum(losses, np.arange(len(losses)) if codes is None else codes)], 1.0, ALPHA, 1.0)
        assert result.bound == 1.0 and math.isinf(result.error)


def test_repeated_documents_add_nothing() -> None:
    losses = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], size=40, p=[0.1, 0.7, 0.2])
    once, copies = bound_of(losses), bound_of(np.repeat(losses, 5), np.repeat(np.arange(40), 5))
    assert copies.bound == pytest.approx(once.bound) and copies.groups == 40
    assert bound_of(np.repeat(losses, 5)).bound < copies.bound


@pytest.mark.parametrize("flips_seen", [(0, 0), (5, 0), (60, 20)])
def test_the_p_of_a_loss_beyond_the_margin_is_where_the_bound_from_below_meets_it(flips_seen: tuple[int, int]) -> None:
    lost, won = flips_seen
    losses = np.array([1.0] * lost + [-1.0] * won + [0.0] * (400 - lost - won))
    margins = [-0.02, 0.0, 0.01, 0.05, 0.2]
    p_values = [bound_of(losses).p_above(margin) for margin in margins]
    assert p_values == sorted(p_values) and 0 < p_values[0] <= 1 and p_values[-1] == 1.0
    for margin, p in zip(margins, p_values, strict=True):
        if 1e-12 < p < 0.5:
            assert bound_of(losses, alpha=p).below == pytest.approx(margin, abs=1e-9)


def test_a_loss_beyond_the_margin_is_seldom_seen_where_there_is_none() -> None:
    """The true loss is 1.0, 1.5 and 2.0 points under a margin of 2, with 3 % flips besides (1,319 documents): a policy
    that failed on any loss that was shown failed in .42 and .79 of the first two."""
    rng, margin = np.random.default_rng(4), 0.02
    for loss, most in ((0.010, 0.005), (0.015, 0.02), (0.020, ALPHA + 0.021)):
        drawn = rng.choice([1.0, -1.0, 0.0], size=(1000, 1319), p=[0.015 + loss, 0.015, 0.97 - loss])
        assert np.mean([bound_of(row).p_above(margin) <= ALPHA for row in drawn]) <= most
    drawn = rng.choice([1.0, -1.0, 0.0], size=(200, 1319), p=[0.06, 0.015, 0.925])
    assert np.mean([bound_of(row).p_above(margin) <= ALPHA for row in drawn]) > 0.9, "4.5 points are seen"


def test_a_tiny_loss_excludes_no_more_than_none() -> None:
    """One document of 200 at 0.999999 excluded losses of 0.00 points, and 200 equal ones 1.6."""
    nothing, tiny = np.zeros(200), np.array([1e-6] + [0.0] * 199)
    assert bound_of(tiny).bound >= bound_of(nothing).bound > 0.015


def test_jitter_does_not_hide_a_rare_total_loss() -> None:
    """Scores in [0, 1] that move by up to 0.02 everywhere, and 1 % of which are lost whole: the true loss is 1 point,
    as is the margin. A unit of the differences that were seen passed 13 % of these."""
    rng, wrong = np.random.default_rng(5), 0
    for _ in range(1000):
        losses = rng.uniform(-0.02, 0.02, 200)
        losses[rng.random(200) < 0.01] = 1.0
        wrong += bound_of(losses).bound <= 0.01
    assert wrong / 1000 <= ALPHA


def test_strata_are_fixed() -> None:
    """Two tasks of half the weight each: the variance within them counts, a difference between them does not."""
    rng = np.random.default_rng(1)
    low, high = rng.normal(0.0, 1.0, 60), rng.normal(5.0, 1.0, 60)
    codes = np.arange(60)
    apart = loss_bound([stratum(low, codes, 0.5), stratum(high, codes, 0.5)], 1.0, ALPHA)
    assert apart.loss == pytest.approx((low.mean() + high.mean()) / 2)
    expected = math.hypot(*(clustered_stderr(x, codes) / 2 for x in (low, high)))
    assert apart.stderr == pytest.approx(expected, rel=1e-12)
    assert bound_of(np.concatenate((low, high))).stderr > 2 * apart.stderr
    assert loss_bound([stratum(low, codes)], 1.0, ALPHA) == bound_of(low)


def test_the_order_of_documents_does_not_matter() -> None:
    rng = np.random.default_rng(2)
    losses, codes = rng.normal(size=30), rng.permutation(np.repeat(np.arange(10), 3))
    order = rng.permutation(30)
    assert bound_of(losses, codes).bound == pytest.approx(bound_of(losses[order], codes[order]).bound, rel=1e-12)


def our_bound(losses: int, wins: int, count: int) -> float:
    """The bound of a run with so many losses and wins among `count` documents."""
    parts = np.array([1.0] * losses + [-1.0] * wins + [0.0] * (count - losses - wins)) / count
    whole = Stratum(parts, parts - parts.mean(), np.full(count, 1 / count), np.ones(count))
    return loss_bound([whole], 1.0, ALPHA, 1.0).bound


@pytest.mark.parametrize(("count", "margin"), [(100, 0.05), (200, 0.02), (400, 0.02)])
@pytest.mark.parametrize("win", [0.0, 0.002, 0.02])
def test_a_loss_of_the_margin_passes_seldom(count: int, margin: float, win: float) -> None:
    """Exactly, by enumeration: the true loss is the margin, so every pass is false."""
    assert passing(our_bound, count, margin, margin + win, win) <= ALPHA


def test_bonett_and_prices_bound_passes_too_often() -> None:
    """Bonett and Price's bound is not used for this reason, though its two-sided coverage is right."""
    assert passing(bonett_price_bound, 200, 0.02, 0.02, 0.0) > 0.08


def test_the_clustered_bound_is_seldom_wrong_where_clusters_flip_together() -> None:
    """100 clusters of 1 to 9: a tenth lose 30 % of their documents. Without clusters, or without skewness, it is wrong
    far too often; 3 sigma of 1000 draws are two points."""
    rng, draws, wrong = np.random.default_rng(3), 1000, np.zeros(3)
    for _ in range(draws):
        codes = np.repeat(np.arange(100), rng.integers(1, 10, size=100))
        losses = ((rng.random(100) < 0.1)[codes] & (rng.random(len(codes)) < 0.3)).astype(float)
        clustered = bound_of(losses, codes)
        plain = clustered.loss + stats.t.isf(ALPHA, 99) * clustered.stderr
        wrong += [bound <= 0.03 for bound in (clustered.bound, bound_of(losses).bound, plain)]
    assert wrong[0] / draws <= ALPHA + 0.02
    assert (wrong[1:] / draws > 0.07).all(), wrong


@pytest.mark.parametrize("flips_seen", [(0, 0), (5, 0), (3, 9), (60, 20)])
def test_the_risk_is_a_distribution_whose_tails_are_the_two_bounds(flips_seen: tuple[int, int]) -> None:
    lost, won = flips_seen
    bound = bound_of(np.array([1.0] * lost + [-1.0] * won + [0.0] * (400 - lost - won)))
    margins = np.linspace(-0.1, 0.3, 41)
    risks = [bound.p_beyond(margin) for margin in margins]
    assert risks == sorted(risks, reverse=True) and risks[0] > 0.9 and risks[-1] < 0.01
    for margin, p in zip(margins, risks, strict=True):
        assert (p <= ALPHA) == (bound.bound <= margin)
        assert p > 0.5 or bound.p_above(margin) == 1.0
    assert math.isnan(bound_of(np.zeros(1)).p_beyond(0.1)), "one document says nothing of others"


def agree(a: dict[str, list[float]], b: dict[str, list[float]], clusters: int = 1) -> tuple[float, LossBound]:
    """(the largest loss that `compare`'s interval holds, the gate's bound) of runs of one task, or of the mean of two;
    so many documents after each other are related."""
    names = {task: {doc: str(doc // clusters) for doc in range(len(values))} for task, values in a.items()}
    old, new = make_run(a), replace(make_run(b), clusters={})
    old = replace(old, clusters=names if clusters > 1 else {})
    if len(a) == 1:
        result = metric_deltas(old, new)[0].paired
        assert result is not None
        key = ("x", *METRIC)
        return -result.ci_low, Mean("x", "m", ((key, 1.0),), Limits(), {key: True}).evidence(old, new, 1).bound
    keys = {task: (task, *METRIC) for task in a}
    weights = [1 / len(a)] * len(a)
    columns = (scaled([list(run[task]) for task in a], weights) for run in (a, b))
    labels = [f"{task} {name}" for task in a for name in names[task].values()]
    tasks = [(len(a[task]), 1 / len(a)) for task in a]
    parts = tuple((key, 1 / len(a)) for key in keys.values())
    mean = Mean("both", "mean", parts, Limits(), dict.fromkeys(keys.values(), True))
    evidence = mean.evidence(old, new, 1)
    return -paired(*columns, clusters=labels, tasks=tasks).ci_low, evidence.bound


@pytest.mark.parametrize(("count", "wins", "losses"), [
    (8, 0, 0), (8, 0, 1), (8, 3, 5), (24, 0, 0), (24, 0, 3), (24, 1, 0), (24, 3, 5), (400, 0, 0), (400, 0, 1),
    (400, 3, 5), (400, 30, 60)])  # fmt: skip
@pytest.mark.parametrize("kind", ["0/1", "partial", "clusters", "two tasks"])
def test_compare_excludes_no_loss_that_the_gate_does_not(count: int, wins: int, losses: int, kind: str) -> None:
    """At 95 %, two-sided and one-sided; the gate's bound lies no further in than the quantiles do, and one document."""
    old, new = (list(map(float, column)) for column in binary(wins, losses, count - wins - losses))
    if kind == "partial":
        new = [x + (y - x) * (0.1 + 0.8 * doc / count) for doc, (x, y) in enumerate(zip(old, new, strict=True))]
    a, b = {"x": old}, {"x": new}
    if kind == "two tasks":
        a, b = ({**run, "y": [0.5, 0.25] * 20} for run in (a, b))
    largest, gate = agree(a, b, clusters=4 if kind == "clusters" else 1)
    assert largest >= gate.bound - 1e-12
    assert count == 8 or largest <= gate.bound + 0.4 * gate.stderr + gate.unit
    if wins + losses == 0 or (wins == 0 and losses <= 3 and count > 8 and kind == "0/1"):
        assert largest == pytest.approx(gate.bound, rel=1e-12), "few changes: one number"
    if wins + losses == 0 and kind != "clusters" and len(a) == 1:
        assert largest == pytest.approx(1 - ALPHA ** (1 / count), rel=1e-12), "the exact bound"


def random_group(rng: np.random.Generator, kind: str, macro: bool) -> tuple[Run, Run]:
    """Two runs of a group of one to three tasks, some of one document or one cluster."""
    columns: list[dict[str, list[float]]] = [{}, {}]
    clusters = {}
    for number in range(rng.integers(1, 4)):
        count = int(rng.choice([1, 2, 5, 60]))
        old = rng.integers(0, 2, count).astype(float) if kind == "0/1" else rng.random(count).round(2)
        old, changed = (old - 3 if kind == "any" else old), rng.random(count) < rng.choice([0.0, 0.1, 0.4])
        new = np.where(changed, 1 - old if kind == "0/1" else rng.permutation(old), old)
        for column, values in zip(columns, (old, new), strict=True):
            column[f"t{number}"] = values.tolist()
        if rng.random() < 0.4:
            clusters[f"t{number}"] = {doc: f"c{rng.integers(0, 1 + count // 4)}" for doc in range(count)}
    runs = []
    for column, total in zip(columns, (-1.5, -1.6), strict=True):
        parts = [*column.values()]
        value = np.mean([np.mean(own) for own in parts]) if macro else np.mean(np.concatenate(parts))
        run, key = make_run(column, total=total), ("g", *METRIC)
        runs.append(replace(run, groups={"g": [*column]}, results={**run.results, key: (float(value), None)},
                            higher_is_better={**run.higher_is_better, key: True}, clusters=clusters))  # fmt: skip
    return runs[0], runs[1]


@pytest.mark.parametrize("macro", [False, True])
@pytest.mark.parametrize("kind", ["0/1", "shares", "any"])
def test_gate_and_compare_agree_on_a_group_with_tasks_of_one_document(
    kind: str, macro: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of one lies within the interval of the other, and both have the same test."""
    monkeypatch.setattr(significance, "FLIPS", 0)  # each test draws 999 flips
    rng, bounded, exact = np.random.default_rng(5), 0, 0
    for _ in range(40):
        a, b = random_group(rng, kind, macro)
        metric = next(metric for metric in metric_deltas(a, b) if metric.key[0] == "g")
        parts = members_of_both(a, b, metric.key)
        evidence = Mean("g", "mean", tuple(parts), Limits(), dict.fromkeys(a.scores, True)).evidence(a, b, 1)
        if (result := metric.paired) is None:
            assert evidence.count == 1
            continue
        bounded += math.isfinite(evidence.bound.error)
        exact += evidence.test == "exact McNemar"
        assert -result.ci_low >= evidence.bound.bound - 1e-9 or result.ci_low == -math.inf
        assert math.isinf(result.ci_low) is math.isinf(evidence.bound.error), "one cluster says nothing in either"
        assert evidence.p == pytest.approx(result.p_one_sided) and evidence.test == TESTS[result.test_one_sided]
        assert evidence.least == Detectable(result.minimum_detectable_loss, result.undetectable)
    assert bounded > 20 and (exact > 5 or kind != "0/1")


def test_three_clusters_that_did_not_change_are_still_three() -> None:
    """The macro mean of a task of 3 clusters and one of 1,000 documents, of which 5 changed: the degrees of freedom
    were those of the second, since the first had no variance. If clusters of it are lost, the bound was wrong in .08.
    """
    names, changed = [f"x{doc // 10}" for doc in range(30)], (np.arange(1000) < 5).astype(float)
    tasks = [Losses(np.zeros(30), names, 0.5), Losses(changed, [f"y{doc}" for doc in range(1000)], 0.5)]
    strata = joined(tasks)
    assert loss_bound(strata, 1.0, ALPHA).degrees < 2.1
    few = "1003 clusters as uneven as 3.0 equal ones are few; intervals and bounds may be too narrow"
    assert bound_cautions(strata, 1.0) == (few,)
    design = Design(tuple(joined([task._replace(losses=0 * task.losses) for task in tasks])), 1.0, ALPHA, 1.0, 0.0)
    assert [design.passes(design.bound.bound + by) for by in (-1e-9, 1e-9)] == [0.0, 1.0], "a plan counts them alike"


def test_only_log_likelihoods_have_a_caution_about_tails() -> None:
    """Two of 400 documents lose 4 of 10, or 0.4 of 1: the bound allows for a loss of a whole score in both."""
    loss, codes = np.where(np.arange(400) < 2, 0.4, 0.0), np.arange(400)
    assert [bound_cautions([stratum(loss * scale, codes)], scale) for scale in (1.0, 10.0)] == [(), ()]
    assert bound_cautions([stratum(loss, codes)], 0.0)[0].startswith("as few as 2.0 documents make the spread")
    old = np.linspace(0.0, 10.0, 400)
    assert paired(old, old - 10 * loss).cautions == () != paired(old, old - loss, unbounded=True).cautions


def test_an_unseen_change_is_a_caution_only_where_it_matters() -> None:
    """Not if nothing changed, for 0/1 scores of unrelated documents, if 0 is not excluded, or if documents changed by
    about as much as they can. If all of 300 change by about 0.02, one in 300 that loses everything takes that back."""
    half, rng = np.full(300, 0.5), np.random.default_rng(0)
    for old, new in (([0.5] * 8, [0.5] * 8), ([1] * 40, [0] * 30 + [1] * 10), ([1] * 40, [1] * 40)):
        assert paired(old, new).cautions == ()
    assert paired(half, half + rng.normal(0, 0.02, 300)).cautions == ()
    assert paired(half, half + rng.uniform(-0.3, 0.5, 300)).cautions == ()
    result = paired(half, half + rng.normal(0.01, 0.02, 300))
    assert result.cautions == ("a change larger than 0.059 in fewer than 3 in 300 documents would not have been seen",)
    assert result.ci_low > 0.005 and result.ci_high > result.difference + 3 / 300


def test_no_cluster_that_lost_is_no_proof_for_small_ones() -> None:
    """A cluster of half of the documents may be the one that loses: the exact bound knows its share."""
    codes = np.concatenate((np.zeros(50, dtype=np.intp), np.arange(1, 51)))
    bound = loss_bound([stratum(np.zeros(100), codes)], 1.0, ALPHA, 1.0)
    assert bound.lossless == 0.5 and bound.bound > 0.5
    lost = loss_bound([stratum(np.eye(1, 100)[0], np.arange(100))], 1.0, ALPHA, 1.0)
    assert lost.lossless == 0.0
