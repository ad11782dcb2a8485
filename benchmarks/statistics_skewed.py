"""Figures of `benchmarks statistics` on `compare`: intervals of differences where few documents change, or change by
much, and the power of the test on as many documents as are reported to be needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure, shares
from benchmarks.statistics_cases import ALPHA, covers, flips, rare_losses, related_flips, unequal_groups
from evalengine.report.compare.headline import FEW_CHANGED, POWER, WITHIN_CHANCE, documents_to_tell
from evalengine.report.stats.detectable import mcnemar_power
from evalengine.report.stats.intervals import heavy_tails
from evalengine.report.stats.loss_bound import Losses, bound_cautions, difference_interval, joined, stratum
from evalengine.report.stats.paired import paired
from evalengine.report.stats.significance import mcnemar

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator], Floats]


def _f1(rng: np.random.Generator, count: int) -> Floats:
    """Scores as of F1: two of five are 0, three of ten are 1, the rest is a beta distribution of mean 2/7."""
    place = rng.random(count)
    return np.where(place < 0.4, 0.0, np.where(place < 0.7, 1.0, rng.beta(2, 5, count)))


MEAN = 0.3 + 0.3 * 2 / 7  # of `_f1`


def _lost(count: int, share: float) -> Draw:
    def draw(rng: np.random.Generator) -> Floats:
        scores = _f1(rng, count)
        return np.where(rng.random(count) < share, 0.0, scores) - scores

    return draw


def _both(count: int, share: float) -> Draw:
    def draw(rng: np.random.Generator) -> Floats:
        scores, place = _f1(rng, count), rng.random(count)
        return np.where(place < share, 0.0, np.where(place < 2 * share, 1.0, scores)) - scores

    return draw


def _jitter(count: int, share: float, size: float) -> Draw:
    return lambda rng: np.where(rng.random(count) < share, -1.0, rng.uniform(-size, size, count))


def _samples(count: int, samples: int, a: float, b: float) -> Draw:
    def draw(rng: np.random.Generator) -> Floats:
        rates = rng.beta(a, b, count)
        return (rng.binomial(samples, rates) - rng.binomial(samples, rates)) / samples

    return draw


def skewed(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "Coverage of compare's 95 % intervals where differences are skewed"
    cases: list[tuple[str, Draw, float]] = []
    for count, share in ((100, 0.05), (200, 0.01), (500, 0.02), (1319, 0.01)):
        cases.append((f"{count} documents, F1, {share * 100:g} % lost", _lost(count, share), -share * MEAN))
        truth = share * (1 - 2 * MEAN)
        cases.append((f"{count} documents, F1, {share * 100:g} % lost, as many made right", _both(count, share), truth))
    for count, share, size in ((100, 0.005, 0.02), (200, 0.01, 0.1), (1319, 0.005, 0.02)):
        case = f"{count} documents that jitter by {size:g}, {share * 100:g} % lost whole"
        cases.append((case, _jitter(count, share, size), -share))
    for count, samples, a, b in ((164, 10, 0.05, 1.5), (100, 4, 0.5, 0.5)):
        case = f"{count} documents, pass@1 of {samples} samples, mean {a / (a + b):.2g}"
        cases.append((case, _samples(count, samples, a, b), 0.0))
    for case, draw, truth in cases:

        def covered(rng: np.random.Generator, draw: Draw = draw, truth: float = truth) -> tuple[bool, ...]:
            x = draw(rng)
            return covers(x, np.arange(len(x)), truth)

        ours, plain = shares(rng, draws, covered)
        yield Figure(group, "difference of two runs", case, ours, draws, at_least=0.93)
        yield Figure(group, "Student's t", case, plain, draws)
    yield from _groups(rng, draws, group)
    yield from _log_likelihoods(rng, draws)


def unseen(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    """A rare total loss that may not be drawn: towards 0 the interval allows for the sizes of changes that were."""
    group = "Coverage of compare's 95 % intervals where a large change may be unseen"
    for n in (100, 300, 1000):
        for words, draw, truth in _rarely_lost(n):

            def covered(rng: np.random.Generator, draw: Draw = draw, truth: float = truth) -> tuple[bool, ...]:
                x = draw(rng)
                strata = [stratum(x, np.arange(len(x)))]
                low, high = difference_interval(strata, 1.0, 1.0)
                return low <= truth <= high, low <= truth <= high or bool(bound_cautions(strata, 1.0))

            ours, said = shares(rng, draws, covered)
            case, cautioned = f"{n} documents, {words}", "caution" in words
            yield Figure(group, "difference of two runs", case, ours, draws, at_least=None if cautioned else 0.93)
            if cautioned:
                yield Figure(group, "it covers, or a caution is shown", case, said, draws, at_least=0.93)


def _rarely_lost(n: int) -> list[tuple[str, Draw, float]]:
    """(the case, its differences of `n` documents, their true mean)."""
    return [
        ("all gain 0.005 and jitter by 0.02, one in as many is lost (misses have a caution)",
         lambda rng: rng.normal(0.005, 0.02, n) - (rng.random(n) < 1 / n), 0.005 - 1 / n),
        ("jitter of 0.1, one in as many is lost", lambda rng: rng.normal(0, 0.1, n) - (rng.random(n) < 1 / n), -1 / n),
        ("10 % change by up to 1", lambda rng: rng.uniform(-1, 1, n) * (rng.random(n) < 0.1), 0.0),
        ("half jitter by 0.1, two in as many are lost",
         lambda rng: rng.normal(0, 0.1, n) * (rng.random(n) < 0.5) - (rng.random(n) < 2 / n), -2 / n),
        ("3 % lose 0.5, the others gain as much in all", lambda rng: rare_losses(rng, n), 0.0),
        ("2 % lost, 0/1 scores", lambda rng: -flips(rng, n, 0.02, 0.0), -0.02),
    ]  # fmt: skip


def _groups(rng: np.random.Generator, draws: int, group: str) -> Iterator[Figure]:
    for groups, hit, share in ((100, 0.04, 0.5), (100, 0.1, 0.3), (20, 0.1, 1.0)):

        def clustered(
            rng: np.random.Generator, groups: int = groups, hit: float = hit, share: float = share
        ) -> tuple[bool, ...]:
            codes = unequal_groups(rng, groups, 9)
            return covers(-related_flips(rng, codes, hit, share, 1.0), codes, -hit * share)

        case = f"{groups} clusters of 1 to 9, {hit * 100:g} % touched, {share * 100:g} % of those lost"
        ours, plain = shares(rng, draws, clustered)
        yield Figure(group, "difference of two runs", case, ours, draws, at_least=0.93)
        yield Figure(group, "Student's t", case, plain, draws)
    for loss in (0.01, 0.05):

        def macro(rng: np.random.Generator, loss: float = loss) -> tuple[bool, ...]:
            tasks = [
                Losses(-flips(rng, size, loss, 0.0), [f"{size} {n}" for n in range(size)], 1 / 3)
                for size in (50, 200, 1000)
            ]
            low, high = difference_interval(joined(tasks), 1.0, 1.0)
            return (low <= -loss <= high,)

        (share_,) = shares(rng, draws, macro)
        case = f"the macro mean of 50, 200 and 1000 documents, {loss * 100:g} % lost"
        yield Figure(group, "difference of two runs", case, share_, draws, at_least=0.93)


def _log_likelihoods(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "Coverage of compare's 95 % intervals of log-likelihoods whose differences have tails"
    for count in (62, 200, 1000):
        for words, draw_one, mean in (
            ("normal", lambda rng, n: rng.normal(0.0, 1.0, n), 0.0),
            ("skewed by 6.6", lambda rng, n: rng.exponential(0.6, n) ** 2, 0.72),
            ("log-normal, skewed by 6.2", lambda rng, n: rng.lognormal(0.0, 1.0, n), math.exp(0.5)),
        ):

            def draw(
                rng: np.random.Generator, count: int = count, one: Callable[..., Floats] = draw_one, mean: float = mean
            ) -> tuple[bool, ...]:
                x = one(rng, count)
                ours, plain = covers(x, np.arange(count), mean, scale=0.0)
                return ours or bool(heavy_tails(x - x.mean())), ours, plain

            said, ours, plain = shares(rng, draws, draw)
            case = f"{count} documents, {words}"
            yield Figure(group, "it covers, or a caution is shown", case, said, draws, at_least=0.93)
            yield Figure(group, "it covers", case, ours, draws)
            yield Figure(group, "Student's t", case, plain, draws)


@cache
def _named(wins: int, losses: int, count: int) -> int | None:
    """The number of documents that `compare` names for these counts; None where it names none."""
    if wins + losses < FEW_CHANGED or not ALPHA <= mcnemar(wins, losses)[0] <= WITHIN_CHANCE:
        return None
    difference = (wins - losses) / count
    seen = replace(paired([0, 1], [1, 1]), n=count, clusters=count, wins=wins, losses=losses, difference=difference)
    needed = documents_to_tell(seen)
    return None if needed is None else max(needed, count + 1)


def documents_named(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    """The mean over the comparisons that name a number; the true share of flips is not what was seen."""
    group = f"Power of the two-sided test on the documents that compare names ({POWER:g}), if the difference is as seen"
    for count, flipping in ((24, 0.6), (50, 0.4), (100, 0.2), (200, 0.1), (500, 0.05), (500, 0.2)):
        likely = 1.6 * math.sqrt(flipping / count)
        chances = ((flipping + likely) / 2, (flipping - likely) / 2, 1 - flipping)
        found = []
        for wins, losses, _ in rng.multinomial(count, chances, size=draws).tolist():
            if (needed := _named(wins, losses, count)) is not None:
                seen = abs(wins - losses) / count
                found.append(mcnemar_power(needed, max(flipping, seen), seen, ALPHA))
        case = f"{count} documents, {flipping * 100:g} % flips"
        yield Figure(group, "differences found", case, sum(found) / max(1, len(found)), draws, 0.75, 0.9)
