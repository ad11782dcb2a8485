"""The gate's rule "accuracy": no metric of a task is worse than in the baseline, as far as pairs of documents tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from evalengine.errors import ConfigError
from evalengine.report.checks import SHOWN, Check
from evalengine.report.gate_power import Detectable, detectable_loss
from evalengine.report.policies import AccuracyRule, Limits
from evalengine.report.runs import Run, ScoreKey
from evalengine.report.statistics import PairedResult, compare_many, paired


def accuracy(rule: AccuracyRule, a: Run, b: Run) -> list[Check]:
    """A check per task and metric. Raises `ConfigError` for a task without a metric that could be tested, and if the
    policy skips every task: a rule that tests nothing must not hold, nor excuse another one in an any_of.
    """
    known = sorted({*a.scores, *a.results})
    _check_names(rule, known)
    limits = {key: rule.of(*key) for key in known}
    checks = [Check("accuracy", *_names(key), "skip", "left out by the policy") for key in known if limits[key].skip]
    kept = [key for key in known if not limits[key].skip]
    if known and not kept:
        raise ConfigError(_all_skipped(known))
    broken = {key: _broken(key, a, b) for key in kept if key in a.scores}
    checks += [Check("accuracy", *_names(key), "fail", why) for key, why in broken.items() if why]
    sound = [key for key, why in broken.items() if not why]
    count = sum(limits[key].alpha is not None for key in sound)
    pairs = {key: _paired(key, a, b, limits[key], count) for key in sound}
    tested = {key: pairs[key][0] for key in sound if limits[key].alpha is not None}
    adjusted = compare_many(tested, one_sided=True)
    checks += [_paired_check(key, a, b, limits[key], *pairs[key], adjusted.get(key), count) for key in sound]
    checks += [_aggregated_check(key, a, b, limits[key]) for key in kept if key not in a.scores]
    blind = {key[0] for key in kept} - {check.task for check in checks if check.status in ("pass", "fail")}
    if blind or not checks:
        what = ", ".join(sorted(blind)) or str(a.source)
        raise ConfigError(f"{what}: no metric could be tested; set max_regression_percent, or skip: true for the task")
    return sorted(checks, key=lambda check: (check.task, check.name))


def _all_skipped(known: Iterable[ScoreKey]) -> str:
    tasks = sorted({key[0] for key in known})
    left = ", ".join(tasks[:SHOWN]) + (f" and {len(tasks) - SHOWN} more" if len(tasks) > SHOWN else "")
    what = f"accuracy: no metric is tested: the policy skips all that the baseline has (tasks: {left})"
    return f"{what}; set skip: false for one, or leave the rule out"


def _paired(key: ScoreKey, a: Run, b: Run, limits: Limits, count: int) -> tuple[PairedResult, Detectable]:
    """The pairs' statistics, and what they can detect in Holm's first and hardest step, at alpha / count."""
    documents = sorted(a.scores[key])
    x, y = (np.array([run.scores[key][doc] for doc in documents], dtype=np.float64) for run in (a, b))
    higher, alpha = _higher(key, a, limits), 0.05 if limits.alpha is None else limits.alpha
    result = paired(x, y, higher_is_better=higher, alpha=alpha / max(count, 1), power=limits.power)
    return result, detectable_loss(x, y, result, higher, alpha, limits.power, count)


def _paired_check(
    key: ScoreKey, a: Run, b: Run, limits: Limits, result: PairedResult, least: Detectable, p: float | None, count: int
) -> Check:
    """Fails for a loss that is significant, larger than allowed, or (require_power) too small to be seen."""
    sign = 1 if _higher(key, a, limits) else -1
    loss = sign * (result.mean_a - result.mean_b) * 100
    message = (
        f"{result.mean_a:.4f} -> {result.mean_b:.4f} ({result.difference * 100 + 0.0:+.2f} points), "
        f"{result.wins} better, {result.losses} worse of {result.n} documents"
    )
    reasons, detects = [], "no test (alpha: null)"
    if p is not None:
        assert limits.alpha is not None
        message += f"; one-sided p {result.p_one_sided:.3g} ({result.test})"
        message += f", {p:.3g} after Holm over {count}" if count > 1 else ""
        if p <= limits.alpha:
            reasons.append(f"the loss is no noise: p is {p:.3g}, alpha {limits.alpha:g}")
        detects = _detects(least, limits, result.n)
        if limits.require_power and limits.max_regression is not None and not least.loss * 100 <= limits.max_regression:
            cure = "raise max_regression" if math.isfinite(least.loss) else "set require_power: false for the task"
            reasons.append(
                f"the gate is blind: the policy asks for losses of {limits.max_regression:g} points, {detects}; "
                f"run more documents, or {cure}"
            )
    if limits.max_regression is not None and loss > limits.max_regression + 1e-9:
        reasons.append(f"{loss:.2f} points lost, {limits.max_regression:g} allowed")
    if not reasons:
        return Check("accuracy", *_names(key), "pass", message, (), detects)
    details = tuple(_lost(key, a, b, sign))
    return Check("accuracy", *_names(key), "fail", f"{'; '.join(reasons)}: {message}", details, detects)


def _detects(least: Detectable, limits: Limits, n: int) -> str:
    if not math.isfinite(least.loss):
        return f"{n} documents cannot show any loss: {least.why}"
    return f"{n} documents show a loss of {least.loss * 100:.2f} points or more with probability {limits.power:g}"


def _aggregated_check(key: ScoreKey, a: Run, b: Run, limits: Limits) -> Check:
    """For metrics that only exist over a whole task, such as a corpus' perplexity."""
    allowed = limits.max_regression_percent
    if allowed is None:
        text = "has no value per document, and the policy sets no max_regression_percent: not tested"
        return Check("accuracy", *_names(key), "skip", text)
    if key not in b.results:
        return Check("accuracy", *_names(key), "fail", "missing from the run")
    old, new = a.results[key][0], b.results[key][0]
    loss = (1 if _higher(key, a, limits) else -1) * (old - new)
    message = f"{old:.6g} -> {new:.6g}"
    detects = f"a loss of more than {allowed:g} % of the baseline's value (no test: one value, no spread)"
    if old == new or loss <= abs(old) * allowed / 100 + 1e-12:  # a NaN on either side is no pass
        return Check("accuracy", *_names(key), "pass", message, (), detects)
    return Check("accuracy", *_names(key), "fail", f"worse by more than {allowed:g} %: {message}", (), detects)


