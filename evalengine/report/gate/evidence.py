"""A gate's evidence on one metric of two runs: how large the loss is and may be, how likely it is chance, and what
could have been seen. A metric has a score for each document, or is a perplexity, or a mean over tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from evalengine.report.compare.item_differences import changed_answers
from evalengine.report.gate.policies import Limits
from evalengine.report.gate.steps import Steps
from evalengine.report.numbers import counted, exact_sum
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.clusters import cluster_names
from evalengine.report.stats.detectable import Detectable, binary_loss, blind, mean_effect
from evalengine.report.stats.loss_bound import LossBound, bound_cautions
from evalengine.report.stats.paired import PairedResult, Test, are_shares, cluster_codes, tested
from evalengine.report.stats.pass_probability import Design
from evalengine.report.stats.perplexity import Ratio, loss_stratum, ratios
from evalengine.report.stats.scores import Scores, loss_design, paired_scores, scores_of_pair

TESTS: Mapping[Test, str] = {
    "mcnemar-exact": "exact McNemar", "permutation": "permutation test", "bound": "the bound from below",
}  # fmt: skip
MANY_FLIPS = 0.1  # the share of flipped answers for which the least detectable loss is given as well


@dataclass(frozen=True)
class Unit:
    """How a loss is shown: in points or hundredths of the metric, or in percent of the baseline."""

    name: str
    shown: Callable[[float], float]  # converts a loss from the metric's units
    metric: Callable[[float], float]  # the inverse of `shown`


PERCENT = "%"
POINTS = Unit("points", lambda loss: 100 * loss, lambda points: points / 100)
HUNDREDTHS = replace(POINTS, name="hundredths")  # of a metric beyond 0 to 1: 75 to 74.9 is a loss of 10


def unit_of(most: float) -> Unit:
    """The unit of a mean of scores. most: the most that can be lost; 1 for shares."""
    return POINTS if most == 1.0 else HUNDREDTHS


@dataclass(frozen=True)
class Evidence:
    """One metric, or one average. Losses are in the metric's units, positive if the run is worse."""

    task: str
    name: str  # "metric,filter"; of an average "metric, macro mean"
    unit: Unit
    change: str  # "0.7700 -> 0.7050 (-6.50 points), 3 better, 16 worse of 200 documents"
    p: float  # one-sided, of the run being worse
    test: str  # the name of p's test
    bound: LossBound
    design: Design  # the documents and their differences, from which `bound` is made
    least: Detectable  # the least loss that the test can detect, at alpha over all metrics
    count: int  # documents
    what: str  # what is counted: "200 documents in 31 clusters"
    all_asked: bool  # whether these are all documents that the tasks have
    assuming: str = ""  # the assumption under which the least detectable loss holds

    @property
    def cautions(self) -> tuple[str, ...]:
        """Why the bound may be too narrow."""
        return bound_cautions(self.design.strata, self.design.scale, self.design.alpha, either=False)


@dataclass(frozen=True)
class Mean:
    """A metric with a score for each document, or a mean over tasks that have one: a group's, or an average that a
    policy defines."""

    task: str  # the task's or group's name, or "average NAME"
    name: str
    parts: tuple[tuple[ScoreKey, float], ...]  # the tasks' metrics and their weights in the mean
    limits: Limits
    higher_is_better: Mapping[ScoreKey, bool] = field(default_factory=dict)  # of each part
    is_ratio: bool = False  # whether it is a perplexity, or bits per byte, of which runs hold the sums

    @property
    def keys(self) -> list[ScoreKey]:
        """The metrics whose documents make it."""
        return [key for key, _ in self.parts]

    def scores(self, a: Run, b: Run) -> list[Scores]:
        """The scores behind it, of a mean of scores."""
        return [scores_of_pair(a, b, key, a.scores[key], self.higher_is_better[key], weight)
                for key, weight in self.parts]  # fmt: skip

    def design(self, a: Run, b: Run) -> Design:
        """The documents and their losses; of a ratio, its rises in nats per word, byte or document."""
        alpha = _alpha(self.limits)
        if not self.is_ratio:
            return loss_design(self.scores(a, b), alpha)
        documents, (old, new) = self.ratios(a, b)
        codes = cluster_codes(cluster_names(a, b, self.keys[0][0], documents), len(documents))
        both = (new, old) if self.higher_is_better[self.keys[0]] else (old, new)
        # A scale of 0: equal log-likelihoods show no change, and an unseen change has no typical size here.
        return Design((loss_stratum(*both, codes),), 0.0, alpha)

    def ratios(self, a: Run, b: Run) -> tuple[Sequence[int], Sequence[Ratio]]:
        """(the documents, the ratio in either run)."""
        sums = ratios((a, b), self.keys[0])
        assert sums is not None
        return sums

    def evidence(self, a: Run, b: Run, metrics: int, steps: Steps | None = None) -> Evidence:
        """The evidence of two runs. metrics: how many share Holm's correction. steps: the documents of a run in steps;
        `steps_of` rejects means over tasks."""
        return _of_ratio(self, a, b, metrics) if self.is_ratio else _of_scores(self, a, b, metrics, steps)


