"""Statistics of one metric of one run: the 95 % interval of a mean of documents' scores, or of several tasks' means,
why that may be too narrow, and what the length limit cut."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

import numpy as np
from numpy.typing import NDArray

from evalengine.errors import listed
from evalengine.records.lm_eval_file import unanswered_words
from evalengine.report.numbers import exact_sum, in_range, mean
from evalengine.report.read.groups import members
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.clusters import cautions, cluster_names
from evalengine.report.stats.intervals import cluster_degrees, clustered_stderr, heavy_tails, t_interval, task_factors
from evalengine.report.stats.paired import cluster_codes
from evalengine.report.stats.perplexity import Ratio, has_log_likelihoods, ratio_interval, ratio_residuals, ratios

CONFIDENCE = 0.95
LISTED = 3  # tasks that a caution names
Bounds = tuple[float, float]


def wilson(successes: float, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a share: `successes` of `count` > 0, which may be a sum of parts.

    With p = k / n and z the normal quantile: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    (Wilson 1927, Journal of the American Statistical Association 22; recommended for any n by Brown, Cai & DasGupta
    2001, Statistical Science 16(2)). It has a width at 0 and 1, where value -+ 1.96 stderr claims certainty.
    """
    return _wilson(successes / count, count, NormalDist().inv_cdf((1 + confidence) / 2))


def _wilson(share: float, count: float, quantile: float) -> tuple[float, float]:
    """Wilson's interval of a share of `count` documents, which need not be a whole number."""
    z2 = quantile**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count * count))) / (1 + z2 / count)
    # At the ends the interval touches 0 or 1 exactly, which rounding may miss by a bit.
    return 0.0 if share == 0 else middle - half, 1.0 if share == 1 else middle + half


def reported_interval(value: float, stderr: float | None, documents: int | None) -> tuple[float, float] | None:
    """The interval of a result of which only its standard error is known, and how many documents it is of: Wilson's for
    a share, with as many documents as would have that error (`mean_interval`), else value -+ 1.96 stderr. None where
    the error is not known or says nothing."""
    if stderr is None or not (in_range(value) and in_range(stderr)) or stderr < 0:
        return None
    quantile = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    if 0 <= value <= 1:
        count = value * (1 - value) / stderr**2 if stderr**2 else documents  # a tiny error squares to 0
        return _wilson(value, count, quantile) if count else None
    return (value - quantile * stderr, value + quantile * stderr) if stderr else None


def mean_interval(scores: Sequence[float], clusters: Sequence[str] | None = None) -> tuple[float, float] | None:
    """The interval of the mean of documents' scores: Wilson's for scores in [0, 1], else Student's t. `clusters` names
    each document's group, where documents are related.

    Shares that are not 0/1 (F1, pass@1 over several samples), and clusters, take Wilson's interval with as many
    documents as would have their standard error, mean (1 - mean) / stderr^2, and Student's quantile for the normal one
    (Korn & Graubard 1998, "Confidence Intervals for Proportions with Small Expected Number of Positive Counts Estimated
    from Survey Data", Survey Methodology 24(2)): Student's own covers .84 to .91 where few of them are above 0.

    None where the scores cannot tell: fewer than two, one that is not `in_range`, one cluster, or (not 0/1) all of them
    equal.
    """
    if len(scores) < 2 or not all(map(in_range, scores)):
        return None
    related = clusters is not None and len(set(clusters)) < len(scores)
    if set(scores) <= {0.0, 1.0} and not related:
        return wilson(int(sum(scores)), len(scores))
    return _by_stderr(scores, clusters if related else None)


def _by_stderr(scores: Sequence[float], clusters: Sequence[str] | None) -> tuple[float, float] | None:
    codes = cluster_codes(clusters, len(scores))
    degrees = cluster_degrees(np.bincount(codes).astype(np.float64))
    if not degrees > 0:
        return None
    middle, stderr = fmean(scores), clustered_stderr(np.asarray(scores, dtype=np.float64), codes)
    answers = set(scores) <= {0.0, 1.0}
    if stderr == 0 and not answers:
        return None
    if min(scores) < 0 or max(scores) > 1:
        return t_interval(middle, stderr, degrees, CONFIDENCE)
    independent = middle * (1 - middle) / stderr**2 if stderr else degrees + 1
    if answers:
        independent = min(float(len(scores)), independent)
    return _wilson(middle, independent, t_interval(0.0, 1.0, degrees, CONFIDENCE)[1])


