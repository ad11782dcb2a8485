"""The metrics of two runs, and their paired statistics over what both runs score: documents, and for metrics without a
number by document (groups of tasks, perplexities) the whole.

A difference is given over the same documents only. Where the runs do not hold the same documents, a metric is computed
anew from those that both hold; a metric that cannot be has no difference, and `apart` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from evalengine.report.compare.comparability import document_change
from evalengine.report.numbers import exact_sum, in_range, mean, same_value
from evalengine.report.read.groups import members, members_of_both
from evalengine.report.read.lm_eval import ROLLING
from evalengine.report.read.run import Key, Run, ScoreKey, direction
from evalengine.report.stats.clusters import cluster_names
from evalengine.report.stats.paired import PairedResult
from evalengine.report.stats.perplexity import has_log_likelihoods, sums_of, value_of
from evalengine.report.stats.scores import Scores, is_mean, paired_scores, scores_of_pair
from evalengine.report.stats.significance import family_p, one_test

Values = tuple[float | None, float | None]


@dataclass(frozen=True)
class MetricDelta:
    """One metric: as each run reports it over all that it ran, and over what both runs score."""

    key: ScoreKey
    value_a: float | None
    value_b: float | None
    paired: PairedResult | None  # None where the runs hold no number by document or window
    left_out: int  # units without a finite score in both, or of unlike text, which no statistic can take
    higher_is_better: bool | None  # None where neither run says
    unit: Literal["document", "window"] = "document"  # what the statistics compare in pairs
    nats: bool = False  # whether the metric is a log-likelihood, which is no share
    common_a: float | None = None  # the metric over the documents of both runs; None: not known
    common_b: float | None = None
    apart: str = ""  # why there is no difference, a sentence without its full stop
    p_holm: float | None = None  # the two-sided p adjusted for all tests of the comparison (Holm 1979)

    @property
    def difference(self) -> float | None:
        """B - A over the same documents, in the metric's units."""
        if self.paired is not None:
            return self.paired.difference
        return None if self.common_a is None or self.common_b is None else self.common_b - self.common_a

    @property
    def shown(self) -> Values:
        """(A, B) of the same documents where they are known, else as reported."""
        have_common = self.common_a is not None and self.common_b is not None
        return (self.common_a, self.common_b) if have_common else (self.value_a, self.value_b)


def metric_deltas(a: Run, b: Run) -> list[MetricDelta]:
    """The metrics of either run's results; and for rolling tasks, whose perplexities have no number by document, the
    log-likelihoods behind them. The tests of one family (Holm) are those of groups and of tasks in no group: what is
    part of a tested mean is shown with its own p alone."""
    keys = sorted(a.results.keys() | b.results.keys())
    deltas = [*(delta for key in keys for delta in _metrics(a, b, key)), *_rolling(a, b)]
    in_groups = _parts(deltas, a)
    p_values = {m.key: m.paired.p_value for m in deltas if m.paired is not None and m.key not in in_groups}
    adjusted = family_p(p_values, one_test(p_values, (a, b)))
    return [replace(m, p_holm=adjusted.get(m.key)) for m in deltas]


def _metrics(a: Run, b: Run, key: ScoreKey) -> Iterator[MetricDelta]:
    """A metric's delta or deltas. Documents that the task's `cluster` column does not relate are each a cluster."""
    better = direction((a, b), key)
    left, right = a.scores.get(key, {}), b.scores.get(key, {})
    shared = left.keys() & right.keys()
    docs = [doc for doc in sorted(shared) if _finite(left[doc], right[doc])]
    likelihoods = has_log_likelihoods(a, key) or has_log_likelihoods(b, key)
    averaged = bool(shared) and not likelihoods and (is_mean(a, key) or is_mean(b, key))
    of_documents = True if likelihoods else better  # more likely is better, though a perplexity is better where less
    result = None
    if len(docs) > 1:
        result = paired_scores([scores_of_pair(a, b, key, docs, of_documents is not False)], unbounded=not averaged)
    value_a, value_b = (run.results.get(key, (None, None))[0] for run in (a, b))
    delta = MetricDelta(key, value_a, value_b, None, 0, better)
    if not shared and (whole := group_pairs(a, b, key, better is not False)) is not None:
        yield replace(delta, paired=whole, common_a=whole.mean_a, common_b=whole.mean_b)
    elif not shared:
        yield _of_a_whole(delta, a, b)
    elif averaged:
        same = left.keys() == right.keys() and len(docs) == len(shared)
        values = (value_a, value_b) if same else (_mean([left[d] for d in docs]), _mean([right[d] for d in docs]))
        yield replace(delta, paired=result, left_out=len(shared) - len(docs), common_a=values[0], common_b=values[1])
    else:  # made of the documents' numbers in another way, as lm-eval's `perplexity` of log-likelihoods
        yield _of_a_whole(delta, a, b)
        columns = [_mean([values[doc] for doc in docs]) for values in (left, right)]
        name = (key[0], f"{key[1]} per document", key[2])
        means = _mean([*left.values()]), _mean([*right.values()])
        delta = MetricDelta(name, *means, result, len(shared) - len(docs), of_documents, nats=True)
        yield replace(delta, common_a=columns[0], common_b=columns[1])


def _parts(deltas: Sequence[MetricDelta], run: Run) -> set[ScoreKey]:
    """The metrics of tasks that belong to a group whose mean is tested."""
    tested = {delta.key for delta in deltas if delta.paired is not None and delta.key[0] in run.groups}
    return {part for key in tested for part, _ in members(run, key)}