def _of_ratio(mean: Mean, a: Run, b: Run, metrics: int) -> Evidence:
    """The test is that of the clusters' log-likelihood differences (`paired.tested`)."""
    design, (old, new) = mean.design(a, b), mean.ratios(a, b)[1]
    alpha = 0.05 if mean.limits.alpha is None else mean.limits.alpha
    (worse,), bound = design.strata, design.bound
    found = tested(design.strata, design.scale, design.most, answers=False)
    change = 100 * (new.value - old.value) / abs(old.value)
    what = _counted(design.documents, len(worse.parts))
    moved = f"{old.value:.6g} -> {new.value:.6g} ({change + 0.0:+.2f} %) over {what}"
    least = mean_effect(worse.parts, bound, 0.0, 1.0, alpha / max(metrics, 1), mean.limits.power, sides=1)
    why = "" if math.isfinite(least) else blind(len(worse.parts))
    return Evidence(
        mean.task, mean.name, percent_of(old), moved, found.p_one_sided, TESTS[found.test_one_sided], bound, design,
        Detectable(least, why), design.documents, what, b.asks_all, "at the spread of differences seen here",
    )  # fmt: skip


def amount(number: float, unit: Unit) -> str:
    """Return "1 point", "0.75 points", "2 hundredths" or "2 %"."""
    return f"{number:g} {unit.name.removesuffix('s') if number == 1 else unit.name}"


def percent_of(old: Ratio) -> Unit:
    """The unit that shows a rise of nats as percent of the baseline's metric."""
    if old.kind == "perplexity":
        return Unit(PERCENT, lambda nats: 100 * _expm1(nats), lambda percent: math.log1p(percent / 100))
    return Unit(PERCENT, lambda nats: 100 * nats / old.nats, lambda percent: percent / 100 * old.nats)


def _expm1(value: float) -> float:
    try:
        return math.expm1(value)
    except OverflowError:
        return math.inf


def _of_scores(mean: Mean, a: Run, b: Run, metrics: int, steps: Steps | None) -> Evidence:
    """The pairs and the test are those of `compare` (`paired_scores`)."""
    scores = mean.scores(a, b)
    (key, _), single = mean.parts[0], len(scores) == 1
    assert single or steps is None
    old, new = (exact_sum(column) for column in zip(*(part.mean_of_two for part in scores), strict=True))
    design = loss_design(scores, _alpha(mean.limits))
    bound, unit = design.bound, unit_of(design.most)
    limits, alpha = mean.limits, 0.05 if mean.limits.alpha is None else mean.limits.alpha
    alike = scores if len({part.higher_is_better for part in scores}) == 1 else [_rising(part) for part in scores]
    result = paired_scores(alike, alpha=alpha, power=limits.power, metrics=metrics)
    what, churn, assuming = _counted(result.n, result.clusters), "", ""
    p, test, all_asked = result.p_one_sided, TESTS[result.test_one_sided], b.asks_all
    if not single:
        what = f"{what} of {counted(len(scores), 'task')}"
    elif (changed := changed_answers(a, b, key, ((doc, doc) for doc in sorted(a.scores[key])))) is not None:
        churn = f", {changed} answers changed"
    if steps is not None:
        sign = 1 if scores[0].higher_is_better else -1
        losses = {doc: sign * (old - b.scores[key][doc]) for doc, old in a.scores[key].items()}
        bound = steps.bound(key[0], losses, bound, design.most == 1.0)
        design = replace(design, alpha=design.alpha / 2)  # which the bound of the whole set has
        what = f"{what} (of {steps.total[key[0]]}, evaluated in steps)"
        p, test, all_asked = bound.p_above(0.0), "betting, at every look", all_asked and steps.whole
    moved = f"{old:.4f} -> {new:.4f} ({unit.shown(new - old) + 0.0:+.2f} {unit.name})"
    change = f"{moved}, {result.wins} better, {result.losses} worse of {what}{churn}"
    least = Detectable(result.minimum_detectable_loss, result.undetectable)
    assuming = _assuming(alike, result, alpha / max(metrics, 1), limits.power)
    return Evidence(
        mean.task, mean.name, unit, change, p, test, bound, design, least, result.n, what, all_asked, assuming
    )


def _rising(part: Scores) -> Scores:
    """The scores turned around, in the same range, if less is better."""
    if part.higher_is_better:
        return part
    x, y = (np.asarray(part.columns[run]) for run in (0, 1))
    ends = 1.0 if are_shares(x, y) else float(max(x.max(), y.max()) + min(x.min(), y.min()))
    return replace(part, columns={0: (ends - x).tolist(), 1: (ends - y).tolist()}, higher_is_better=True)


def _assuming(scores: Sequence[Scores], result: PairedResult, level: float, power: float) -> str:
    """The rate of flips at which the least detectable loss holds; more flips hide a larger loss."""
    if result.test != "mcnemar-exact":
        return "at the spread of differences seen here"
    flips = (result.wins + result.losses) / result.n
    words = f"at the {flips * 100:.1f} % of answers that flip here"
    worst = 0 if scores[0].higher_is_better else 1
    can_get_worse = sum(int(np.count_nonzero(np.asarray(part.columns[0]) != worst)) for part in scores)
    if flips >= MANY_FLIPS or 0.5**can_get_worse > level:
        return words
    loss = binary_loss(result.n, can_get_worse, MANY_FLIPS, level, power)
    return f"{words}; among {MANY_FLIPS * 100:g} % flips it would take {loss * 100:.2f} points"


def _alpha(limits: Limits) -> float:
    """The error of a bound."""
    return 0.05 if limits.alpha is None else min(limits.alpha, 0.5)


def _counted(documents: int, clusters: int) -> str:
    related = f" in {clusters} cluster{'s' * (clusters != 1)}" if clusters < documents else ""
    return f"{documents} document{'s' * (documents != 1)}{related}"
