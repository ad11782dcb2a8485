"""The gate's rule "accuracy": no metric of a task is worse than in the baseline, judging by pairs of documents."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from evalengine.errors import ConfigError, first_of, listed
from evalengine.report.compare.item_differences import answer_of
from evalengine.report.gate.evidence import Evidence, Mean
from evalengine.report.gate.judging import UNTESTED, judged, limits_in, tested_p, without_spread
from evalengine.report.gate.policies import AccuracyRule, Average, Limits
from evalengine.report.gate.report import DECIDED, SHOWN, Check
from evalengine.report.gate.steps import Steps
from evalengine.report.numbers import LARGEST, exact_sum, in_range, mean
from evalengine.report.read.groups import Members, below, leaves, members, members_of_both
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.metric_interval import cut_words
from evalengine.report.stats.perplexity import has_log_likelihoods, ratios
from evalengine.report.stats.significance import family_p, one_test


def mean_of(name: str, average: Average, a: Run) -> Mean:
    """An average over the tasks that it names, each with one metric that has a score per document.

    Raises `ConfigError` for a pattern that no task of the baseline fits, and for a task that has the metric under no
    filter, under several, or over the whole task only.
    """
    where, problems = f"accuracy: averages: {name}", []
    task_names = sorted({key[0] for key in (*a.scores, *a.results)} - a.groups.keys())
    tasks = [task for task in task_names if any(fnmatchcase(task, pattern) for pattern in average.tasks)]
    for pattern in average.tasks:
        if not any(fnmatchcase(task, pattern) for task in task_names):
            problems.append(f"{where}: tasks: {pattern}: no task of the baseline; there is: {', '.join(task_names)}")
    keys = []
    scored = sorted(key for key in a.scores if not has_log_likelihoods(a, key))
    for task in tasks:
        fits = [key for key in scored if key[0] == task and average.metric in (key[1], f"{key[1]},{key[2]}")]
        if len(fits) == 1:
            keys += fits
            continue
        names = [f"{key[1]},{key[2]}" for key in scored if key[0] == task]
        why = "several filters have it" if fits else "it has no such metric with a score per document"
        problems.append(f"{where}: metric: {average.metric}: {task}: {why}; there is: {', '.join(names) or 'none'}")
    if problems:
        raise ConfigError(problems)
    sizes = [len(a.scores[key]) for key in keys]
    weights = [1 / len(keys) if average.mean == "macro" else size / sum(sizes) for size in sizes]
    title = f"{average.metric}, {average.mean} mean"
    return Mean(f"average {name}", title, tuple(zip(keys, weights, strict=True)), average.limits)


Metric = ScoreKey | str  # a metric of a task or group, or an average's name


@dataclass(frozen=True)
class Judged:
    """The parts of a baseline and a run that a rule judges."""

    decided: list[Check]  # without a test of documents
    tests: Mapping[Metric, Mean]  # metrics with a spread, groups and averages
    limits: Mapping[ScoreKey, Limits]  # of every metric


def accuracy(rule: AccuracyRule, a: Run, b: Run, steps: Steps | None = None) -> list[Check]:
    """A check per task and metric, and per average. Raises `ConfigError` for a task without a metric that could be
    tested, and if the policy skips every task: a rule that tests nothing must not hold, nor excuse another one in an
    any_of. steps: of a run in steps, its documents.
    """
    of = judged_metrics(rule, a, b, steps)
    checks = [*of.decided, *_tested(a, b, of, steps)]
    untested_tasks = {check.task for check in checks if check.message == UNTESTED}
    untested_tasks -= {check.task for check in checks if check.status in DECIDED}
    if untested_tasks or not checks:
        untested = ", ".join(sorted(untested_tasks)) or str(a.source)
        fix = "set margin_percent or max_regression_percent, or skip: true for the task"
        raise ConfigError(f"{untested}: no metric could be tested; {fix}")
    return sorted(checks, key=lambda check: (check.task, check.name))


def judged_metrics(rule: AccuracyRule, a: Run, b: Run, steps: Steps | None = None) -> Judged:
    """Resolve what the rule tests, and the checks that need no test. Raises `ConfigError`."""
    groups_of = a.groups or b.groups  # older baselines and some lm-eval outputs do not name theirs
    a, b = (run if run.groups else replace(run, groups=groups_of) for run in (a, b))
    keys = sorted({*a.scores, *a.results})
    _check_names(rule, keys)
    limits = {key: rule.of(*key) for key in keys}
    unskipped = [key for key in keys if not limits[key].skip]
    if keys and not unskipped and not rule.averages:
        raise ConfigError(_all_skipped(keys))
    problems = {key: why for key in a.scores if (why := broken(key, a, b))}
    by_document = {key for key in a.scores if not has_log_likelihoods(a, key)}
    waiting = {key for key in unskipped if steps and not steps.whole and key not in by_document}
    groups = {key: parts for key in unskipped if key not in waiting and (parts := _paired_parts(key, a, b, problems))}
    inside = parts_of_groups(rule, groups, a)
    sums = {key for key in unskipped if key not in by_document | waiting | inside and ratios((a, b), key) is not None}

    def decided(key: ScoreKey) -> Check | Mean:
        """The check of a metric that needs no test, or the mean to test."""
        names = names_of(key)
        check = partial(Check, "accuracy", *names)
        if limits[key].skip:
            return check("skip", "left out by the policy")
        if key in problems:
            return check("fail", problems[key])
        if key in inside:
            return check("skip", _reported(key, a, b))
        if key in waiting:
            return check("undecided", "is judged once all documents are evaluated")
        if key in by_document | groups.keys() | sums:
            return Mean(*names, tuple(groups.get(key, [(key, 1.0)])), limits[key])
        if _judged_by_tasks(key, a, b, limits, sums):
            return check("skip", f"its tasks are judged: {_moved(key, a, b)}")
        return without_spread(key, a, b, limits[key], _higher(key, a, limits[key]))

    found = {key: decided(key) for key in sorted(keys, key=groups.__contains__)}  # tasks before groups
    checks = [own for own in found.values() if isinstance(own, Check)]
    means: dict[Metric, Mean] = {key: own for key, own in found.items() if isinstance(own, Mean)}
    means |= {name: mean_of(name, average, a) for name, average in rule.averages.items()}
    tests = {}
    for name, test in means.items():
        if unpaired := [f"{key[0]}: {problems[key]}" for key, _ in test.parts if key in problems]:
            checks.append(Check("accuracy", test.task, test.name, "fail", "; ".join(first_of(unpaired, SHOWN))))
        else:
            named = {key: test.limits if limits[key].higher_is_better is None else limits[key] for key in test.keys}
            tests[name] = replace(
                test,
                limits=test.limits if name in sums else _in_points(test.limits, a, test.parts),
                higher_is_better={key: _higher(key, a, own) for key, own in named.items()},
                is_ratio=name in sums,
            )
    return Judged(checks, tests, limits)


def _paired_parts(key: ScoreKey, a: Run, b: Run, problems: Mapping[ScoreKey, str]) -> Members:
    """A group's tasks, if its mean can be judged by pairs of documents. If the documents of a task cannot be paired,
    these are the tasks that the baseline has, so that the group fails and names the task."""
    if found := members_of_both(a, b, key):
        return found
    own = members(a, key)
    return own if any(part in problems for part, _ in own) else []


def _judged_by_tasks(
    key: ScoreKey, a: Run, b: Run, limits: Mapping[ScoreKey, Limits], sums: Collection[ScoreKey]
) -> bool:
    """Whether a group's value, such as a mean of perplexities, needs no check: it is within its margin where those of
    its tasks are, which are tested, within theirs."""
    tasks = leaves(key[0], a.groups) if key[0] in a.groups else []
    margins = [limits[task, key[1], key[2]].margin_percent for task in tasks if (task, key[1], key[2]) in sums]
    own = limits[key].margin_percent
    implied = own is None or all(margin is not None and margin <= own for margin in margins)
    has_values = all(key in run.results and math.isfinite(run.results[key][0]) for run in (a, b))
    return 0 < len(margins) == len(tasks) and implied and has_values and limits[key].max_regression_percent is None


def _in_points(limits: Limits, a: Run, parts: Iterable[tuple[ScoreKey, float]]) -> Limits:
    """The limits of a mean of documents' scores, where a percent of the baseline's mean is so many points."""
    if limits.max_regression_percent is None:
        return limits
    whole = exact_sum(weight * mean(a.scores[key].values()) for key, weight in parts)
    points = [abs(whole) * limits.max_regression_percent, limits.max_regression]
    return replace(limits, max_regression=min(own for own in points if own is not None))


def parts_of_groups(rule: AccuracyRule, groups: Iterable[ScoreKey], a: Run) -> set[ScoreKey]:
    """The metrics of groups' tasks, and of groups inside them, which are judged themselves only where the policy names
    them."""
    inside = {(task, *key[1:]) for key in groups for task in below(a.groups, key[0])}
    return {key for key in inside if not rule.entries(key[0])}


def _reported(key: ScoreKey, a: Run, b: Run) -> str:
    """The change of a part of a group, which is not judged."""
    if key not in a.results or key not in b.results:
        return "part of a group, not judged itself"
    return f"part of a group, not judged itself unless tasks: names it: {_moved(key, a, b)}"


def _moved(key: ScoreKey, a: Run, b: Run) -> str:
    return f"{a.results[key][0]:.4f} -> {b.results[key][0]:.4f}"


def _tested(a: Run, b: Run, of: Judged, steps: Steps | None) -> Iterator[Check]:
    """Checks of metrics with a spread, which can be tested; their p-values are one family for Holm's correction."""
    single = {key: of.tests[key].limits for key in of.limits if key in of.tests and of.tests[key].keys == [key]}
    same: dict[Metric, ScoreKey] = {
        key: first if single[first] == single[key] else key for key, first in one_test(single, (a, b)).items()
    }
    tested = [metric for metric, mean in of.tests.items() if mean.limits.alpha is not None]
    count = len({same.get(metric, metric) for metric in tested})
    gathered = {metric: mean.evidence(a, b, count, steps) for metric, mean in of.tests.items()}
    p_values = family_p({metric: tested_p(gathered[metric], of.tests[metric].limits) for metric in tested}, same)
    for metric, evidence in gathered.items():
        words = "" if isinstance(metric, str) else cut_words(metric, {"baseline": a, "run": b})
        cut = (words,) if words else ()
        mean = of.tests[metric]
        if all(_same_bits(key, a, b) for key in mean.keys):  # it counts in Holm's family like the others
            why = f"equal bits, so nothing changed on these documents: {evidence.change}"
            names = (evidence.task, evidence.name)
            yield Check("accuracy", *names, "pass", why, cut, "Can detect: any changed token or logprob bit")
            continue
        check = judged(evidence, mean.limits, p_values.get(metric), count)
        undone = check.status in ("fail", "undecided") and metric in single
        details = (*cut, *(_lost(mean, a, b) if undone else ()))
        brief = "; ".join((check.brief, *cut))
        yield replace(check, details=details, brief=brief, **_estimate(evidence, mean.limits))


