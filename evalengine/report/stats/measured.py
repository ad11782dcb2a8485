"""Statistics of a task from earlier runs, for planning the next one: how many scores flip by the schedule alone, what
more samples of a document would buy, and what the probability of the right choice would, in place of right or wrong;
and which part of a score's variance comes from where: documents, samples of one document, prompts.

Method of moments: mean squares are set equal to their expectations (Searle, Casella & McCulloch 1992, "Variance
Components", chapter 4; for persons by items, Brennan 2001, "Generalizability Theory", chapter 3). It is unbiased; what
comes out below 0 is given as 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import scipy

from evalengine.report.read.documents import choices
from evalengine.report.read.run import Run, RunData, ScoreKey
from evalengine.report.stats.intervals import Floats
from evalengine.report.stats.metric_interval import wilson

AVERAGED = re.compile(r"(?:.* )?avg@(\d+)")  # a metric that is a document's mean over samples


@dataclass(frozen=True)
class Samples:
    """Variances of a score with several samples a document."""

    between: float  # of the documents' own means
    within: float  # of one sample around its document's mean


@dataclass(frozen=True)
class TwoWay:
    """Variances of a score of documents by prompts."""

    documents: float  # some are harder than others, under every prompt
    prompts: float  # some prompts are better than others, on every document
    both: float  # what is left: a document that one prompt solves and another does not
    p_value: (
        float  # of so large differences between prompts, if there are none: F, mean square of prompts over the rest
    )

    @property
    def total(self) -> float:
        return self.documents + self.prompts + self.both

    def stderr(self, documents: int, prompts: int) -> float:
        """Standard error of the mean over so many drawn documents and prompts."""
        parts = self.documents / documents + self.prompts / prompts + self.both / (documents * prompts)
        return float(np.sqrt(parts))


def samples(means: Floats, count: int) -> Samples:
    """From the documents' shares of `count` > 1 samples, right or wrong: means [n], n > 1.

    The samples of a document vary by p (1 - p) count / (count - 1), unbiased; the means by between + within / count.
    """
    within = float(np.mean(means * (1 - means))) * count / (count - 1)
    return Samples(max(0.0, float(np.var(means, ddof=1)) - within / count), within)


def two_way(scores: Floats) -> TwoWay:
    """From one score of every document under every prompt: scores [n, p], n > 1 and p > 1.

    E MS_documents = both + p documents, E MS_prompts = both + n prompts, E MS_rest = both.
    """
    n, p = scores.shape
    mean, rows, columns = scores.mean(), scores.mean(axis=1), scores.mean(axis=0)
    of_rows = p * float(np.sum((rows - mean) ** 2)) / (n - 1)
    of_columns = n * float(np.sum((columns - mean) ** 2)) / (p - 1)
    rest = scores - rows[:, None] - columns[None, :] + mean
    freedom = (n - 1) * (p - 1)
    both = float(np.sum(rest**2)) / freedom
    rounding = 1e-12 * max(of_rows, of_columns)
    test = float(scipy.special.fdtrc(p - 1, freedom, of_columns / both)) if both > rounding else float(of_columns == 0)
    return TwoWay(max(0.0, (of_rows - both) / p), max(0.0, (of_columns - both) / n), both, test)


@dataclass(frozen=True)
class Flips:
    """Scores of 0 or 1 that differ between runs."""

    flipped: int
    documents: int  # over all pairs of runs
    pairs: int
    schedule: bool  # whether nothing but the schedule of fast numerics sets the runs apart

    @property
    def share(self) -> float:
        return self.flipped / self.documents

    @property
    def most(self) -> float:
        """The end of its one-sided 95 % interval (Wilson's), the documents counted once: pairs share them."""
        once = self.documents // self.pairs
        return wilson(round(self.share * once), once, 0.9)[1]


def pairs_of(runs: Sequence[Run]) -> tuple[list[tuple[Run, Run]], bool]:
    """(pairs of runs, whether the schedule alone sets each apart): fast runs of one configuration, if there are two;
    else the two runs that were given, if there are two."""
    fast = [run for run in runs if run.identity.get("numerics") == "fast"]
    alike = [(a, b) for a, b in combinations(fast, 2) if a.identity == b.identity]
    return alike or ([(runs[0], runs[1])] if len(runs) == 2 else []), bool(alike)


def flips(runs: Sequence[Run], tasks: Collection[str]) -> Flips | None:
    """The flips of the tasks' documents between `pairs_of` runs. None where there is no pair, or no 0/1 score."""
    pairs, schedule = pairs_of(runs)
    counted = [count for a, b in pairs if (count := _flipped(a, b, tasks)) is not None]
    if not counted:
        return None
    return Flips(sum(one for one, _ in counted), sum(of for _, of in counted), len(counted), schedule)


def sampled(run: Run, tasks: Collection[str]) -> dict[ScoreKey, tuple[int, Samples]]:
    """(samples a document, their variances) of each metric that is a mean over several samples, right or wrong."""
    found = {}
    for key, values in run.scores.items():
        named = AVERAGED.fullmatch(key[1])
        count = int(named[1]) if named and key[0] in tasks else 0
        means = np.array([*values.values()], dtype=np.float64)
        if count > 1 and len(means) > 1 and np.allclose(means * count, np.round(means * count), atol=1e-6):
            found[key] = (count, samples(means, count))
    return found


def spreads(a: RunData, b: RunData, task: str) -> tuple[float, float] | None:
    """Mean squared differences between two runs of a multiple-choice task: of right or wrong, and of the probability of
    the right choice among all. None where the runs do not hold both for two documents or more."""
    pairs = []
    for run in (a, b):
        known = {c.doc_id: (float(c.correct), c.probability) for c in choices(run, task) if c.target is not None}
        pairs.append({doc: (right, p) for doc, (right, p) in known.items() if p is not None})
    shared = pairs[0].keys() & pairs[1].keys()
    if len(shared) < 2:
        return None
    apart = [[(pairs[0][doc][which] - pairs[1][doc][which]) ** 2 for doc in shared] for which in (0, 1)]
    return math.fsum(apart[0]) / len(shared), math.fsum(apart[1]) / len(shared)


def _flipped(a: Run, b: Run, tasks: Collection[str]) -> tuple[int, int] | None:
    """(flips, documents) over the tasks; of a task's metrics the one with the most flips."""
    by_task: dict[str, tuple[int, int]] = {}
    for key in a.scores.keys() & b.scores.keys():
        x, y = a.scores[key], b.scores[key]
        shared = x.keys() & y.keys()
        if key[0] not in tasks or not shared or not {x[d] for d in shared} | {y[d] for d in shared} <= {0.0, 1.0}:
            continue
        by_task[key[0]] = max(by_task.get(key[0], (-1, 0)), (sum(x[d] != y[d] for d in shared), len(shared)))
    return (sum(f for f, _ in by_task.values()), sum(n for _, n in by_task.values())) if by_task else None