def weighted_interval(
    values: Sequence[float], intervals: Sequence[Bounds | None], weights: Sequence[float]
) -> Bounds | None:
    """The interval of sum w_i t_i, by variance estimates recovered from the parts' own intervals.

    With parts t_i in (l_i, u_i) and weights w_i: sum w_i t_i -+ sqrt(sum w_i^2 (t_i - l_i)^2), and with u_i above
    (Zou, Huang & Zhang 2009, "A note on confidence interval estimation for a linear function of binomial proportions",
    Computational Statistics & Data Analysis 53(4)). The parts are fixed: the interval is about their documents.
    None where a part has no interval.
    """
    middle = exact_sum(weight * value for value, weight in zip(values, weights, strict=True))
    below, above = [], []
    for value, bounds, weight in zip(values, intervals, weights, strict=True):
        if bounds is None:
            return None
        below.append((weight * (value - bounds[0])) ** 2)
        above.append((weight * (bounds[1] - value)) ** 2)
    return middle - math.sqrt(math.fsum(below)), middle + math.sqrt(math.fsum(above))


def scaled(columns: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """All documents' scores, one task after the other, each times its task's weight over the task's share of the
    documents. Their plain mean is the weighted mean, and the permutation test may still exchange labels document by
    document."""
    factors = task_factors([(len(values), weight) for values, weight in zip(columns, weights, strict=True)])
    return [factor * value for values, factor in zip(columns, factors, strict=True) for value in values]


@dataclass(frozen=True)
class Cut:
    """A metric of the documents whose answers were cut, and of the finished ones."""

    count: int  # documents that were cut
    total: int
    cut: float  # the mean of those that were cut
    finished: float | None  # the mean of the others; None where there are none

    @property
    def words(self) -> str:
        """`12.5 % cut at the limit: 0.0312 on these, 0.7750 on the finished ones`."""
        rest = "" if self.finished is None else f", {self.finished:.4f} on the finished ones"
        return f"{100 * self.count / self.total:.1f} % cut at the limit: {self.cut:.4f} on these{rest}"


def cut_of(run: Run, key: ScoreKey) -> Cut | None:
    """None where no answer behind the metric was cut, or it has no score by document. A document with several samples
    counts as cut if one of them was; a group's documents are those of all its tasks."""
    parts = [part for part, _ in members(run, key)] or [key]
    scores = [(part[0], doc, value) for part in parts for doc, value in run.scores.get(part, {}).items()]
    short = [value for task, doc, value in scores if doc in run.cut.get(task, ())]
    whole = [value for task, doc, value in scores if doc not in run.cut.get(task, ())]
    if not short:
        return None
    return Cut(len(short), len(scores), mean(short), mean(whole) if whole else None)


def cut_lines(run: Run) -> Iterator[str]:
    """One line for each score with truncated answers."""
    several = len({key[0] for key in run.results}) > 1
    for key in run.results:
        if (cut := cut_of(run, key)) is not None:
            yield f"{f'{key[0]} ' if several else ''}{key[1]}, {key[2]}: {cut.words}{length_words(run, key[0])}"


def cut_words(key: ScoreKey, runs: Mapping[str, Run]) -> str:
    """Truncated and missing answers of several runs, by the label of each: `A none cut at the
    limit; B 12.5 % cut ...; B 2 empty_answer`; "" where neither is so for the metric in any of them."""
    cuts = {label: cut_of(run, key) for label, run in runs.items()}
    words = []
    if any(cuts.values()):
        said = {label: "none cut at the limit" if cut is None else cut.words for label, cut in cuts.items()}
        words += [f"{label} {said[label]}{length_words(run, key[0])}" for label, run in runs.items()]
    words += [f"{label} {counts}" for label, run in runs.items() if (counts := unanswered_of(run, key))]
    return "; ".join(words)


def unanswered_of(run: Run, key: ScoreKey) -> str:
    """`1 rejected, 2 empty_answer` of the tasks behind a metric (`Run.unanswered`); "" where there are none."""
    counts: Counter[str] = Counter()
    for task in {part[0] for part, _ in members(run, key)} or {key[0]}:
        counts.update(run.unanswered.get(task, {}))
    return unanswered_words(counts)


def length_words(run: Run, task: str) -> str:
    """The lengths of a task's generations against their budget: ` (7 to 40 tokens, median 31, of 40 allowed)`; "" where
    the run does not hold them, as for a group."""
    lengths = [len(item.output_ids) for item in run.items.values()
               if item.task == task and item.kind == "generate_until" and item.output_ids is not None]  # fmt: skip
    if not lengths:
        return ""
    budget = budget_of(run, task)
    allowed = "" if budget is None else f", of {budget:,} allowed"
    return f" ({min(lengths):,} to {max(lengths):,} tokens, median {median(lengths):,g}{allowed})"


def budget_of(run: Run, task: str) -> int | None:
    """The most tokens that an answer of the task might have, `max_gen_toks`; None where the run does not say."""
    tasks = run.identity.get("tasks")
    settings = tasks.get(task) if isinstance(tasks, Mapping) else None
    generation = settings.get("generation") if isinstance(settings, Mapping) else None
    budget = generation.get("max_gen_toks") if isinstance(generation, Mapping) else None
    return budget if isinstance(budget, int) else None


def metric_interval(run: Run, key: ScoreKey) -> tuple[float, float] | None:
    """(low, high) of a metric, with the documents' clusters; a group's follows from its tasks' own. None for a metric
    that is neither a mean nor a ratio of sums, and where the documents cannot tell (`mean_interval`)."""
    scores, value = run.scores.get(key), run.results[key][0]
    if parts := members(run, key):
        keys, weights = [part for part, _ in parts], [weight for _, weight in parts]
        values = [mean(run.scores[part].values()) for part in keys]
        intervals = [mean_interval([*run.scores[part].values()], clusters=_clusters(run, part)) for part in keys]
        return weighted_interval(values, intervals, weights)
    if not scores or has_log_likelihoods(run, key):
        return _of_ratio(run, key)
    values = list(scores.values())
    if not math.isclose(mean(values), value, rel_tol=1e-6, abs_tol=1e-6):
        return None
    return mean_interval(values, clusters=_clusters(run, key))


def _clusters(run: Run, key: ScoreKey) -> list[str] | None:
    return cluster_names(run, run, key[0], list(run.scores[key]))


def interval_cautions(run: Run, key: ScoreKey) -> list[str]:
    """Why a metric's interval may be too narrow (`clusters.cautions`); a group's has the cautions of its tasks."""
    if parts := members(run, key):
        return group_cautions({part[0]: interval_cautions(run, part) for part, _ in parts})
    scores = run.scores.get(key)
    if scores:
        return cautions(list(scores.values()), cluster_names(run, run, key[0], list(scores)))
    sums = _ratio(run, key)
    if sums is None:
        return []
    caution = heavy_tails(ratio_residuals(sums[0].totals, sums[0].weights, sums[1]))
    return [caution] if caution else []


def group_cautions(by_task: Mapping[str, Sequence[str]]) -> list[str]:
    """The cautions of a mean over tasks: those of its tasks, each with the tasks that have it."""
    tasks: dict[str, list[str]] = {}
    for task, found in by_task.items():
        for why in found:
            tasks.setdefault(why, []).append(task)
    return [f"{listed(names, LISTED)}: {why}" for why, names in tasks.items()]


def _of_ratio(run: Run, key: ScoreKey) -> tuple[float, float] | None:
    sums = _ratio(run, key)
    if sums is None:
        return None
    _, low, high = ratio_interval(*sums)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _ratio(run: Run, key: ScoreKey) -> tuple[Ratio, NDArray[np.intp]] | None:
    """A metric's sums and the documents' clusters; None for one that is no ratio of two documents or more."""
    sums = ratios((run,), key)
    if sums is None or len(sums[0]) < 2:
        return None
    documents, (ratio,) = sums
    return ratio, cluster_codes(cluster_names(run, run, key[0], documents), len(documents))
