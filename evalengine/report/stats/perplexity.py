"""Perplexities, and bits per byte: ratios of sums over documents, with their clusters.

The ratio is theta = -sum L / sum W: L a document's log-likelihood, W its words or bytes, or 1 for a perplexity by
document (LAMBADA's). A perplexity is exp(theta), bits are theta / ln 2. Standard errors are those of a ratio estimator,
by the delta method over clusters (Cochran 1977, "Sampling Techniques", 6.3 and 9A; corrected as
`intervals.clustered_stderr` is, with a cluster's weight as its size).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evalengine.report.numbers import LARGEST, exact_sum, exp, mean
from evalengine.report.read.lm_eval import ROLLING
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.intervals import Floats, cluster_degrees, cluster_sums, residual_variance, t_interval
from evalengine.report.stats.loss_bound import Stratum

Kind = Literal["perplexity", "bits"]
CLOSE = 1e-6  # relative tolerance between a result and what its documents give


@dataclass(frozen=True)
class Ratio:
    """One run's perplexity or bits per byte, as sums over documents."""

    kind: Kind
    totals: Floats  # [n] log-likelihoods
    weights: Floats  # [n]

    @property
    def nats(self) -> float:
        """theta: nats per word, byte or document."""
        return -exact_sum(self.totals) / exact_sum(self.weights)

    @property
    def value(self) -> float:
        return value_of(self.nats, self.kind)


def value_of(nats: float, kind: Kind) -> float:
    """The metric at so many nats per word or byte; inf where that overflows."""
    return nats / math.log(2) if kind == "bits" else exp(nats)


def ratio_stderr(totals: Floats, weights: Floats, codes: NDArray[np.intp]) -> float:
    """Standard error of -sum totals / sum weights (nats), with clusters `codes` [n] in 0..G-1; NaN for one cluster.

    sqrt(sum_g e_g^2 / (1 - W_g / sum W)) / sum W with e_g = sum_{i in g} (-L_i - theta W_i).
    """
    if int(codes.max()) < 1:
        return math.nan
    residuals = ratio_residuals(totals, weights, codes)
    return math.sqrt(residual_variance(residuals, _sizes(weights, codes))) / math.fsum(weights)


def ratio_residuals(totals: Floats, weights: Floats, codes: NDArray[np.intp]) -> Floats:
    """e_g [G] of `ratio_stderr`: how far each cluster's nats lie above what its weight would have."""
    return cluster_sums(-totals + weights * exact_sum(totals) / math.fsum(weights), codes)


def _sizes(weights: Floats, codes: NDArray[np.intp]) -> Floats:
    return np.bincount(codes, weights=weights).astype(np.float64)


def ratio_interval(ratio: Ratio, codes: NDArray[np.intp], confidence: float = 0.95) -> tuple[float, float, float]:
    """(standard error, low, high) of the metric: Student's interval of theta, then the metric at its ends."""
    stderr = ratio_stderr(ratio.totals, ratio.weights, codes)
    low, high = t_interval(ratio.nats, stderr, cluster_degrees(_sizes(ratio.weights, codes)), confidence)
    slope = ratio.value if ratio.kind == "perplexity" else 1 / math.log(2)
    return slope * stderr, value_of(low, ratio.kind), value_of(high, ratio.kind)


def has_log_likelihoods(run: Run, key: ScoreKey) -> bool:
    """Whether the documents' numbers under a metric are log-likelihoods, of which the result is exp(-mean): LAMBADA's
    perplexity. More of such a number is better, and less of the result."""
    values = run.scores.get(key)
    if not values or key not in run.results or not max(values.values()) <= 0:
        return False
    return math.isclose(exp(-mean(values.values())), run.results[key][0], rel_tol=CLOSE)


def sums_of(run: Run, key: ScoreKey) -> Mapping[int, tuple[float, float]] | None:
    """(log-likelihood, weight) of each document of a metric that is a ratio; None where the run does not hold them."""
    if has_log_likelihoods(run, key):
        return {doc: (value, 1.0) for doc, value in run.scores[key].items()}
    return run.weighted.get(key)


def ratios(runs: Sequence[Run], key: ScoreKey) -> tuple[list[int], list[Ratio]] | None:
    """(documents, a ratio for each run) of a metric that is a ratio; None where the runs do not hold its sums.

    A document's weight depends on its text alone, so that one run's weights serve for all; a baseline from before
    baselines held them has the log-likelihoods of its requests. The sums must give what each run's results say.
    """
    columns = [sums_of(run, key) for run in runs]
    holding = [own for own in columns if own is not None]
    if not holding or any(key not in run.results for run in runs):
        return None
    documents = sorted(holding[0])
    weights = np.array([holding[0][doc][1] for doc in documents], dtype=np.float64)
    own_ratios = []
    for run, own in zip(runs, columns, strict=True):
        if own is not None and {doc: own[doc][1] for doc in own} != dict(zip(documents, weights, strict=True)):
            return None  # The runs have unlike documents or texts.
        sums = {doc: own[doc][0] for doc in own} if own is not None else likelihoods(run, key[0])
        totals = np.array([sums.get(doc, 0.0) for doc in documents], dtype=np.float64)
        kind = _kind(totals, weights, run.results[key][0])
        if kind is None or not {*sums} <= {*documents}:
            return None
        own_ratios.append(Ratio(kind, totals, weights))
    return documents, own_ratios


def loss_stratum(old: Ratio, new: Ratio, codes: NDArray[np.intp]) -> Stratum:
    """Each cluster's part of theta's rise from `old` to `new`, a ratio over the same weights."""
    losses, weight = old.totals - new.totals, math.fsum(old.weights)
    sums = cluster_sums(losses, codes)
    sizes = _sizes(old.weights, codes)
    residuals = (sums - sizes * math.fsum(losses) / weight) / weight
    return Stratum(sums / weight, residuals, sizes / weight, np.bincount(codes).astype(np.float64))


def likelihoods(run: Run, task: str) -> dict[int, float]:
    """The log-likelihood of each document of a rolling task, from its windows; NaN where a window's is not known."""
    sums: dict[int, list[float]] = {}
    for item in run.items.values():
        if item.task == task and item.kind == ROLLING:
            sums.setdefault(item.doc_id, []).append(math.nan if item.sum_logprob is None else item.sum_logprob)
    return {doc: exact_sum(values) for doc, values in sums.items()}


def _kind(totals: Floats, weights: Floats, reported: float) -> Kind | None:
    """Which of the two the results hold; None if neither, or a number of which no percents can be taken."""
    if not max(np.abs(totals).max(initial=0), weights.max(initial=0)) < LARGEST:
        return None
    nats = -exact_sum(totals) / math.fsum(weights)
    for kind in ("perplexity", "bits"):
        value = value_of(nats, kind)
        if 0 < value < math.inf and math.isclose(value, reported, rel_tol=CLOSE):
            return kind
    return None