def _estimate(evidence: Evidence, limits: Limits) -> dict[str, Any]:
    """The loss, its bound and its margin, in the unit in which they are shown."""
    shown = [evidence.unit.shown(loss) for loss in (evidence.bound.loss, evidence.bound.bound)]
    loss, bound = (value if math.isfinite(value) else None for value in shown)
    margin, _ = limits_in(evidence.unit, limits, evidence.task, evidence.bound.most)
    return {"unit": evidence.unit.name, "loss": loss, "bound": bound, "margin": margin}


def _same_bits(key: ScoreKey, a: Run, b: Run) -> bool:
    """Whether every answer behind a metric is equal in tokens and logprobs, and so are its values."""
    digests = [(run.task_digests.get(key[0]), run.digest) for run in (a, b)]
    same = any(one is not None and one == other for one, other in zip(*digests, strict=True))
    values = [run.scores.get(key, run.weighted.get(key)) for run in (a, b)]
    return same and values[0] == values[1]


def _all_skipped(keys: Iterable[ScoreKey]) -> str:
    tasks = sorted({key[0] for key in keys})
    left = listed(tasks, SHOWN)
    what = f"accuracy: no metric is tested: the policy skips all that the baseline has (tasks: {left})"
    return f"{what}; set skip: false for one, or leave the rule out"


