"""Paired tests against enumerations of their null distributions, edge cases, Holm, and their symmetries."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from evalengine.report.numbers import finite_json
from evalengine.report.stats import significance
from evalengine.report.stats.paired import PairedResult, paired
from evalengine.report.stats.significance import family_p, holm, one_test, sign_flip, tail_bound, tail_p
from tests.report.model_runs import model
from tests.report.paired_counts import binary, exact_mcnemar


@pytest.mark.parametrize(
    ("wins", "losses"), [(0, 0), (0, 1), (5, 0), (0, 6), (7, 1), (1, 7), (16, 6), (10, 10), (3, 40)]
)
def test_mcnemar_is_the_fair_coin(wins: int, losses: int) -> None:
    result = paired(*binary(wins, losses, 12))
    both, worse = exact_mcnemar(wins, losses)
    assert result.test == "mcnemar-exact"
    assert (result.wins, result.losses, result.ties, result.n) == (wins, losses, 12, wins + losses + 12)
    assert result.p_value == pytest.approx(float(both), rel=1e-12)
    assert result.p_one_sided == pytest.approx(float(worse), rel=1e-12)


def test_direction_follows_the_metric() -> None:
    a, b = binary(2, 9, 30)
    up, down = paired(a, b), paired(a, b, higher_is_better=False)
    assert (up.wins, up.losses, down.wins, down.losses) == (2, 9, 9, 2)
    assert up.p_one_sided < 0.05 < 0.95 < down.p_one_sided
    assert (up.difference, up.ci_low, up.ci_high, up.p_value) == (
        down.difference,
        down.ci_low,
        down.ci_high,
        down.p_value,
    )
    a, b = np.arange(30.0) % 2 / 2, np.arange(30.0) % 2 / 2 + np.linspace(0.3, 0.4, 30)
    assert paired(a, b).p_one_sided == 1.0 > 1e-3 > paired(a, b, higher_is_better=False).p_one_sided


@pytest.mark.parametrize(
    "values",
    [
        [0.5],
        [1.0, 2.0],
        [0.1, 0.2, -0.3],
        [3.0, -1.0, 0.5, 0.5, 2.0, 0.0],
        [0.1, 0.2, 0.3, 0.7, -0.6, -0.7, 0.4, -0.4],
        [-2.0, 1.0, 1.5],
    ],
)
def test_sign_flips_by_enumeration(values: list[float]) -> None:
    """All 2^n flips with exact decimal sums, so that equal sums are ties."""
    exact = [Fraction(str(v)) for v in values]
    flips = [
        sum(s * v for s, v in zip(signs, exact, strict=True)) for signs in itertools.product((1, -1), repeat=len(exact))
    ]
    larger = Fraction(sum(f >= sum(exact) for f in flips), len(flips))
    smaller = Fraction(sum(f <= sum(exact) for f in flips), len(flips))
    both, one = sign_flip(np.array(values))
    assert one == pytest.approx(float(larger), rel=1e-12)
    assert both == pytest.approx(float(min(Fraction(1), 2 * min(larger, smaller))), rel=1e-12)


def test_monte_carlo_is_seeded_never_zero_and_near_the_truth() -> None:
    everything = np.linspace(0.5, 1.0, 200)  # all wins: p = 2^-199, far below what can be drawn
    z = everything.sum() / math.sqrt(float(everything @ everything))
    bound = 3.178 * stats.norm.sf(z)  # so that Holm's correction over hundreds of tests does not hide the difference
    assert sign_flip(everything) == pytest.approx((2 * bound, bound), rel=1e-3) and bound < 1e-40
    assert sign_flip(-everything) == pytest.approx((2 * bound, 1.0), rel=1e-3)
    assert 0 < tail_bound(50.0) < 1e-300, "never 0"
    values = np.random.default_rng(3).normal(0.08, 1.0, 400)
    both, one = sign_flip(values, seed=1)
    assert sign_flip(values, seed=1) == (both, one) != sign_flip(values, seed=2)
    z = values.sum() / math.sqrt(float(values @ values))  # central limit theorem over flips
    assert one == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), abs=4 * math.sqrt(0.25 / 9999))


@pytest.mark.parametrize(("count", "share"), [(30, 0.05), (100, 0.03), (500, 0.005)])
def test_rare_losses_that_the_others_make_up_for_are_no_difference(
    count: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """False alarms, counted over the number of documents that lose half a score; the others gain as much in all. One
    side is a gate's without a margin, of a metric of which less is better. If no loss is drawn, there is a caution."""
    monkeypatch.setattr(significance, "FLIPS", 0)  # each test draws 999 flips
    wrong, warned = np.zeros(3), 0.0
    for lost in range(9):
        differences = np.array([-0.5] * lost + [0.5 * share / (1 - share)] * (count - lost))
        old = np.full(count, 0.5)
        result = paired(old, old + differences, higher_is_better=False)
        chance = stats.binom.pmf(lost, count, share)
        alarms = np.array([result.p_value, result.p_one_sided, sign_flip(differences)[0]]) <= 0.05
        wrong += chance * alarms * [not result.cautions, not result.cautions, True]
        assert any(alarms[:2]) or not result.cautions
        warned += chance * bool(result.cautions)
    assert wrong[0] <= 0.05 and wrong[1] <= 0.05 and wrong[2] > 0.1
    assert warned <= (1 - share) ** count + 0.01


