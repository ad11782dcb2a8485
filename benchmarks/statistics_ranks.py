"""Figures of `benchmarks statistics` on several models: wrong winners in a whole comparison, and true ranks covered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
from scipy import stats

from benchmarks.figures import Draw, Figure, shares
from benchmarks.statistics_cases import ALPHA, Floats, rare_losses
from evalengine.report.leaderboard.board import Contest, contest
from evalengine.report.leaderboard.compose import Board, adjusted
from evalengine.report.leaderboard.means import group
from evalengine.report.stats import paired
from evalengine.report.stats.detectable import Detectable
from evalengine.report.stats.scores import Scores

GROUP = "Several models: ranks on every task and on their average, from one family of tests"
LEVELS = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])  # of 12 models, two and two equal
CASES = {0.0: "all equal", 0.06: "two and two equal, 6 points apart, in another order on each task"}
DOCUMENTS, CLUSTERS = 200, 12
FEWER = {3: 1, 6: 4, 12: 10}  # draws of so many models are divided by this: the pairs grow with their square


def ranks(rng: np.random.Generator, draws: int) -> Iterator[Figure]:
    """How often a comparison names a wrong winner anywhere, and how often all true ranks are in their intervals."""
    # Detectable effects take most of the time and change no p-value; a McNemar test depends on two counts alone.
    quick: dict[str, Any] = {name: lambda *_: math.inf for name in ("binary_effect", "mean_effect")}
    quick |= {"detectable_loss": lambda *_: Detectable(math.inf), "mcnemar": cache(paired.mcnemar)}
    with mock.patch.multiple(paired, **quick):
        for count, fewer in FEWER.items():
            for step, truth in CASES.items():
                rates = np.array([np.roll(0.5 + step * LEVELS[:count], 2 * task) for task in range(3)])
                truths = [*rates, rates.mean(0)]

                def answers(
                    rng: np.random.Generator, rates: Floats = rates, truths: Sequence[Floats] = truths
                ) -> tuple[bool, ...]:
                    return _outcome(_compared([_answers(rng, own) for own in rates], True), truths)

                case = f"{count} models, 3 tasks of {DOCUMENTS} documents: {truth}"
                yield from _figures(case, rng, max(1, draws // fewer), answers)

        def losses(rng: np.random.Generator) -> tuple[bool, ...]:
            scores = [_losses(rng, np.array(LEVELS[:3]), size) for size in (2, 4)]
            return _outcome(_compared(scores, False, CLUSTERS), [LEVELS[:3]] * 4)

        case = f"3 models, 2 tasks of {CLUSTERS} clusters of 2 or 4 documents, lower is better: one is worse"
        yield from _figures(case, rng, max(1, draws // 8), losses)

        def rare(rng: np.random.Generator) -> tuple[bool, ...]:
            scores = [0.6 + rare_losses(rng, (3, count)) for count in (100, 300)]
            return _outcome(_compared(scores, True), [np.full(3, 0.6)] * 4)

        case = "3 models, 2 tasks of 100 and 300 documents, of which each model loses 0.5 on 3 %: all equal"
        yield from _figures(case, rng, max(1, draws // 8), rare)


def _figures(case: str, rng: np.random.Generator, draws: int, draw: Draw) -> Iterator[Figure]:
    wrong, raw, covered, found = shares(rng, draws, draw)
    yield Figure(GROUP, "any wrong winner", case, wrong, draws, at_most=ALPHA)
    yield Figure(GROUP, "any wrong winner by raw p", case, raw, draws)
    yield Figure(GROUP, "all true ranks in their intervals", case, covered, draws, at_least=1 - ALPHA)
    yield Figure(GROUP, "first and last model of the first task separated", case, found, draws)


def _answers(rng: np.random.Generator, rates: Floats) -> Floats:
    """0/1 scores [models, DOCUMENTS] of documents of unlike difficulty; in the long run a model solves its rate."""
    difficulty, luck = rng.normal(size=DOCUMENTS), rng.normal(size=(len(rates), DOCUMENTS))
    return np.asarray(difficulty + luck < math.sqrt(2) * stats.norm.ppf(rates)[:, None], dtype=np.float64)


def _losses(rng: np.random.Generator, levels: Floats, size: int) -> Floats:
    """Losses [models, documents] in clusters of `size` that are related within each model too."""
    related = np.repeat(rng.exponential(size=(len(levels), CLUSTERS)), size, axis=1)
    return np.asarray(levels[:, None] + related + rng.exponential(size=related.shape), dtype=np.float64)


def _compared(scores: Sequence[Floats], better: bool, clusters: int | None = None) -> list[Contest]:
    """The contests of each task and of the averages. scores: [models, documents] of each task."""
    count, parts = len(scores[0]), {}
    for task, own in enumerate(scores):
        names = [f"{n * clusters // own.shape[1]}" for n in range(own.shape[1])] if clusters else None
        columns = {model: row.tolist() for model, row in enumerate(own)}
        parts[f"t{task}"] = Scores((f"t{task}", "acc", "none"), columns, better, names)
    single = [contest(part, count) for part in parts.values()]
    models = [f"m{n}" for n in range(count)]
    return adjusted(Board([], models, None, single, [group("average", parts, count)], [], {})).tested


def _outcome(contests: Sequence[Contest], truths: Sequence[Floats]) -> tuple[bool, bool, bool, bool]:
    """Whether any significant test, and any with a small raw p, has the wrong winner; whether the intervals hold all
    ranks, of equal models every rank that they share; and whether the first task separates its first and last model."""
    wrong = raw = False
    covered = True
    for entry, means in zip(contests, truths, strict=True):
        true = np.round(means, 9) * (1 if entry.higher_is_better else -1)
        for test in entry.tests:
            better = float(np.sign(true[test.b - 1] - true[test.a - 1]))  # b's, truly
            if entry.wins(test) is not {1.0: True, -1.0: False}.get(better):
                wrong, raw = wrong or test.significant, raw or test.result.p_value < ALPHA
        for score, value in zip(entry.scores, true, strict=True):
            assert score is not None and score.ranks is not None
            ends = 1 + int((true > value).sum()), len(true) - int((true < value).sum())
            covered = covered and score.ranks[0] <= ends[0] and score.ranks[1] >= ends[1]
    first, last = contests[0].scores[0], contests[0].scores[-1]
    return wrong, raw, covered, not {*(first.tie_group if first else "")} & {*(last.tie_group if last else "")}
