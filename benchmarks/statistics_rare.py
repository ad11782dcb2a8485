"""Figures of `benchmarks statistics` on what is rare or uneven: losses that were not seen, clusters of unlike sizes,
scores that few documents have, and verdicts of a gate where the loss lies on either side of the margin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure, shares
from benchmarks.statistics_cases import (
    ALPHA,
    bounds_of,
    covers,
    false_alarms,
    flips,
    gate_bound,
    passing,
    related_flips,
)
from evalengine.report.stats.clusters import RARE
from evalengine.report.stats.intervals import FEW, cluster_degrees, heavy_tails, t_interval
from evalengine.report.stats.loss_bound import Losses, Stratum, bound_cautions, joined, loss_bound, stratum
from evalengine.report.stats.metric_interval import mean_interval
from evalengine.report.stats.pass_probability import Design
from evalengine.report.stats.perplexity import Ratio, loss_stratum, ratio_interval, ratio_residuals

Floats = NDArray[np.float64]
Layout = Callable[[Callable[[int], Floats], float], list[Stratum]]  # (losses of so many documents, times as many)
Sizes = Callable[[np.random.Generator, int], NDArray[np.int64]]
Related = tuple[Floats, NDArray[np.intp]]  # losses [n] and their clusters
Lossy = Callable[[np.random.Generator, float], Related]  # of a true mean loss
MARGIN = 0.05  # of gates on small changes


def jittering(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "False passes of a margin by scores in [0, 1] that jitter, with a rare total loss"
    for count, margin in ((200, 0.01), (200, 0.02), (1319, 0.005)):
        for jitter in (0.0, 0.02, 0.1):

            def draw(
                rng: np.random.Generator, count: int = count, margin: float = margin, jitter: float = jitter
            ) -> tuple[bool, ...]:
                losses = rng.uniform(-jitter, jitter, count)
                losses[rng.random(count) < margin] = 1.0
                return (loss_bound([stratum(losses, np.arange(count))], 1.0, ALPHA).bound <= margin,)

            (wrong,) = shares(rng, draws, draw)
            case = f"{count} documents, {margin * 100:g} points, jitter of {jitter:g}"
            yield Figure(group, "the gate's bound", case, wrong, draws, at_most=ALPHA)


def failing(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group, count, margin = "Failures of a gate with a margin of 2 points", 1319, 0.02
    for loss, limits in ((0.0, (None, ALPHA)), (0.01, (None, ALPHA)), (0.015, (None, ALPHA)), (0.02, (None, ALPHA)),
                         (0.04, (0.7, None))):  # fmt: skip

        def draw(rng: np.random.Generator, loss: float = loss) -> tuple[bool, ...]:
            bound = loss_bound([stratum(flips(rng, count, 0.015 + loss, 0.015), np.arange(count))], 1.0, ALPHA)
            return (bound.p_above(margin) <= ALPHA,)

        (failed,) = shares(rng, draws, draw)
        case = f"{count} documents, a true loss of {loss * 100:g} points, 3 % flips besides"
        yield Figure(group, "a loss beyond the margin is shown", case, failed, draws, *limits)


def small_changes(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    """A loss is shown by the sizes of changes that were seen: what that finds, and how often falsely."""
    group = f"Losses in many small parts: p at most {ALPHA:g}, failures of a gate with a margin, and power"
    kinds: list[tuple[str, Lossy, bool]] = [
        ("50 documents that jitter by 0.02", partial(_jitters, 50, 0.02), False),
        ("300 documents that jitter by 0.1", partial(_jitters, 300, 0.1), False),
        ("30 documents, 64 samples", partial(_sampled, 30, 64), False),
        ("30 documents, 8 samples", partial(_sampled, 30, 8), False),
        ("20 clusters of 5, 20 % flips", partial(_clustered, 20, 0.2), False),
        ("100 clusters of 5, 10 % flips", partial(_clustered, 100, 0.1), False),
        ("100 documents, 3 % gain 0.5, jitter of 0.02", partial(_gained, 100, 0.03, 0.02), False),
        ("100 documents, 3 % gain 0.5, jitter of 0.1", partial(_gained, 100, 0.03, 0.1), False),
        ("30 documents, 5 % gain 0.5, a caution if none is drawn", partial(_gained, 30, 0.05, 0.0), True),
        ("500 documents, 0.5 % gain 0.5, a caution if none is drawn", partial(_gained, 500, 0.005, 0.0), True),
    ]
    for case, losses, cautioned in kinds:

        def draw(rng: np.random.Generator, losses: Lossy = losses) -> tuple[bool, ...]:
            quiet_both, both, quiet_one, one = false_alarms(*losses(rng, 0.0))
            strata = [stratum(*losses(rng, MARGIN))]
            failed = loss_bound(strata, 1.0, ALPHA, 1.0).below > MARGIN
            return both, one, failed, quiet_both, quiet_one, failed and not bound_cautions(strata, 1.0, ALPHA, False)

        beyond = f"a loss of {MARGIN * 100:g} points is beyond that margin"
        names = ("a loss, two-sided, of none", "a loss, one-sided, as a gate, of none", beyond)
        found = shares(rng, draws, draw)
        for what, share, quiet in zip(names, found[:3], found[3:], strict=True):
            yield Figure(group, what, case, share, draws, at_most=None if cautioned else ALPHA)
            if cautioned:
                yield Figure(group, f"{what}, without a caution", case, quiet, draws, at_most=ALPHA)
    for case, losses, loss, least in (
        (kinds[2][0], kinds[2][1], 0.04, 0.65), (kinds[2][0], kinds[2][1], 0.08, 0.97),
    ):  # fmt: skip

        def power(rng: np.random.Generator, losses: Lossy = losses, loss: float = loss) -> tuple[bool, ...]:
            return (false_alarms(*losses(rng, loss))[1],)

        (share,) = shares(rng, draws, power)
        yield Figure(group, f"a loss of {loss * 100:g} points is found", case, share, draws, at_least=least)


def _jitters(count: int, size: float, rng: np.random.Generator, loss: float) -> Related:
    return loss + rng.normal(0, size, count), np.arange(count)


def _sampled(count: int, samples: int, rng: np.random.Generator, loss: float) -> Related:
    rates = rng.uniform(max(loss, MARGIN), 1, count)
    return (rng.binomial(samples, rates) - rng.binomial(samples, rates - loss)) / samples, np.arange(count)


def _clustered(groups: int, rate: float, rng: np.random.Generator, loss: float) -> Related:
    """A fifth of the clusters of 5 change alike."""
    own = flips(rng, groups * 5, (rate + loss) / 2, (rate - loss) / 2).reshape(groups, 5)
    return np.where(rng.random((groups, 1)) < 0.2, own[:, :1], own).ravel(), np.arange(groups * 5) // 5


def _gained(count: int, share: float, jitter: float, rng: np.random.Generator, loss: float) -> Related:
    rest = (loss + 0.5 * share) / (1 - share)
    return np.where(rng.random(count) < share, -0.5, rest) + rng.normal(0, jitter, count), np.arange(count)


def planned(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group, what = "Passes of as many documents as are planned: probability 0.8, without a loss", "the gate passes"
    unrelated = Design((stratum(np.zeros(1000), np.arange(1000)),), 1.0, ALPHA, 1.0)
    for margin, flipping, checks in ((0.01, 0.0, 1), (0.01, 0.005, 1), (0.01, 0.02, 1), (0.01, 0.1, 1), (0.02, 0.05, 1),
                                     (0.02, 0.05, 20), (0.01, 0.005, 20)):  # fmt: skip
        count = _needed(replace(unrelated, flips=flipping), margin, checks)
        share = passing(gate_bound, count, margin, flipping / 2, flipping / 2) ** checks
        case = f"{checks} of {count:,} documents, {margin * 100:g} points, {flipping * 100:g} % flips"
        yield Figure(group, what, case, share, None, 0.75, 0.85 if flipping else None)
    cases: tuple[tuple[str, Layout, float, float | None], ...] = (
        ("passages of 1 to 31 questions", _passages, 0.01, 0.02),
        ("57 tasks of a group", _subjects, 0.01, 0.05),
        ("11 translations and their mean", _translations, 0.02, 0.05),
        ("pages of a text, planned from two runs", _pages, 0.01, None),
    )
    for words, layout, margin, changing in cases:
        # Two runs of 2,000 pages show the spread well enough that a count of documents is within 3 %.
        scale, own, known = (0.0, np.random.default_rng(0), 5.0) if changing is None else (1.0, rng, 1.0)
        design = Design(tuple(layout(partial(_losses, own, changing), known)), scale, ALPHA, flips=changing)
        count = _needed(design, margin)

        def draw(
            rng: np.random.Generator, layout: Layout = layout, margin: float = margin, scale: float = scale,
            changing: float | None = changing, times: float = known * count / design.documents,
        ) -> tuple[bool, ...]:  # fmt: skip
            return (loss_bound(layout(partial(_losses, rng, changing), times), scale, ALPHA).bound <= margin,)

        (share,) = shares(rng, draws, draw)
        case = f"{count:,} documents, {words}, {margin * 100:g} points"
        yield Figure(group, what, case, share, draws, 0.75, 0.85)


def _needed(design: Design, margin: float, checks: int = 1) -> int:
    """The documents of each of so many checks."""
    count = design.needed(margin, 0.8 ** (1 / checks))
    assert count is not None
    return count


def _losses(rng: np.random.Generator, changing: float | None, count: int) -> Floats:
    """Losses of documents of which a share changes, or (None) the nats per word that two runs of a page differ by."""
    return rng.normal(0, 0.05, count) if changing is None else flips(rng, count, changing / 2, changing / 2)


def _passages(losses: Callable[[int], Floats], times: float) -> list[Stratum]:
    sizes = np.resize(np.arange(1, 32), round(600 * times))
    return [stratum(losses(int(sizes.sum())), np.repeat(np.arange(len(sizes)), sizes))]


def _subjects(losses: Callable[[int], Floats], times: float) -> list[Stratum]:
    sizes = np.round(np.linspace(30, 460, 57) * times).astype(int)
    return [stratum(losses(size), np.arange(size), size / sizes.sum()) for size in sizes]


def _translations(losses: Callable[[int], Floats], times: float) -> list[Stratum]:
    items = [str(item) for item in range(round(250 * times))]
    return joined([Losses(losses(len(items)), items, 1 / 11) for _ in range(11)])


def _pages(losses: Callable[[int], Floats], times: float) -> list[Stratum]:
    words = np.resize(np.random.default_rng(1).lognormal(7.5, 0.7, 400), round(400 * times))
    old, new = (Ratio("perplexity", -words * (3 + nats), words) for nats in (0.0, losses(len(words))))
    return [loss_stratum(old, new, np.arange(len(words)))]


def ten_large(rng: np.random.Generator, groups: int) -> NDArray[np.int64]:
    """Clusters of 1 to 9 documents, a tenth of them 20 times as large."""
    sizes = rng.integers(1, 10, groups)
    sizes[: groups // 10] *= 20
    return sizes


def pareto(rng: np.random.Generator, groups: int) -> NDArray[np.int64]:
    """Clusters whose sizes have a Pareto tail of 1.2, as passages' questions and authors' texts have."""
    return np.minimum(1 + rng.pareto(1.2, groups), 2000).astype(np.int64)


def uneven(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = f"Coverage of 95 % intervals over uneven clusters (a caution stands below {FEW} effective ones)"
    for sizes_of, groups, words in ((ten_large, 100, "a tenth 20 times as large"), (pareto, 100, "Pareto sizes"),
                                    (ten_large, 1000, "a tenth 20 times as large")):  # fmt: skip
        for alike in (0.3, 1.0):
            yield from _covered(rng, draws, group, sizes_of, groups, alike, words)


def _covered(
    rng: np.random.Generator, draws: int, group: str, sizes_of: Sizes, groups: int, alike: float, words: str
) -> Iterator[Figure]:
    effective: list[float] = []

    def draw(rng: np.random.Generator) -> tuple[bool, ...]:
        sizes = sizes_of(rng, groups)
        codes = np.repeat(np.arange(groups), sizes)
        scores, other = (_answers(rng, codes, alike) for _ in range(2))
        effective.append(cluster_degrees(sizes.astype(np.float64)) + 1)
        one = mean_interval(scores.tolist(), clusters=[str(code) for code in codes])
        return one is not None and one[0] <= 0.7 <= one[1], *covers(other - scores, codes, 0.0)

    one, two, plain = shares(rng, draws, draw)
    few = sum(count < FEW for count in effective) > len(effective) / 2
    case = f"{groups} clusters, {words}, {alike * 100:g} % alike{', few effective ones' if few else ''}"
    limits = (0.90, None) if few else (0.93, 0.97)
    yield Figure(group, "one run's accuracy", case, one, draws, *limits)
    yield Figure(group, "difference of two runs", case, two, draws, at_least=0.93)
    yield Figure(group, "difference of two runs, clustered t", case, plain, draws)


def uneven_margins(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "False passes of a margin over uneven clusters: the true loss is the margin"
    for sizes_of, groups, words in ((ten_large, 100, "a tenth 20 times as large"), (pareto, 1000, "Pareto sizes")):
        for hit, share, lost in ((0.1, 1.0, 1.0), (0.3, 0.5, 0.8)):

            def draw(
                rng: np.random.Generator, sizes_of: Sizes = sizes_of, groups: int = groups,
                spread: tuple[float, float, float] = (hit, share, lost),
            ) -> tuple[bool, ...]:  # fmt: skip
                codes = np.repeat(np.arange(groups), sizes_of(rng, groups))
                bounds = bounds_of(related_flips(rng, codes, *spread), codes)
                return tuple(bound <= spread[0] * spread[1] * (2 * spread[2] - 1) for bound in bounds)

            ours, _, plain = shares(rng, draws, draw)
            case = f"{groups} clusters, {words}, {hit * 100:g} % touched, {lost * 100:g} % of it losses"
            yield Figure(group, "the gate's bound", case, ours, draws, at_most=ALPHA)
            yield Figure(group, "t over clusters, no correction", case, plain, draws)


def _answers(rng: np.random.Generator, codes: NDArray[np.intp], alike: float) -> Floats:
    """Seven of ten right; a share `alike` of the documents has its cluster's answer."""
    of_clusters = (rng.random(int(codes.max()) + 1) < 0.7)[codes]
    return np.where(rng.random(len(codes)) < alike, of_clusters, rng.random(len(codes)) < 0.7).astype(np.float64)