def broken(key: ScoreKey, a: Run, b: Run) -> str:
    """Why the pairs of one metric cannot be formed; "" if they can."""
    scores_b = b.scores.get(key)
    if scores_b is None:
        return "missing from the run"
    unlike = sorted(a.scores[key].keys() ^ scores_b.keys())
    if unlike:
        return f"{_have(len(unlike))} a value in one of the two only (the first is {unlike[0]})"
    bad = [doc for doc, value in a.scores[key].items() if not (in_range(value) and in_range(scores_b[doc]))]
    return f"{_have(len(bad))} no finite value below {LARGEST:g} (the first is {bad[0]})" if bad else ""


def _have(count: int) -> str:
    return "1 document has" if count == 1 else f"{count} documents have"


def _lost(mean: Mean, a: Run, b: Run) -> list[str]:
    """The first documents of a metric that got worse, with both answers where they are known."""
    (key,) = mean.keys
    scores, sign = a.scores.get(key, {}), 1 if mean.higher_is_better[key] != mean.is_ratio else -1
    worse = [doc for doc in sorted(scores) if sign * (scores[doc] - b.scores[key][doc]) > 0]
    return first_of([f"document {doc} got worse{_answers(key, a, b, doc)}" for doc in worse], SHOWN)


def _answers(key: ScoreKey, a: Run, b: Run, doc: int) -> str:
    answers = [answer[:80] for run in (a, b) if (answer := answer_of(run, key, doc)) is not None]
    return f": was {answers[0]!r}, is {answers[1]!r}" if len(answers) == 2 else ""


