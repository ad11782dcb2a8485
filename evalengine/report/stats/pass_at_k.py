"""pass@k of tasks that sample every document several times: the share of documents solved by one of k samples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from evalengine.report.numbers import in_range, mean
from evalengine.report.read.run import Run, ScoreKey
from evalengine.tasks.metric import pass_at_k

EPSILON = 1e-9  # how far a mean of 0s and 1s lies from a multiple of 1 / n by rounding


def with_pass_at_k(run: Run) -> Run:
    """The run with pass@k, k = 2, 4, 8, ... and n, in addition to each metric that is the mean of a document's n
    samples, right or wrong: pass@1 is that metric itself. Runs of lm-eval, which scores the first sample only, stay as
    they are, and so do filters for which the task has reported pass@k itself."""
    if run.by_lm_eval:
        return run
    samples: dict[tuple[str, int], int] = {}
    for (task, doc, _, repeat), item in run.items.items():
        if item.kind == "generate_until":
            samples[task, doc] = max(samples.get((task, doc), 0), repeat + 1)
    scores, better = dict(run.scores), dict(run.higher_is_better)
    results: dict[ScoreKey, tuple[float, float | None]] = {}
    reported_by_task = {(task, name) for task, metric, name in run.results if re.search(r"(^| )pass@", metric)}
    for key, reported in run.results.items():
        results[key] = reported
        if (key[0], key[2]) in reported_by_task:
            continue
        for k, values in _passes(run, key, samples):
            name = (key[0], f"{_prefix(run, key)}pass@{k}", key[2])
            scores[name], better[name] = values, True
            results[name] = (mean(values.values()), None)
    if results.keys() == run.results.keys():
        return run
    return replace(run, scores=scores, results=results, higher_is_better=better)


def _passes(run: Run, key: ScoreKey, samples: dict[tuple[str, int], int]) -> Iterator[tuple[int, dict[int, float]]]:
    """(k, each document's estimate); nothing where the metric is no mean of n > 1 rights and wrongs."""
    scores = run.scores.get(key, {})
    counts = {samples.get((key[0], doc), 0) for doc in scores}
    n = counts.pop() if len(counts) == 1 else 0
    if n < 2 or run.higher_is_better.get(key) is not True:
        return
    corrects = {doc: _count(value, n) for doc, value in scores.items()}
    right = {doc: c for doc, c in corrects.items() if c is not None}
    if len(right) < len(scores):
        return
    for k in sorted({2**power for power in range(1, n.bit_length()) if 2**power <= n} | {n}):
        yield k, {doc: pass_at_k(n, c, k) for doc, c in right.items()}


def _count(share: float, n: int) -> int | None:
    """How many of n samples were right; None if the share is no multiple of 1 / n in [0, 1]."""
    if not in_range(share) or abs(share * n - round(share * n)) > EPSILON * n or not 0 <= round(share * n) <= n:
        return None
    return round(share * n)


def _prefix(run: Run, key: ScoreKey) -> str:
    """The metric's name before `pass@k`, where a filter has several metrics."""
    alike = [k for k in run.results if (k[0], k[2]) == (key[0], key[2]) and k in run.scores]
    return f"{key[1]} " if len(alike) > 1 else ""
