"""Standard errors, intervals, false alarms and power of paired comparisons: by hand, by enumeration, by simulation."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from benchmarks.statistics_cases import bonett_price, covers, related_flips, unequal_groups
from evalengine.report.stats import detectable as power
from evalengine.report.stats import intervals
from evalengine.report.stats import paired as statistics
from evalengine.report.stats import significance as permutation
from evalengine.report.stats.loss_bound import Stratum, difference_interval
from evalengine.report.stats.metric_interval import reported_interval
from evalengine.report.stats.paired import paired
from evalengine.report.stats.significance import holm, sign_flip
from tests.report.paired_counts import binary, exact_mcnemar

# --- standard error and intervals ------------------------------------------------------------------------------------


def test_clustered_stderr_by_hand() -> None:
    # d = 1, 3 | 2 | -2, 0, 2 with mean 1: cluster residuals 2, 1, -3 of 2, 1 and 3 in 6
    d, codes = np.array([1.0, 3, 2, -2, 0, 2]), np.array([0, 0, 1, 2, 2, 2])
    by_hand = math.sqrt(4 / (4 / 6) + 1 / (5 / 6) + 9 / (3 / 6)) / 6
    assert intervals.clustered_stderr(d, codes) == pytest.approx(by_hand, rel=1e-14)
    assert intervals.clustered_stderr(d, np.arange(6)) == pytest.approx(np.std(d, ddof=1) / math.sqrt(6), rel=1e-14)
    assert math.isnan(intervals.clustered_stderr(d, np.zeros(6, dtype=np.intp)))


def test_repeated_items_add_nothing() -> None:
    """Copies of a document under its name change no error, interval or p-value; without names the error shrinks."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 11))
    once, copies = paired(a, b), paired(np.repeat(a, 5), np.repeat(b, 5), clusters=np.repeat(np.arange(11), 5))
    for field in ("difference", "stderr", "ci_low", "ci_high", "p_value", "minimum_detectable_effect"):
        assert getattr(copies, field) == pytest.approx(getattr(once, field), rel=1e-9), field
    assert paired(np.repeat(a, 5), np.repeat(b, 5)).stderr < 0.5 * once.stderr


def test_interval_by_hand() -> None:
    """Differences of 2, 4 and 6 in scores of 0 to 6: every part's size is at most that of a whole score, 6 / 3."""
    result = paired([0.0, 0.0, 0.0], [2.0, 4.0, 6.0])
    assert result.stderr == pytest.approx(2 / math.sqrt(3), rel=1e-12)
    error, unseen = 4.302652729696142 * result.stderr, 1.959963984540054 * 2.0 * (1 + 4 / 6)  # t(0.975, 2), z(0.975)
    half = math.sqrt(error**2 + 2 * unseen**2)
    assert (result.ci_low, result.ci_high) == pytest.approx((4 - half, 4 + half), rel=1e-9)


def test_p_and_interval_of_a_published_table() -> None:
    """Airway hyper-responsiveness (Bentur et al. 2009), in Fagerland, Lydersen & Laake 2014: 1, 1, 7, 12."""
    result = paired([1] + [0] + [1] * 7 + [0] * 12, [1] + [1] + [0] * 7 + [0] * 12)
    assert result.p_value == pytest.approx(18 / 256, rel=1e-12) and result.difference == pytest.approx(-6 / 21)
    published = bonett_price(1, 7, 21, 0.95)
    assert published == pytest.approx((-0.5084, -0.0134), abs=1e-4)
    assert result.ci_low < published[0] and result.ci_high > 0 > published[1]  # as p > 0.05 says


@functools.cache
def counted_intervals(count: int) -> tuple[np.ndarray, np.ndarray]:
    """All (ups, downs) of `count` 0/1 pairs, and their intervals, each as an array of two columns."""
    pairs = [(ups, downs) for ups in range(count + 1) for downs in range(count + 1 - ups)]
    ends = []
    for ups, downs in pairs:
        parts = np.repeat([1.0, -1.0, 0.0], [ups, downs, count - ups - downs]) / count
        ends.append(
            difference_interval(
                [Stratum(parts, parts - parts.mean(), np.full(count, 1 / count), np.ones(count))], 1.0, 1.0
            )
        )
    return np.array(pairs), np.array(ends)


