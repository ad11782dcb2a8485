"""What a gate can detect: never more than the baseline has to lose, and as often as it says."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalengine.report.stats.detectable import Detectable, binary_effect, binary_loss, loss_power, mean_effect
from evalengine.report.stats.loss_bound import loss_bound, stratum
from evalengine.report.stats.paired import paired
from evalengine.report.stats.significance import mcnemar
from tests.report.paired_counts import exact_mcnemar


def detectable(
    a: Any, b: Any, higher_is_better: bool = True, alpha: float = 0.05, power: float = 0.8, metrics: int = 1
) -> Detectable:
    """The least detectable loss, or why there is none."""
    result = paired(a, b, higher_is_better=higher_is_better, alpha=alpha, power=power, metrics=metrics)
    return Detectable(result.minimum_detectable_loss, result.undetectable)


def test_loss_power_by_enumeration() -> None:
    """All outcomes of 6 right answers, lost with probability 0.7, and of 5 wrong ones, won with probability 0.2."""
    expected = 0.0
    for lost, won in itertools.product(range(7), range(6)):
        if exact_mcnemar(won, lost)[1] <= Fraction(1, 20):
            ways = math.comb(6, lost) * math.comb(5, won)
            expected += ways * 0.7**lost * 0.3 ** (6 - lost) * 0.2**won * 0.8 ** (5 - won)
    assert loss_power(11, 6, 0.7 * 6 / 11, 0.2 * 5 / 11, 0.05) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("size", "right", "metrics", "seen"),
    [(1.0, 0, 1, False), (1.0, 4, 1, False), (1.0, 5, 1, True), (1.0, 5, 2, False), (1.0, 6, 2, True),
     (0.75, 0, 1, False), (0.75, 6, 1, False), (0.75, 7, 1, True), (0.75, 7, 2, False), (0.75, 8, 2, True)],
)  # fmt: skip
@pytest.mark.parametrize("higher", [True, False])
def test_a_loss_of_everything_decides(size: float, right: int, metrics: int, seen: bool, higher: bool) -> None:
    """p of losing n answers and winning none is 2^-n: four cannot be shown at 0.05, five can (McNemar). Of other scores
    the bound of the loss decides: 7 losses of 0.75 in 40 documents are the fewest that it places above 0."""
    good, bad = (1.0, 1.0 - size) if higher else (0.0, size)
    gain = [good] * right + [bad] * (40 - right)
    a = [score - bad for score in gain] if higher else [score + 1.0 - bad for score in gain]
    for b in (a, [0.0 if higher else 1.0] * 40):
        least = detectable(a, b, higher, metrics=metrics)
        assert math.isfinite(least.loss) is seen and bool(least.why) is not seen
        if seen:
            assert 0 < least.loss <= right * size / 40 + 1e-12


def test_why_no_loss_is_detectable_is_said() -> None:
    assert detectable([0] * 40, [0] * 40).why == "the baseline has no right answer"
    assert "only 1 right answer, and a run that lost it would have p 0.5," in detectable([1] + [0] * 9, [0] * 10).why
    lower = detectable([0] * 3 + [1] * 9, [1] * 12, higher_is_better=False, metrics=4).why
    assert "only 3 scores that can get worse" in lower and lower.endswith("p 0.125, above alpha 0.05 / 4 metrics")


def test_near_the_border_the_answers_are_as_they_are() -> None:
    """Five right answers must all be lost: with probability q^5 = 0.8. Drawn anew, they would need 3.3 points."""
    a = [1] * 5 + [0] * 195
    assert detectable(a, a).loss == pytest.approx(5 / 200 * 0.8**0.2, rel=1e-6)
    assert binary_effect(200, 0.0, 0.05, 0.8, sides=1) > 5 / 200


def test_far_from_the_border_a_loss_is_what_pairs_alone_show() -> None:
    rng = np.random.default_rng(0)
    a = (rng.random(2000) < 0.5).astype(float)
    b = np.where(rng.random(2000) < 0.1, 1 - a, a)
    of_pairs = binary_effect(2000, float(np.mean(a != b)), 0.05, 0.8, sides=1)
    assert detectable(a, b).loss == pytest.approx(of_pairs, rel=0.05)


@pytest.mark.parametrize(("right", "discordance"), [(12, 0.02), (30, 0.1), (200, 0.1), (370, 0.1)])
def test_a_loss_is_detected_as_often_as_said(right: int, discordance: float) -> None:
    """Right answers lost and others won at the least detectable rates; 3 sigma of 2000 draws."""
    rng, n, draws = np.random.default_rng(1), 400, 2000
    test = functools.cache(mcnemar)  # The same counts are drawn again and again.
    loss = binary_loss(n, right, discordance, 0.05, 0.8)
    win = max(0.0, (discordance - loss) / 2)
    losses = rng.binomial(right, (win + loss) * n / right, draws)
    wins = rng.binomial(n - right, win * n / (n - right), draws)
    detected = sum(test(int(w), int(x))[1] <= 0.05 for w, x in zip(wins, losses, strict=True)) / draws
    assert detected == pytest.approx(0.8, abs=3 * math.sqrt(0.16 / draws))


def test_other_scores_end_at_what_there_is_to_lose() -> None:
    """Twelve scores of 0.9 in 200: the pairs' error would ask for more than 0.054, which is all."""
    a, b = np.array([0.9] * 12 + [0.0] * 188), np.array([0.0] * 12 + [0.9] * 8 + [0.0] * 180)
    assert detectable(a, b).loss == pytest.approx(12 * 0.9 / 200)
    whole = stratum(a - b, np.arange(200))
    assert mean_effect(whole.parts, loss_bound([whole], 1.0, 0.05, 1.0), 1.0, 1.0, 0.05, 0.8, 1) > 12 * 0.9 / 200


def test_scores_without_bounds_may_lose_any_amount() -> None:
    a, b = np.linspace(0.0, 30.0, 50), np.linspace(0.5, 30.0, 50)
    up, down = (detectable(a, b, higher).loss for higher in (True, False))
    assert up == down >= 1.67 * paired(a, b).stderr, "any document may lose any amount, in either direction"
    assert "only 4 scores that can get worse" in detectable([3.0, 5.0, 7.0, 9.0], [1.0, 2.0, 3.0, 4.0]).why


share = st.sampled_from([0.0, 1.0]) | st.integers(0, 8).map(lambda v: v / 8)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(share, share), min_size=1, max_size=40)
    | st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40),
    higher=st.booleans(),
    levels=st.sampled_from([(0.05, 0.8), (0.05, 0.06), (0.3, 0.99), (0.6, 0.8)]),
    metrics=st.integers(1, 9),
)
def test_a_detectable_loss_is_never_more_than_there_is_to_lose(
    rows: list[tuple[float, float]], higher: bool, levels: tuple[float, float], metrics: int
) -> None:
    a, b = zip(*rows, strict=True)
    least = detectable(a, b, higher, *levels, metrics)
    mean = math.fsum(a) / len(a)
    everything = paired(a, [0.0 if higher else 1.0] * len(a), higher_is_better=higher).p_one_sided
    assert bool(least.why) is math.isinf(least.loss)
    if math.isfinite(least.loss):
        assert 0 < least.loss <= (mean if higher else 1 - mean) + 1e-12
    if everything == 1.0:  # there is nothing to lose
        assert math.isinf(least.loss)