def rare(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = f"Coverage of 95 % intervals of pass@1 (a caution stands below {RARE} effective successes)"
    kinds: tuple[tuple[str, Callable[[np.random.Generator, int], Floats]], ...] = (
        ("2 % of the documents solved half of the time", lambda rng, n: np.where(rng.random(n) < 0.02, 0.5, 0.0)),
        ("rates from a beta distribution of mean 0.03", lambda rng, n: rng.beta(0.05, 1.5, n)),
        ("rates from a beta distribution of mean 0.5", lambda rng, n: rng.beta(0.5, 0.5, n)),
    )
    truths = (0.01, 0.05 / 1.55, 0.5)
    for (words, rates), truth in zip(kinds, truths, strict=True):
        for count, samples in ((164, 10), (500, 4)):

            def draw(
                rng: np.random.Generator, rates: Callable[[np.random.Generator, int], Floats] = rates,
                count: int = count, samples: int = samples, truth: float = truth,
            ) -> tuple[bool, ...]:  # fmt: skip
                scores = rng.binomial(samples, rates(rng, count)) / samples
                bounds = mean_interval(scores.tolist())
                stderr = float(scores.std(ddof=1)) / count**0.5
                low, high = t_interval(float(scores.mean()), stderr, count - 1.0, 0.95)
                return bounds is None or bounds[0] <= truth <= bounds[1], low <= truth <= high

            ours, plain = shares(rng, draws, draw)
            case = f"{count} documents, {samples} samples, {words}"
            yield Figure(group, "Wilson's by the standard error", case, ours, draws, 0.93, 0.97)
            yield Figure(group, "Student's t", case, plain, draws)


def risk(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "P(loss > margin), where the true loss is the margin"
    for count, margin, flipping in ((200, 0.05, 0.04), (1319, 0.02, 0.02), (1319, 0.02, 0.1)):

        def draw(
            rng: np.random.Generator, count: int = count, margin: float = margin, win: float = flipping / 2
        ) -> tuple[bool, ...]:
            bound = loss_bound([stratum(flips(rng, count, margin + win, win), np.arange(count))], 1.0, ALPHA)
            p = bound.p_beyond(margin)
            return p <= 0.2, p >= 0.8

        case = f"{count} documents, {margin * 100:g} points, {flipping * 100:g} % flips besides"
        for what, share in zip(("it is at most 0.2", "it is at least 0.8"), shares(rng, draws, draw), strict=True):
            yield Figure(group, what, case, share, draws, at_most=0.2)


def heavy(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    group = "Coverage of 95 % intervals of a perplexity whose pages have tails"
    kinds: tuple[tuple[str, Callable[[np.random.Generator, int], Floats]], ...] = (
        ("Student's t with 3 degrees", lambda rng, n: 0.3 * rng.standard_t(3, n)),
        ("skewed by 6.6", lambda rng, n: rng.exponential(0.6, n) ** 2 - 0.72),
    )
    for pages in (20, 62, 200):
        for words, nats in kinds:

            def draw(
                rng: np.random.Generator, pages: int = pages, nats: Callable[..., Floats] = nats
            ) -> tuple[bool, ...]:
                weights, codes = rng.lognormal(7.5, 0.7, pages), np.arange(pages)
                totals = -weights * (3 + nats(rng, pages))
                _, low, high = ratio_interval(Ratio("perplexity", totals, weights), codes)
                covers = low <= np.exp(3.0) <= high
                return covers or bool(heavy_tails(ratio_residuals(totals, weights, codes))), covers

            said, covered = shares(rng, draws, draw)
            case = f"{pages} pages, {words}"
            yield Figure(group, "it covers, or a caution stands beside it", case, said, draws, 0.93)
            yield Figure(group, "it covers", case, covered, draws)