@pytest.mark.parametrize(
    "rates", [(0.005, 0.005), (0.02, 0.0), (0.03, 0.01), (0.1, 0.1), (0.15, 0.05), (0.3, 0.3), (0.9, 0.02)]
)
@pytest.mark.parametrize("count", [5, 20, 60])
def test_binary_interval_covers(count: int, rates: tuple[float, float]) -> None:
    """Exactly, over all outcomes: both ends together err in at most 5 % of comparisons."""
    pairs, ends = counted_intervals(count)
    chances = stats.multinomial.pmf(np.c_[pairs, count - pairs.sum(1)], count, [*rates, 1 - sum(rates)])
    above, below = (
        float(chances[wrong].sum()) for wrong in (ends[:, 0] > rates[0] - rates[1], ends[:, 1] < rates[0] - rates[1])
    )
    assert above + below <= 0.05


def skewed_differences(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, float]:
    """(differences of shares, clusters, their true mean)."""
    alone = np.arange(200)
    if kind == "lost":  # 2 % of 200 documents lose what they had, 0.4 on average
        had = np.where(rng.random(200) < 0.5, 0.0, rng.uniform(0.6, 1.0, 200))
        return np.where(rng.random(200) < 0.02, -had, 0.0), alone, -0.02 * 0.4
    if kind == "jitter":
        return np.where(rng.random(200) < 0.005, -1.0, rng.uniform(-0.02, 0.02, 200)), alone, -0.005
    codes = unequal_groups(rng, 100, 9)
    return -related_flips(rng, codes, 0.04, 0.5, 1.0), codes, -0.02


@pytest.mark.parametrize("kind", ["lost", "jitter", "clusters"])
def test_skewed_differences_are_covered(kind: str) -> None:
    """Few documents, or clusters, lose much: Student's t misses the mean in 10 % to 40 % of 400 draws."""
    rng = np.random.default_rng(6)
    ours, plain = np.mean([covers(*skewed_differences(kind, rng)) for _ in range(400)], axis=0)
    assert ours >= 0.95 and plain <= 0.9


def test_an_interval_of_log_likelihoods_does_not_grow_with_their_size() -> None:
    """Sums of thousands of nats that differ by tenths: what was not seen is taken to be like what was."""
    old = np.linspace(-9000.0, -1000.0, 60)
    new = old + np.random.default_rng(0).normal(0.1, 0.5, 60)
    near, wide = paired(old, new, unbounded=True), paired(old, new)
    assert near.ci_high - near.ci_low == pytest.approx(2 * 2.0 * near.stderr, rel=0.1) and wide.ci_high > 100
    assert paired(old, old, unbounded=True).ci_high > 100, "equal ones show no size of a change"


def test_clustered_interval_covers_and_the_naive_one_does_not() -> None:
    """30 documents of 1 to 7 items that share most of their difference; 3 sigma of 1500 draws at 95 % is 1.7 points."""
    rng = np.random.default_rng(7)
    inside = naive = 0
    for _ in range(1500):
        codes = np.repeat(np.arange(30), rng.integers(1, 8, size=30))
        d = 0.3 + rng.normal(size=30)[codes] + 0.3 * rng.normal(size=len(codes))
        for by_document in (True, False):
            groups = codes if by_document else np.arange(len(d))
            stderr = intervals.clustered_stderr(d, groups)
            low, high = intervals.t_interval(float(d.mean()), stderr, int(groups.max()) + 1, 0.95)
            inside, naive = (
                inside + (by_document and low <= 0.3 <= high),
                naive + (not by_document and low <= 0.3 <= high),
            )
    assert inside / 1500 >= 0.95 - 0.02 - 0.017  # CR1 loses up to 2 points with 30 unequal documents
    assert naive / 1500 < 0.8