def test_the_source_of_a_p_is_named() -> None:
    changes = np.array([0.5] * 60 + [-0.5] * 40 + [0.0] * 300)
    many, half = paired(np.full(400, 0.5), 0.5 + changes), np.full(40, 0.5)
    assert (many.test, many.p_value) == ("permutation", sign_flip(changes)[0])
    few, gain = paired(half, half + 0.01 * (np.arange(40) < 8)), paired(half, half + np.linspace(0.3, 0.4, 40))
    assert few.test == "bound" and few.p_value > 0.05 > sign_flip(np.ones(8))[0]
    assert gain.test == "bound" and gain.p_value <= 1e-4, "drawn p-values do not go so far"


def test_a_p_is_drawn_or_bounded_before_any_flip_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lesser of both had P(p <= 1e-4) of 1.04e-4."""
    rare, common = np.array([1.0] * 60 + [-1.0] * 14), np.array([1.0] * 50 + [-1.0] * 24)
    with monkeypatch.context() as patch:
        patch.setattr(stats, "permutation_test", lambda *_, **__: pytest.fail("drawn"))
        both, one = sign_flip(rare)
    assert one == tail_p(rare) < 1e-4 and both == 2 * one
    assert tail_p(common) is None and sign_flip(common)[1] >= 2e-4, "no drawn p lies below"


def test_drawn_flips_ignore_order_and_count_the_observed_sum() -> None:
    values = np.random.default_rng(6).normal(0.1, 1.0, 90)
    up, down = sign_flip(values)[1], sign_flip(-values)[1]
    assert sign_flip(values[::-1])[1] == up
    assert up * 10_000 == pytest.approx(round(up * 10_000)) and down * 10_000 == pytest.approx(round(down * 10_000))


def test_unit_differences_agree_with_mcnemar() -> None:
    """With equal sizes the flip test counts signs, whatever the clusters' names."""
    sums = np.array([1.0] * 2 + [-1.0] * 9)
    assert sign_flip(sums)[0] == pytest.approx(float(exact_mcnemar(2, 9)[0]), rel=1e-12)


def test_related_items_are_flipped_together() -> None:
    """Eight losses in two documents are two coins, not eight."""
    a, b = [1] * 8 + [1, 0] * 4, [0] * 8 + [1, 0] * 4
    documents = ["x"] * 4 + ["y"] * 4 + list("abcdefgh")
    alone, grouped = paired(a, b), paired(a, b, clusters=documents)
    assert (alone.test, alone.p_value) == ("mcnemar-exact", 2 / 256)
    assert grouped.clusters == 10 and grouped.p_value > 0.4 and grouped.p_one_sided >= 0.25
    assert grouped.stderr > alone.stderr
    assert paired(a, b, clusters=range(16)) == alone  # clusters of one are no clusters


