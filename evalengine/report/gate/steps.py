"""A gate over a run in steps: which of the baseline's documents it has, and when they decide.

Half of alpha is spent on looking after every document, half on the whole set (`loss_bound.SteppedBound`). Before all
documents are evaluated, only metrics of shares with a margin can be decided; the others wait for the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from evalengine.errors import ConfigError
from evalengine.report.gate.policies import AccuracyRule, Limits, Policy
from evalengine.report.numbers import exp, mean
from evalengine.report.read.run import Run
from evalengine.report.stats.clusters import cluster_names
from evalengine.report.stats.loss_bound import LossBound, SteppedBound
from evalengine.report.stats.perplexity import has_log_likelihoods
from evalengine.util.document_order import first_of_order, in_order

SEQUENTIAL = "sequential"  # the identity's part that says a run is one in steps


@dataclass(frozen=True)
class Steps:
    """The documents of a run in steps."""

    part: Run  # the baseline, with the documents of the run
    whole: bool  # whether these are all
    evaluated: Mapping[str, Sequence[Sequence[int]]]  # task -> its documents by cluster, in order of evaluation
    largest: Mapping[str, int]  # task -> documents of its largest cluster, evaluated or not
    total: Mapping[str, int]  # task -> its documents, evaluated or not

    def bound(self, task: str, losses: Mapping[int, float], fixed: LossBound, shares: bool) -> SteppedBound:
        """The bound of a task's losses (by document) that holds at every look; `fixed` is the one for a single look."""
        groups = self.evaluated[task] if shares else ()
        return SteppedBound(
            **{field.name: getattr(fixed, field.name) for field in fields(LossBound)},
            sums=np.array([sum(losses[doc] for doc in group) for group in groups], dtype=np.float64),
            sizes=np.array([len(group) for group in groups], dtype=np.float64),
            largest=float(self.largest[task]),
            whole=replace(fixed, alpha=fixed.alpha / 2) if self.whole else None,
        )


def ordered_by(a: Run) -> str:
    """Return the text that orders the documents of runs in steps against the baseline `a`: its digest, or the SHA-256
    of its scores if it is a run of another program, which has no digest.

    Nothing that a user may vary goes in, such as the policy: the best of five orders would pass a loss at the margin
    twice as often as one.
    """
    if a.digest is not None:
        return a.digest
    scores = sorted((key, sorted(values.items())) for key, values in a.scores.items())
    return hashlib.sha256(repr(scores).encode()).hexdigest()


def steps_of(policy: Policy, a: Run, b: Run) -> Steps | None:
    """Return the documents of the baseline `a` that `b` has, if it is a run in steps.

    Raises ConfigError for a policy by which it cannot be judged, and where its documents are not the first ones of the
    order that follows from the baseline: chosen documents, or the best of several orders, prove nothing.
    """
    settings = b.identity.get(SEQUENTIAL)
    if settings is None:
        return None
    if not isinstance(policy.rule, AccuracyRule):
        raise ConfigError(
            f"{b.source}: a run in steps is judged by accuracy alone; policy {policy.name} has other rules"
        )
    order_name = ordered_by(a)
    if settings.get("baseline") != order_name:
        was = settings.get("baseline")
        by = f"baseline {str(was)[:12]}" if was else f"seed {settings.get('seed')}, which could be chosen"
        raise ConfigError(f"{b.source}: its documents were evaluated in the order of {by}, and {a.source} is baseline "
                          f"{order_name[:12]}; make the run again: gate {a.source} --step {settings.get('step')} -- "
                          "SETTINGS")  # fmt: skip
    evaluated: dict[str, list[list[int]]] = {}
    largest, total = {}, {}
    documents: dict[str, set[int]] = {}
    for task in sorted({key[0] for key in a.scores}):
        docs = sorted({doc for key, values in a.scores.items() if key[0] == task for doc in values})
        names = cluster_names(b, a, task, docs) if len(b.clusters.get(task, ())) == len(docs) else None
        names = names or cluster_names(a, a, task, docs)
        if names is None and b.clusters.get(task):
            raise ConfigError(f"{a.source}: {task}: names no clusters, and the run evaluates cluster by cluster; "
                              "rewrite the baseline from a run of this version")  # fmt: skip
        clusters = None if names is None else dict(zip(docs, names, strict=True))
        order = in_order(order_name, task, docs, clusters)
        done = {doc for key, values in b.scores.items() if key[0] == task for doc in values}
        if set(first_of_order(order, len(done))) != done:
            raise ConfigError(f"{b.source}: {task}: its {len(done)} documents are not the first of the baseline's "
                              "order; run it again")  # fmt: skip
        evaluated[task] = [group for group in order if group[0] in done]
        largest[task], total[task], documents[task] = max(map(len, order)), len(docs), done
    _check(policy.rule, a)
    whole = all(len(documents[task]) == total[task] for task in total)
    return Steps(_cut(a, documents, settings), whole, evaluated, largest, total)


def _check(rule: AccuracyRule, a: Run) -> None:
    """Raises ConfigError for limits that have no always-valid form."""
    if rule.averages:
        raise ConfigError("accuracy: averages: are judged over whole sets; leave --step out")
    for key in a.results:
        if key[0] in a.groups and not rule.of(*key).skip:
            raise ConfigError(f"{key[0]} {key[1]}: a group is judged over whole sets; set skip: true for it, so that "
                              "its tasks are judged, or leave --step out")  # fmt: skip
    for key in a.scores:
        limits: Limits = rule.of(*key)
        percent = None if has_log_likelihoods(a, key) else limits.max_regression_percent
        allowed = (limits.max_regression, percent)
        if not limits.skip and (None in (limits.margin, limits.alpha) or allowed != (None, None)):
            raise ConfigError(f"{key[0]} {key[1]}: a run in steps is decided by margin and alpha, without "
                              "max_regression and max_regression_percent; set those, or leave --step out")  # fmt: skip


def _cut(a: Run, documents: Mapping[str, set[int]], settings: Any) -> Run:
    """Return the baseline with only these documents of each task."""

    def chosen(task: str, doc: int) -> bool:
        return task not in documents or doc in documents[task]

    scores = {key: {doc: value for doc, value in values.items() if chosen(key[0], doc)}
              for key, values in a.scores.items()}  # fmt: skip
    perplexities = {key: (exp(-mean(values.values())), None)
                    for key, values in scores.items() if values and has_log_likelihoods(a, key)}  # fmt: skip
    return replace(
        a, identity={**a.identity, SEQUENTIAL: settings}, scores=scores, results={**a.results, **perplexities},
        items={key: item for key, item in a.items.items() if chosen(key[0], key[1])},
        hashes={task: {doc: own for doc, own in docs.items() if chosen(task, doc)} for task, docs in a.hashes.items()},
    )  # fmt: skip
