"""`python -m benchmarks statistics`: how often the statistics of gate and compare are wrong or right.

Each line is a claim with its figure: false alarms of the tests, passes of losses that are as large as the margin,
coverage of the intervals and of the ranks of several models, and power. The figures of methods that were not chosen
follow their claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from benchmarks.figures import Figure, shares
from benchmarks.statistics_cases import (
    ALPHA,
    bonett_price,
    bonett_price_bound,
    bounds_of,
    covers,
    false_alarms,
    flips,
    gate_bound,
    p_of,
    passing,
    rare_losses,
    related_flips,
    unequal_groups,
)
from benchmarks.statistics_ranks import ranks
from benchmarks.statistics_rare import (
    failing,
    heavy,
    jittering,
    planned,
    rare,
    risk,
    small_changes,
    uneven,
    uneven_margins,
)
from benchmarks.statistics_skewed import documents_named, skewed, unseen
from benchmarks.statistics_steps import prompts, steps
from evalengine.report.stats.detectable import binary_loss
from evalengine.report.stats.loss_bound import Losses, joined, loss_bound, stratum
from evalengine.report.stats.metric_interval import mean_interval
from evalengine.report.stats.paired import tested
from evalengine.report.stats.perplexity import Ratio, loss_stratum, ratio_interval
from evalengine.report.stats.significance import holm, mcnemar, sign_flip


def figures(draws: int, seed: int) -> Iterator[Figure]:
    """Yields all figures in the report's order, simulated with `draws` each. Every group has its own generator."""
    parts = (
        *(_tests, _margins, _related_margins, _averages, _perplexities, _coverage, _power),
        *(jittering, failing, planned, uneven, uneven_margins, rare, risk, heavy, steps, prompts, skewed),
        *(documents_named, ranks, small_changes, unseen),
    )
    for number, part in enumerate(parts):
        yield from part(np.random.default_rng([seed, number]), draws)