def test_one_item_has_no_standard_error() -> None:
    result = paired([0.25], [0.5])
    assert (result.n, result.wins, result.difference, result.p_value, result.p_one_sided) == (1, 1, 0.25, 1.0, 1.0)
    assert math.isnan(result.stderr) and (result.ci_low, result.ci_high) == (-math.inf, math.inf)
    loss = paired([1], [0])
    assert (loss.p_value, loss.p_one_sided, loss.difference) == (1.0, 0.5, -1.0)
    assert (loss.ci_low, loss.ci_high) == (-math.inf, math.inf)


def test_all_wins_by_hand() -> None:
    result = paired([0] * 50, [1] * 50)
    assert (result.p_value, result.p_one_sided, result.difference) == (2.0**-49, 1.0, 1.0)
    assert result.ci_high == 1.0 and 0.85 < result.ci_low < 0.95


def test_a_constant_shift_is_not_certainty() -> None:
    """0.1 more on every item: the computed spread is rounding (not 0), and the interval must not be. Towards 0 it
    allows for no more than was seen, and says so."""
    a = np.random.default_rng(0).uniform(0.2, 0.8, 40)
    result = paired(a, a + 0.1)
    assert np.std(a + 0.1 - a) > 0 and result.stderr == 0.0
    assert 0.09 < result.ci_low < 0.095 and result.ci_high > 0.13 and result.minimum_detectable_effect > 0.01
    assert result.cautions == ("a change larger than 0.1 in fewer than 3 in 40 documents would not have been seen",)


@pytest.mark.parametrize(
    ("a", "b", "arguments", "message"),
    [
        ([], [], {}, "a is empty"),
        ([1, 0], [1], {}, "a has 2 scores and b has 1"),
        ([1.0, 0.0, 1.0], [1.0, 0.0, math.nan], {}, r"b\[2\] is nan"),
        ([1.0, math.inf], [1.0, 0.0], {}, r"a\[1\] is inf"),
        ([[1.0]], [[1.0]], {}, r"shape \(1, 1\)"),
        ([1, 0], [1, 0], {"clusters": ["x"]}, r"clusters has shape \(1,\)"),
        ([1, 0], [1, 0], {"confidence": 95}, "confidence=95"),
        ([1, 0], [1, 0], {"alpha": 0.0}, "alpha=0.0"),
        ([1, 0], [1, 0], {"alpha": 0.5, "power": 0.4}, "not above alpha"),
    ],
)
def test_odd_scores_and_settings_are_refused(
    a: list[float], b: list[float], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        paired(a, b, **arguments)  # type: ignore[arg-type]


def test_json_holds_no_infinity() -> None:
    text = json.dumps(finite_json(asdict(paired([0.25], [0.5]))), allow_nan=False)
    read = json.loads(text)
    assert read["stderr"] is read["ci_low"] is read["minimum_detectable_effect"] is None
    assert (read["test"], read["difference"], read["n"]) == ("bound", 0.25, 1)


def test_imports_nothing_heavy() -> None:
    program = "import sys, evalengine.report.stats.paired; print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_metrics_of_the_same_numbers_are_one_test() -> None:
    """A task with repeats reports exact_match and avg@8, which are equal for every document."""
    runs = [model("a", {"sums": [1.0, 0.5, 0.0]}), model("b", {"sums": [0.5, 0.5, 0.0]})]
    acc = ("sums", "acc", "none")
    again, other = ("sums", "avg@8", "none"), ("sums", "maj@8", "none")
    rows = [{**run.scores, again: run.scores[acc], other: {**run.scores[acc], 1: 1.0}} for run in runs]
    runs = [replace(run, scores=own) for run, own in zip(runs, rows, strict=True)]
    same = one_test([acc, again, other, ("sums", "f1", "none")], runs)
    assert same[again] == same[acc] == acc and same[other] == other and same["sums", "f1", "none"][1] == "f1"
    assert family_p({acc: 0.01, again: 0.01, other: 0.03}, same) == {acc: 0.02, again: 0.02, other: 0.03}
    assert family_p({again: 0.01, other: 0.03}, same) == {again: 0.02, other: 0.03}, "the first one is not tested"


# --- properties ------------------------------------------------------------------------------------------------------

score = st.sampled_from([0.0, 1.0]) | st.integers(-40, 40).map(lambda v: v / 8)
pairs = st.lists(st.tuples(score, score, st.integers(0, 5)), min_size=1, max_size=25)
binaries = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=25)
MIRRORED = ("p_value", "stderr", "ties", "minimum_detectable_effect")


