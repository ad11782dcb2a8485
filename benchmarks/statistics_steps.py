"""Figures of `benchmarks statistics` on prompts, and on gates in steps: errors over all looks, what share they ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure, shares
from benchmarks.statistics_cases import ALPHA, flips, related_flips, unequal_groups
from evalengine.report.stats.intervals import Floats, cluster_sums
from evalengine.report.stats.loss_bound import SteppedBound, loss_bound, stratum
from evalengine.report.stats.measured import two_way

STEP = 100


def stepped(losses: Floats, count: int, codes: NDArray[np.intp] | None = None) -> SteppedBound:
    """The bound after the first `count` clusters of losses [n] in the order of asking."""
    own = np.arange(len(losses)) if codes is None else codes
    seen = own < count
    fixed = loss_bound([stratum(losses[seen], own[seen])], 1.0, ALPHA, 1.0)
    sizes = np.bincount(own).astype(np.float64)
    whole = replace(fixed, alpha=ALPHA / 2)
    return SteppedBound(
        fixed.loss, fixed.stderr, fixed.unit, fixed.seen, fixed.degrees, ALPHA, fixed.groups, 1.0,
        sums=cluster_sums(losses[seen], own[seen]), sizes=sizes[:count], largest=float(sizes.max()),
        whole=whole if count >= len(sizes) else None,
    )  # fmt: skip


def steps(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    """False verdicts over all looks where the loss is the margin, and the documents needed where there is none."""
    group = "Gates in steps: looks at every document, and at the whole set"
    for count, margin, rate in ((1319, 0.02, 0.0), (1319, 0.02, 0.02), (1319, 0.02, 0.1), (5000, 0.01, 0.02)):

        def wrong(
            rng: np.random.Generator, count: int = count, margin: float = margin, win: float = rate / 2
        ) -> tuple[bool, ...]:
            bound = stepped(flips(rng, count, margin + win, win), count)
            return bound.bound <= margin, bound.p_above(margin) <= ALPHA

        case = f"{count} documents, {margin * 100:g} points, {rate * 100:g} % flips besides"
        passed, failed = shares(rng, draws, wrong)
        yield Figure(group, "false passes, the loss is the margin", case, passed, draws, at_most=ALPHA)
        yield Figure(group, "false failures, the loss is the margin", case, failed, draws, at_most=ALPHA)
        yield from _asked(rng, max(20, draws // 10), group, case, count, margin, rate)

    def related(rng: np.random.Generator) -> tuple[bool, ...]:
        codes = unequal_groups(rng, 500, 9)
        bound = stepped(related_flips(rng, codes, 0.1, 0.5, 0.8), 500, codes)
        return bound.bound <= 0.03, bound.p_above(0.03) <= ALPHA

    for what, share in zip(("passes", "failures"), shares(rng, draws, related), strict=True):
        case = "500 clusters of 1 to 9 that flip together, 3 points"
        yield Figure(group, f"false {what}, the loss is the margin", case, share, draws, at_most=ALPHA)


def _asked(
    rng: np.random.Generator, draws: int, group: str, case: str, count: int, margin: float, rate: float
) -> Iterator[Figure]:
    """The documents that a gate without a loss requires, in steps of `STEP`, and whether it passes."""
    total = passed = 0
    for _ in range(draws):
        losses = flips(rng, count, rate / 2, rate / 2)
        for used in (*range(STEP, count, STEP), count):
            bound = stepped(losses, used)
            if bound.bound <= margin or bound.p_above(margin) <= ALPHA:
                break
        total, passed = total + used, passed + (bound.bound <= margin)
    yield Figure(group, "passes without a loss", case, passed / draws, draws)
    yield Figure(group, "share of the set that is asked without a loss", case, total / draws / count, draws)


def prompts(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    """False alarms of the test of prompts, where documents are of unlike difficulty and no prompt is better."""
    group = f"Prompts that do not differ: p at most {ALPHA:g}"
    for documents, count in ((50, 3), (200, 5), (200, 16)):

        def draw(rng: np.random.Generator, documents: int = documents, count: int = count) -> tuple[bool, ...]:
            chances = rng.beta(0.4, 0.4, (documents, 1))  # most are nearly always right, or nearly always wrong
            scores = (rng.random((documents, count)) < chances).astype(np.float64)
            return (two_way(scores).p_value <= ALPHA,)

        (wrong,) = shares(rng, draws, draw)
        yield Figure(group, "F test", f"{count} prompts of {documents} documents", wrong, draws, at_most=ALPHA)