def _broken(key: ScoreKey, a: Run, b: Run) -> str:
    """Why the pairs of one metric cannot be formed; "" if they can."""
    theirs = b.scores.get(key)
    if theirs is None:
        return "missing from the run"
    unlike = sorted(a.scores[key].keys() ^ theirs.keys())
    if unlike:
        return f"{len(unlike)} documents have a value in one of the two only (the first is {unlike[0]})"
    bad = [doc for doc, value in a.scores[key].items() if not (math.isfinite(value) and math.isfinite(theirs[doc]))]
    return f"{len(bad)} documents have no finite value (the first is {bad[0]})" if bad else ""


def _lost(key: ScoreKey, a: Run, b: Run, sign: int) -> Iterator[str]:
    """The first documents that got worse, with both answers where they are known."""
    task, _, filter_name = key
    worse = [doc for doc in sorted(a.scores[key]) if sign * (a.scores[key][doc] - b.scores[key][doc]) > 0]
    answers = [run.answers.get((task, filter_name), {}) for run in (a, b)]
    for doc in worse[:SHOWN]:
        said = [answer[doc][:80] for answer in answers if doc in answer]
        yield f"document {doc} got worse" + (f": was {said[0]!r}, is {said[1]!r}" if len(said) == 2 else "")
    if len(worse) > SHOWN:
        yield f"and {len(worse) - SHOWN} more"


def _check_names(rule: AccuracyRule, known: Iterable[ScoreKey]) -> None:
    """A task or metric that the baseline lacks is a slip of the pen that would leave its limits without effect."""
    problems = []
    for task, own in rule.tasks.items():
        names = {name for key in known if key[0] == task for name in (key[1], f"{key[1]},{key[2]}")}
        if not names:
            there = ", ".join(sorted({key[0] for key in known}))
            problems.append(f"accuracy: tasks: {task}: the baseline has no such task; there is: {there}")
            continue
        for metric in own.get("metrics", {}):
            if metric not in names:
                there = ", ".join(sorted(names))
                problems.append(f"accuracy: tasks: {task}: metrics: {metric}: not in the baseline; there is: {there}")
    if problems:
        raise ConfigError(problems)


def _higher(key: ScoreKey, a: Run, limits: Limits) -> bool:
    better = a.higher_is_better.get(key) if limits.higher_is_better is None else limits.higher_is_better
    if better is None:
        where = f"accuracy: tasks: {key[0]}: metrics: {key[1]}: higher_is_better"
        raise ConfigError(f"{where}: the results do not say which way is better; set it to true or false")
    return better


def _names(key: ScoreKey) -> tuple[str, str]:
    return key[0], f"{key[1]},{key[2]}"