def _tests(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = f"False alarms of the tests: no difference, p at most {ALPHA:g} (two-sided)"

    def unrelated(rng: np.random.Generator) -> tuple[bool, ...]:
        drawn = flips(rng, 400, 0.05, 0.05)
        return (mcnemar(int((drawn < 0).sum()), int((drawn > 0).sum()))[0] <= ALPHA, p_of(drawn).p_value <= ALPHA)

    for what, share in zip(("exact McNemar", "the test of a mean"), shares(rng, draws, unrelated), strict=True):
        yield Figure(group, what, "400 documents, 10 % flips", share, draws, at_most=ALPHA)
    for count in (30, 100):

        def skew(rng: np.random.Generator, count: int = count) -> tuple[bool, ...]:
            losses = rare_losses(rng, count)
            alone, alarms = sign_flip(losses), false_alarms(losses, np.arange(count))
            return (*alarms[:2], alone[0] <= ALPHA, *alarms[2:], alone[1] <= ALPHA)

        case = f"{count} documents, 3 % gain 0.5, the others lose as much in all"
        names = [
            f"{test}{side}"
            for side in ("", ", one-sided, as a gate")
            for test in ("the test of a mean, without a caution", "the test of a mean", "sign flips alone")
        ]
        for what, share in zip(names, shares(rng, draws, skew), strict=True):
            yield Figure(group, what, case, share, draws, at_most=ALPHA if "caution" in what else None)
    for size in (2, 5, 10):

        def related(rng: np.random.Generator, size: int = size) -> tuple[bool, ...]:
            signs = rng.choice([1.0, -1.0, 0.0], size=100, p=[0.05, 0.05, 0.9])
            wins, losses = (size * int(np.count_nonzero(signs == sign)) for sign in (-1, 1))
            found = p_of(np.repeat(signs, size), np.repeat(np.arange(100), size))
            return (found.p_value <= ALPHA, mcnemar(wins, losses)[0] <= ALPHA)

        with_clusters, without = shares(rng, draws, related)
        case = f"100 groups of {size} that flip together, 10 % of them"
        yield Figure(group, "the test of a mean over clusters", case, with_clusters, draws, at_most=ALPHA)
        yield Figure(group, "exact McNemar, clusters not known", case, without, draws)

    def family(rng: np.random.Generator) -> tuple[bool, ...]:
        counts = rng.multinomial(400, (0.05, 0.05, 0.9), size=20)
        p = [mcnemar(int(wins), int(losses))[1] for wins, losses, _ in counts]
        return (min(holm(p)) <= ALPHA, min(p) <= ALPHA)

    for what, share in zip(("p after Holm", "raw p"), shares(rng, draws, family), strict=True):
        limit = ALPHA if "Holm" in what else None
        yield Figure(group, f"any of 20 metrics by its {what}", "one-sided, as the gate", share, draws, at_most=limit)


def _margins(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "False passes of a margin: the true loss is the margin"
    for count, margin in ((200, 0.02), (200, 0.05), (1319, 0.01), (1319, 0.02), (5000, 0.01)):
        for win in (0.0, 0.005, 0.05):
            case = f"{count} documents, {margin * 100:g} points, {win * 100:g} % won besides"
            ours, theirs = (
                passing(bound, count, margin, margin + win, win) for bound in (gate_bound, bonett_price_bound)
            )
            yield Figure(group, "the gate's bound", case, ours, None, at_most=ALPHA)
            yield Figure(group, "Bonett and Price's bound", case, theirs, None)


def _related_margins(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "The same for related documents, in clusters of 1 to 9"
    cases = ((100, (0.1, 1.0, 1.0)), (100, (0.1, 0.3, 1.0)), (100, (0.3, 0.5, 0.8)), (500, (0.04, 0.5, 1.0)))
    for groups, (hit, share, lost) in cases:

        def draw(
            rng: np.random.Generator, groups: int = groups, spread: tuple[float, float, float] = (hit, share, lost)
        ) -> tuple[bool, ...]:
            codes = unequal_groups(rng, groups, 9)
            bounds = bounds_of(related_flips(rng, codes, *spread), codes)
            return tuple(bound <= spread[0] * spread[1] * (2 * spread[2] - 1) for bound in bounds)

        touched, flip, losses = (f"{part * 100:g} %" for part in (hit, share, lost))
        case = f"{groups} clusters, {touched} touched, {flip} of those flip, {losses} of it losses"
        names = ("the gate's bound", "the gate's bound, clusters not known", "t over clusters, no correction")
        for name, figure in zip(names, shares(rng, draws, draw), strict=True):
            yield Figure(group, name, case, figure, draws, at_most=ALPHA if name == names[0] else None)


def _averages(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "Averages over tasks: the macro mean of 57, each of 100 documents"

    def draw(rng: np.random.Generator, loss: float) -> tuple[bool, ...]:
        losses = [flips(rng, 100, 0.04 + loss, 0.04) for _ in range(57)]
        strata = [stratum(task, np.arange(100), 1 / 57) for task in losses]
        return (loss_bound(strata, 1.0, ALPHA).bound <= 0.01,)

    (wrong,) = shares(rng, draws, lambda rng: draw(rng, 0.01))
    yield Figure(group, "false passes of a margin of 1 point", "8 % flips besides", wrong, draws, at_most=ALPHA)
    (right,) = shares(rng, draws, lambda rng: draw(rng, 0.0))
    yield Figure(group, "passes of no loss", "8 % flips besides", right, draws, at_least=0.7)
    yield from _translations(rng, draws)


def _translations(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "Averages over translations: the macro mean of 11 languages, each of the same 250 items"
    for shared in (0.3, 0.6):

        def draw(rng: np.random.Generator, shared: float = shared) -> tuple[bool, ...]:
            common = flips(rng, 250, 0.05, 0.03)
            losses = [np.where(rng.random(250) < shared, common, flips(rng, 250, 0.05, 0.03)) for _ in range(11)]
            items, apart = ([f"{name}#{item}" for item in range(250)] for name in ("all", "own"))
            alike = joined([Losses(task, items, 1 / 11) for task in losses])
            alone = joined([Losses(task, [f"{n} {i}" for i in apart], 1 / 11) for n, task in enumerate(losses)])
            return tuple(loss_bound(strata, 1.0, ALPHA).bound <= 0.02 for strata in (alike, alone))

        wrong, unknown = shares(rng, draws, draw)
        case = f"2 points, 8 % flips, {shared * 100:g} % of them shared"
        yield Figure(group, "the gate's bound", case, wrong, draws, at_most=ALPHA)
        yield Figure(group, "the gate's bound, items taken as unrelated", case, unknown, draws)


def _perplexities(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "Word perplexity of 62 unequal pages"

    def draw(rng: np.random.Generator, rise: float) -> tuple[bool, ...]:
        words = rng.lognormal(7.5, 0.7, 62)
        old = -words * rng.normal(3.0, 0.3, 62)
        new = old - words * rng.normal(rise, 0.015, 62)
        codes = np.arange(62)
        worse = loss_stratum(Ratio("perplexity", old, words), Ratio("perplexity", new, words), codes)
        bound = loss_bound([worse], 0.0, ALPHA).bound
        _, low, high = ratio_interval(Ratio("perplexity", old, words), codes)
        p = tested([worse], 0.0, math.inf, answers=False).p_one_sided
        return bound <= math.log(1.01), p <= ALPHA, low <= math.exp(3.0) <= high

    case = "pages differ by 1.5 %"
    wrong, _, covered = shares(rng, draws, lambda rng: draw(rng, math.log(1.01)))
    yield Figure(group, "false passes of a margin of 1 %", f"1 % worse, {case}", wrong, draws, at_most=ALPHA)
    _, alarms, _ = shares(rng, draws, lambda rng: draw(rng, 0.0))
    yield Figure(group, "false alarms of the one-sided test", f"no difference, {case}", alarms, draws, at_most=ALPHA)
    _, power, _ = shares(rng, draws, lambda rng: draw(rng, math.log(1.009)))
    yield Figure(group, "losses found by the test", f"0.9 % worse, {case}", power, draws, at_least=0.8)
    case = "pages between 2.4 and 3.6 nats a word"
    yield Figure(group, "coverage of one run's 95 % interval", case, covered, draws, 0.93, 0.97)


def _coverage(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "Coverage of 95 % intervals"

    def paired_shares(rng: np.random.Generator) -> tuple[bool, ...]:
        drawn = -flips(rng, 400, 0.06, 0.03)
        low, high = bonett_price(int((drawn > 0).sum()), int((drawn < 0).sum()), 400, 0.95)
        return covers(drawn, np.arange(400), -0.03)[0], low <= -0.03 <= high

    ours, theirs = shares(rng, draws, paired_shares)
    case = "400 documents, 9 % flips"
    yield Figure(group, "difference of two runs", case, ours, draws, 0.93, 0.98)
    yield Figure(group, "difference of two runs (Bonett and Price)", case, theirs, draws)

    def clustered(rng: np.random.Generator) -> tuple[bool, ...]:
        codes = unequal_groups(rng, 100, 9)
        drawn = related_flips(rng, codes, 0.3, 0.5, 0.8)
        return *covers(drawn, codes, 0.09), covers(drawn, np.arange(len(codes)), 0.09)[0]

    known, plain, unknown = shares(rng, draws, clustered)
    case = "100 clusters of 1 to 9, 30 % touched"
    yield Figure(group, "difference of two runs", case, known, draws, at_least=0.93)
    yield Figure(group, "difference of two runs, clustered t", case, plain, draws)
    yield Figure(group, "difference of two runs, clusters not known", case, unknown, draws)

    def single(rng: np.random.Generator) -> tuple[bool, ...]:
        shared = np.repeat(rng.random(100) < 0.7, 5)
        scores = np.where(rng.random(500) < 0.7, shared, rng.random(500) < 0.7).astype(float).tolist()
        names = [str(place // 5) for place in range(500)]
        intervals = [mean_interval(scores, clusters=clusters) for clusters in (names, None)]
        return tuple(bounds is not None and bounds[0] <= 0.7 <= bounds[1] for bounds in intervals)

    known, unknown = shares(rng, draws, single)
    yield Figure(group, "one run's accuracy, Wilson over clusters", "100 clusters of 5 alike", known, draws, 0.93, 0.97)
    yield Figure(group, "one run's accuracy, clusters not known", "100 clusters of 5 alike", unknown, draws)


def _power(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group, count, right = "What is seen", 1319, 989
    for rate in (0.0, 0.02, 0.1):
        claimed = binary_loss(count, right, rate, ALPHA, 0.8)
        for flipping in sorted({rate, 0.1}):
            win = max(0.0, (flipping - claimed) / 2)
            loss_share, win_share = (claimed + win) * count / right, win * count / (count - right)

            def found(
                rng: np.random.Generator, loss_share: float = loss_share, win_share: float = win_share
            ) -> tuple[bool, ...]:
                lost, won = rng.binomial(right, loss_share), rng.binomial(count - right, win_share)
                return (mcnemar(int(won), int(lost))[1] <= ALPHA,)

            (share,) = shares(rng, draws, found)
            case = f"{claimed * 100:.2f} points, by {rate * 100:g} % flips of {count}, among {flipping * 100:g} %"
            limits = (0.78, 0.84) if flipping == rate else (None, None)
            yield Figure(group, "losses found that the test `can detect`", case, share, draws, *limits)
    for count, margin, rate in ((200, 0.02, 0.0), (1319, 0.02, 0.02), (1319, 0.02, 0.1), (10_042, 0.01, 0.05)):
        share = passing(gate_bound, count, margin, rate / 2, rate / 2)
        case = f"no loss, {count} documents, {margin * 100:g} points, {rate * 100:g} % flips"
        yield Figure(group, "passes of a margin", case, share, None)