def _of_a_whole(reported: MetricDelta, a: Run, b: Run) -> MetricDelta:
    """The delta of a metric without a number by document: that of a corpus, or of several tasks."""
    if reported.value_a is None or reported.value_b is None:
        return reported
    if (weighted := weighted_values(a, b, reported.key)) is not None:
        (common_a, common_b), left_out = weighted
        if common_a is not None:
            return replace(reported, common_a=common_a, common_b=common_b, left_out=left_out)
        return replace(reported, apart="the runs share no document that this is a number of")
    if why := _unlike_documents(a, b, reported.key[0]):
        return replace(reported, apart=f"{why}, and nothing says what each of them adds")
    return replace(reported, common_a=reported.value_a, common_b=reported.value_b)


def _unlike_documents(a: Run, b: Run, task: str) -> str:
    """Why two values of a task or group are of unlike documents; "" if they are not, judging by the runs."""
    left, right = ({key[:2] for key in run.items} for run in (a, b))
    if any(key[0] == task for key in left | right):
        left, right = ({key for key in documents if key[0] == task} for documents in (left, right))
    if left != right:
        return f"A's is of {len(left)} documents and B's of {len(right)}, of which they share {len(left & right)}"
    changed = sum(document_change(a, b, *key) == "documents" for key in left)
    return f"{changed} of {len(left)} documents differ in content" if changed else ""


def _rolling(a: Run, b: Run) -> Iterator[MetricDelta]:
    """The log-likelihoods of rolling tasks. Windows of one document are related, so documents are the clusters. Where a
    run is lm-eval's, whose files hold one sum a document (`lm_eval.aligned`), documents are paired instead."""
    unit: Literal["document", "window"] = "document" if a.by_lm_eval or b.by_lm_eval else "window"
    for task in sorted({item.task for run in (a, b) for item in run.items.values() if item.kind == ROLLING}):
        left, right = (_sums(run, task) for run in (a, b))
        common = left.keys() & right.keys()
        keys = [key for key in sorted(common) if _finite(left[key], right[key]) and _same_tokens(a, b, key)]
        name = (task, f"loglikelihood per {unit}", "none")
        columns = [[values[key] for key in keys] for values in (left, right)]
        result, means = None, [_mean(column) for column in columns]
        if len(keys) > 1:
            documents = [key[1] for key in keys]
            clusters = cluster_names(a, b, task, documents) or [str(doc) for doc in documents]
            result = paired_scores([Scores(name, dict(enumerate(columns)), True, clusters)], unbounded=True)
        delta = MetricDelta(name, _mean([*left.values()]), _mean([*right.values()]), result, 0, True, unit, nats=True)
        apart = "" if keys else f"the runs share no {unit} of the same text"
        yield replace(delta, left_out=len(common) - len(keys), common_a=means[0], common_b=means[1], apart=apart)


def _sums(run: Run, task: str) -> dict[Key, float]:
    return {
        key: math.nan if item.sum_logprob is None else item.sum_logprob
        for key, item in run.items.items()
        if item.task == task and item.kind == ROLLING
    }


def _same_tokens(a: Run, b: Run, key: Key) -> bool:
    """Whether a window scores the same tokens in both runs, where they record it; another context cuts other
    windows."""
    if document_change(a, b, *key[:2]) == "documents":
        return False
    x, y = a.items[key].output_sha256, b.items[key].output_sha256
    return not x or not y or x == y


def _finite(x: float, y: float) -> bool:
    return in_range(x) and in_range(y)


def _mean(values: Sequence[float]) -> float | None:
    """The mean; None without values, or where one is not finite."""
    if not values or not all(map(math.isfinite, values)):
        return None
    return mean(values)


def group_pairs(a: Run, b: Run, key: ScoreKey, higher_is_better: bool) -> PairedResult | None:
    """The statistics of a group's mean over the documents that both runs score, with the tasks' weights.

    None where a run's mean is not one of its tasks' documents (`members`), a task is not in both, or a score is not
    finite.
    """
    parts = []
    for part, weight in members_of_both(a, b, key):
        documents = a.scores[part].keys() & b.scores[part].keys()
        if not documents:
            return None
        parts.append(scores_of_pair(a, b, part, documents, higher_is_better, weight))
    if sum(map(len, parts)) < 2 or not all(part.finite for part in parts):
        return None
    return paired_scores(parts)


def weighted_values(a: Run, b: Run, key: ScoreKey) -> tuple[tuple[float | None, float | None], int] | None:
    """((A's, B's value over the same documents), shared documents that are left out); the values are None without such
    documents.

    Documents are the same if both runs have them, with equal content, by their hashes, and with as many
    words or bytes. None if a run does not hold what its value is computed from.
    """
    left, right = sums_of(a, key), sums_of(b, key)
    if not left or not right:
        return None
    for pairs, run in ((left, a), (right, b)):
        value, reported = ratio_value(key[1], [*pairs.values()]), run.results[key][0]
        if not same_value(value, reported, 1e-9):
            return None
    shared = left.keys() & right.keys()
    weighed_alike = [doc for doc in sorted(shared) if left[doc][1] == right[doc][1]]
    docs = [doc for doc in weighed_alike if document_change(a, b, key[0], doc) != "documents"]
    values = [ratio_value(key[1], [pairs[doc] for doc in docs]) if docs else None for pairs in (left, right)]
    return (values[0], values[1]), len(shared) - len(docs)


def ratio_value(metric: str, pairs: Sequence[tuple[float, float]]) -> float:
    """A perplexity or bits per byte (lm-eval's `weighted_perplexity`, `bits_per_byte`) of documents' (log-likelihood,
    number of words or bytes)."""
    units = exact_sum(weight for _, weight in pairs)
    nats = -exact_sum(value for value, _ in pairs) / units if units else math.nan
    return value_of(nats, "bits" if metric == "bits_per_byte" else "perplexity")
