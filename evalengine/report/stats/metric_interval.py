"""What is said of one metric of one run: its 95 % interval, why that may be too narrow, and what the length limit
cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalengine.report.numbers import exact_sum
from evalengine.report.read.groups import members
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.clusters import cautions, cluster_names, heavy_tails
from evalengine.report.stats.mean_interval import mean_interval, weighted_interval

if TYPE_CHECKING:
    from evalengine.report.stats.perplexity import Ratio


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
    finished = exact_sum(whole) / len(whole) if whole else None
    return Cut(len(short), len(scores), exact_sum(short) / len(short), finished)


def cut_lines(run: Run) -> Iterator[str]:
    """What the length limit cut, beside each score that it touches."""
    several = len({key[0] for key in run.results}) > 1
    for key in run.results:
        if (cut := cut_of(run, key)) is not None:
            yield f"{f'{key[0]} ' if several else ''}{key[1]}, {key[2]}: {cut.words}{length_words(run, key[0])}"


def cut_words(key: ScoreKey, runs: Mapping[str, Run]) -> str:
    """What the limit cut in each of several runs, by the label of each: `A none cut at the limit; B 12.5 % cut ...`;
    "" where no answer behind the metric was cut in any of them."""
    cuts = {label: cut_of(run, key) for label, run in runs.items()}
    if not any(cuts.values()):
        return ""
    words = {label: "none cut at the limit" if cut is None else cut.words for label, cut in cuts.items()}
    return "; ".join(f"{label} {words[label]}{length_words(run, key[0])}" for label, run in runs.items())


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
        values = [math.fsum(run.scores[part].values()) / len(run.scores[part]) for part in keys]
        intervals = [mean_interval([*run.scores[part].values()], clusters=_clusters(run, part)) for part in keys]
        return weighted_interval(values, intervals, weights)
    if not scores:
        return _of_ratio(run, key)
    values = list(scores.values())
    if not math.isclose(math.fsum(values) / len(values), value, rel_tol=1e-6, abs_tol=1e-6):
        return None
    return mean_interval(values, clusters=_clusters(run, key))


def _clusters(run: Run, key: ScoreKey) -> list[str] | None:
    return cluster_names(run, run, key[0], list(run.scores[key]))


def interval_cautions(run: Run, key: ScoreKey) -> list[str]:
    """Why a metric's interval may be too narrow (`clusters.cautions`)."""
    scores = run.scores.get(key)
    if scores:
        return cautions(list(scores.values()), cluster_names(run, run, key[0], list(scores)))
    sums = _ratio(run, key)
    if sums is None:
        return []
    from evalengine.report.stats.perplexity import ratio_residuals  # SciPy takes long to import

    caution = heavy_tails(ratio_residuals(sums[0].totals, sums[0].weights, sums[1]))
    return [caution] if caution else []


def _of_ratio(run: Run, key: ScoreKey) -> tuple[float, float] | None:
    sums = _ratio(run, key)
    if sums is None:
        return None
    from evalengine.report.stats.perplexity import ratio_interval

    _, low, high = ratio_interval(*sums)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _ratio(run: Run, key: ScoreKey) -> tuple[Ratio, NDArray[np.intp]] | None:
    """A metric's sums and the documents' clusters; None for one that is no ratio of two documents or more."""
    if key not in run.weighted or len(run.weighted[key]) < 2:
        return None
    from evalengine.report.stats.paired import cluster_codes
    from evalengine.report.stats.perplexity import ratios

    sums = ratios((run,), key)
    if sums is None:
        return None
    documents, (ratio,) = sums
    return ratio, cluster_codes(cluster_names(run, run, key[0], documents), len(documents))