def changes(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    """Differences of scores, and their clusters, that are significant about as often as not."""
    if kind == "jitter":
        return rng.normal(0.006, 0.02, 60), None
    if kind == "samples":
        rates = rng.beta(1, 1, 30)
        return (rng.binomial(16, rates) - rng.binomial(16, np.clip(rates - 0.07, 0, 1))) / 16, None
    if kind == "few":
        return np.where(rng.random(80) < 0.15, rng.uniform(-0.3, 0.9, 80), 0.0), None
    return rng.choice([-1.0, 0.0, 1.0], 100, p=[0.02, 0.82, 0.16]), np.arange(100) // 5


@pytest.mark.parametrize("kind", ["jitter", "samples", "few", "clusters"])
def test_a_p_of_5_percent_is_an_interval_without_0(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what the sign flips find likely by chance, which has a larger p than its interval."""
    monkeypatch.setattr(permutation, "FLIPS", 0)  # each test draws 999 flips
    rng, significant = np.random.default_rng(8), 0
    for _ in range(40):
        difference, codes = changes(kind, rng)
        old = np.where(difference < 0, 1.0, 0.0)
        result = paired(old, old + difference, clusters=codes)
        excluded = not result.ci_low <= 0 <= result.ci_high
        assert (result.p_value <= 0.05) is excluded or (excluded and result.test == "permutation")
        significant += excluded
    assert 5 < significant < 35


# --- errors of the first kind, and power -----------------------------------------------------------------------------


def test_false_alarms_stay_below_alpha() -> None:
    """Both runs have one distribution: p <= alpha in at most alpha of 1000 comparisons, plus 3 sigma."""
    rng, draws, alpha = np.random.default_rng(11), 1000, 0.05
    limit = alpha + 3 * math.sqrt(alpha * (1 - alpha) / draws)
    rejected = np.zeros(4)
    mcnemar = functools.cache(statistics.mcnemar)  # The same counts are drawn again and again.
    for _ in range(draws):
        ups, downs = rng.multinomial(200, (0.08, 0.08, 0.84))[:2]
        rejected[:2] += np.array(mcnemar(int(ups), int(downs))) <= alpha
        rejected[2:] += np.array(sign_flip(rng.laplace(size=8))) <= alpha
    assert (rejected / draws <= limit).all(), rejected
    assert (rejected / draws > 0.01).all(), rejected  # tests that never reject would pass the line above


def test_related_items_raise_false_alarms_only_without_clusters() -> None:
    """Documents of 6 items that flip together: McNemar on items cries wolf; the clustered test does not."""
    rng, draws = np.random.default_rng(5), 300
    plain_alarms = clustered_alarms = 0
    for _ in range(draws):
        signs = rng.choice((-1, 0, 1), size=10, p=(0.4, 0.2, 0.4))
        plain_alarms += statistics.mcnemar(6 * int((signs > 0).sum()), 6 * int((signs < 0).sum()))[0] <= 0.05
        clustered_alarms += sign_flip(6.0 * signs)[0] <= 0.05
    assert plain_alarms / draws > 0.3
    assert clustered_alarms / draws <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)


def test_holm_keeps_the_family_below_alpha() -> None:
    """Twelve metrics without a difference: some p <= 0.05 nearly every second time, some corrected p rarely."""
    rng, draws = np.random.default_rng(9), 3000
    p = rng.uniform(size=(draws, 12))
    plain = float(np.mean(p.min(axis=1) <= 0.05))
    corrected = sum(min(holm(list(row))) <= 0.05 for row in p) / draws
    assert plain > 0.4 and corrected <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)


def test_mcnemar_power_by_enumeration() -> None:
    """All outcomes of 14 pairs with rates of win and loss 0.05 and 0.5."""
    n, win, loss = 14, 0.05, 0.5
    for sides in (1, 2):
        expected = 0.0
        for wins, losses in itertools.product(range(n + 1), repeat=2):
            both, worse = exact_mcnemar(wins, losses)
            if wins + losses <= n and losses > wins and (both if sides == 2 else worse) <= Fraction(1, 20):
                ways = math.comb(n, wins) * math.comb(n - wins, losses)
                expected += ways * win**wins * loss**losses * (1 - win - loss) ** (n - wins - losses)
        assert power.mcnemar_power(n, win + loss, loss - win, 0.05, sides) == pytest.approx(expected, rel=1e-9)


def test_detectable_effect_is_detected_as_often_as_said() -> None:
    """Simulated through `paired`: losses at the minimum detectable rate on top of the observed discordance."""
    rng, n, draws = np.random.default_rng(2), 400, 1500
    mcnemar = functools.cache(statistics.mcnemar)  # The same counts are drawn again and again.
    observed = paired(*binary(14, 14, n - 28))
    one_sided = power.binary_effect(n, 28 / n, 0.05, 0.8, sides=1)
    for effect, p_value in ((observed.minimum_detectable_effect, 0), (one_sided, 1)):
        loss, win = (0.07 + effect) / 2, (0.07 - effect) / 2
        counts = rng.multinomial(n, (win, loss, 1 - win - loss), size=draws)
        detected = sum(mcnemar(int(w), int(x))[p_value] <= 0.05 for w, x, _ in counts) / draws
        assert detected == pytest.approx(0.8, abs=3 * math.sqrt(0.16 / draws))
    assert observed.minimum_detectable_loss < observed.minimum_detectable_effect


@pytest.mark.parametrize(
    ("kind", "n", "alpha", "draws"), [("nats", 60, 0.05, 300), ("nats", 60, 2e-5, 300), ("shares", 100, 0.05, 300)]
)
def test_detectable_mean_is_detected_as_often_as_said(
    kind: str, n: int, alpha: float, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn p-values start at 2e-4, and `tail_bound` goes on below. Shares' p is that of their bound."""
    monkeypatch.setattr(permutation, "FLIPS", 0)  # each test draws 999 flips
    rng, nats = np.random.default_rng(4), kind == "nats"
    base = rng.normal(size=n) if nats else 0.1 * rng.normal(size=n)
    base = (base - base.mean()) / base.std(ddof=1) * (1.0 if nats else 0.1)
    old = np.full(n, -2.0 if nats else 0.5)
    effect = paired(old, old + base, alpha=alpha, unbounded=nats).minimum_detectable_effect
    detected = 0
    for _ in range(draws):
        new = old + rng.normal(effect, 1.0 if nats else 0.1, n)
        detected += paired(old, new, unbounded=nats).p_value <= alpha
    assert detected / draws == pytest.approx(0.8, abs=0.02 + 3 * math.sqrt(0.16 / draws))


def test_too_few_differences_reach_no_small_alpha() -> None:
    noise = np.random.default_rng(1).normal(size=14)
    blind = paired(np.zeros(14), noise, alpha=2e-5)
    assert math.isinf(blind.minimum_detectable_effect) and math.isinf(blind.minimum_detectable_loss)


@pytest.mark.parametrize("count", [6, 8, 100, 1319])
def test_no_difference_is_not_no_detectable_effect(count: int) -> None:
    """Six losses are the fewest that can be significant: at the effect, six or more come with probability 0.8."""
    result = paired([1] * count, [1] * count)
    share = result.minimum_detectable_effect
    fewer = sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(6))
    assert 1 - fewer == pytest.approx(0.8, rel=1e-6)
    assert (result.p_value, result.p_one_sided, result.difference, result.stderr) == (1.0, 1.0, 0.0, 0.0)
    assert result.ci_low < -2 / (count + 3) and result.ci_high == -result.ci_low  # both are of the order of 3 / n
    old = np.array([0.25, 0.75] * count)  # the same for a metric that is not 0/1, whose bound needs more differences
    fewest = next(k for k in range(1, 2 * count) if paired(old, old + 0.5 * (np.arange(2 * count) < k)).p_value <= 0.05)
    scores = paired(old, old)
    power_there = stats.binom.sf(fewest - 1, 2 * count, scores.minimum_detectable_effect / 0.5)
    assert power_there == pytest.approx(0.8, rel=1e-6) or (fewest == 6 and 0.8 < power_there < 0.85), "rounded up"
    assert scores.ci_high == pytest.approx(1 - 0.05 ** (1 / (2 * count))) and scores.ci_low == -scores.ci_high


def test_few_differences_do_not_make_the_gate_look_sharp() -> None:
    """One differing score of 1000 has a tiny error, but one pair is never significant: the effect is that of ten."""
    a = np.linspace(0.2, 0.9, 1000)
    b = a.copy()
    b[3] += 0.5
    result = paired(a, b)
    assert stats.binom.sf(9, 1000, result.minimum_detectable_effect / 0.5) == pytest.approx(0.8)
    assert result.minimum_detectable_effect > 2.8 * result.stderr


@pytest.mark.parametrize(
    ("count", "two", "one"), [(1, True, True), (4, True, True), (5, True, False), (6, False, False)]
)
def test_too_few_items_detect_nothing(count: int, two: bool, one: bool) -> None:
    """The smallest p-values are 2^(1 - n) and 2^-n; above alpha nothing is detectable, whatever the runs show."""
    answers = paired([1] * count, [0] * count)
    assert math.isinf(answers.minimum_detectable_effect) is two and math.isinf(answers.minimum_detectable_loss) is one
    for new in (0.7, 0.5):
        result = paired([0.5] * count, [new] * count)
        assert math.isinf(result.minimum_detectable_effect) is two and math.isinf(result.minimum_detectable_loss) is one


def test_a_standard_error_whose_square_is_0_is_like_0() -> None:
    assert reported_interval(0.5, 1e-300, 100) == reported_interval(0.5, 0.0, 100) is not None