def close(x: float, y: float) -> bool:
    """Whether two numbers are equal up to rounding, or both NaN."""
    return x == y or (math.isnan(x) and math.isnan(y)) or math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-12)


def compared(rows: list[tuple[float, float, int]], grouped: bool, **arguments: bool) -> PairedResult:
    """The paired result of rows (a, b, group); grouped: whether groups are clusters."""
    a, b, groups = zip(*rows, strict=True)
    return paired(a, b, groups if grouped else None, **arguments)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(rows=pairs | binaries, grouped=st.booleans())
def test_swapping_the_runs_negates_the_difference(rows: list[tuple[float, float, int]], grouped: bool) -> None:
    there = compared(rows, grouped)
    back = compared([(b, a, g) for a, b, g in rows], grouped)
    assert (back.wins, back.losses, back.mean_a) == (there.losses, there.wins, there.mean_b)
    assert close(back.difference, -there.difference)
    assert close(back.ci_low, -there.ci_high) and close(back.ci_high, -there.ci_low)
    assert all(close(getattr(back, name), getattr(there, name)) for name in MIRRORED)
    lower = compared([(b, a, g) for a, b, g in rows], grouped, higher_is_better=False)
    assert lower.p_one_sided == there.p_one_sided or abs(there.difference) < 1e-12  # both are of the same flips


@settings(max_examples=25, deadline=None)
@given(rows=pairs | binaries, grouped=st.booleans(), seed=st.integers(0, 1000))
def test_the_order_of_items_does_not_matter(rows: list[tuple[float, float, int]], grouped: bool, seed: int) -> None:
    shuffled = random.Random(seed).sample(rows, len(rows))
    assert repr(compared(rows, grouped)) == repr(compared(shuffled, grouped))  # repr: NaN equals itself


@settings(max_examples=30, deadline=None)
@given(rows=pairs | binaries, grouped=st.booleans())
def test_every_result_is_sane(rows: list[tuple[float, float, int]], grouped: bool) -> None:
    result = compared(rows, grouped)
    assert result.wins + result.losses + result.ties == result.n == len(rows)
    assert 0 < result.p_value <= 1 and 0 < result.p_one_sided <= 1
    assert result.p_value >= result.p_one_sided or result.p_one_sided > 0.5
    assert result.p_value > 0.05 or result.test == "mcnemar-exact" or not result.ci_low <= 0 <= result.ci_high
    assert result.ci_low <= result.difference <= result.ci_high and result.ci_low < result.ci_high
    assert result.minimum_detectable_effect > 0 and result.minimum_detectable_loss > 0
    assert math.isinf(result.minimum_detectable_loss) is bool(result.undetectable)
    assert close(result.difference, result.mean_b - result.mean_a)
    json.dumps(finite_json(asdict(result)), allow_nan=False)


@settings(max_examples=25, deadline=None)
@given(p=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20))
def test_holm_lies_between_plain_and_bonferroni(p: list[float]) -> None:
    adjusted = holm(p)
    assert all(x <= y <= min(1.0, len(p) * x) + 1e-15 for x, y in zip(p, adjusted, strict=True))
    ordered = [y for _, y in sorted(zip(p, adjusted, strict=True))]
    assert ordered == sorted(ordered)