def _check_names(rule: AccuracyRule, keys: Iterable[ScoreKey]) -> None:
    """Raises `ConfigError` for a task or metric that the baseline lacks, whose limits would have no effect."""
    problems = []
    for task, own in rule.tasks.items():
        fitting = [key for key in keys if key[0] == task or fnmatchcase(key[0], task)]
        names = {name for key in fitting for name in (key[1], f"{key[1]},{key[2]}")}
        if not names:
            present = ", ".join(sorted({key[0] for key in keys}))
            problems.append(f"accuracy: tasks: {task}: the baseline has no such task; there is: {present}")
            continue
        for metric in own.get("metrics", {}):
            if metric not in names:
                present = ", ".join(sorted(names))
                problems.append(f"accuracy: tasks: {task}: metrics: {metric}: not in the baseline; there is: {present}")
    if problems:
        raise ConfigError(problems)


def _higher(key: ScoreKey, a: Run, limits: Limits) -> bool:
    better = a.higher_is_better.get(key) if limits.higher_is_better is None else limits.higher_is_better
    if better is None:
        where = f"accuracy: tasks: {key[0]}: metrics: {key[1]}: higher_is_better"
        raise ConfigError(f"{where}: the results do not say which way is better; set it to true or false")
    return better


def names_of(key: ScoreKey) -> tuple[str, str]:
    return key[0], f"{key[1]},{key[2]}"
