"""From a metric's evidence to its check: passed, failed, or undecided, with the reason and what it could detect.

With a margin (non-inferiority; Piaggio et al. 2012, "Reporting of Noninferiority and Equivalence Randomized Trials",
JAMA 308(24)):
    pass       the loss's upper bound is within the margin
    fail       its lower bound is above the margin: p, after Holm's correction, is at most alpha
    undecided  the margin is between the two bounds: more documents would settle it
Every pass alone has an error of at most alpha; no correction for the number of metrics is needed, since all must pass
(Berger 1982, "Multiparameter Hypothesis Testing and Acceptance Sampling", Technometrics 24(4)).

Without a margin:
    fail       a loss is statistically significant
    undecided  no loss is, and one of the size that the policy names (or of any size) could not have been
    pass       otherwise
With or without a margin, a loss above max_regression fails. Answers that are equal in every bit pass (`accuracy`).
"""

from __future__ import annotations

import math

from evalengine.errors import ConfigError
from evalengine.report.gate.evidence import PERCENT, Evidence, Unit, amount
from evalengine.report.gate.policies import Limits
from evalengine.report.gate.report import Check, Status
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.loss_bound import SteppedBound

ROUNDING = 1e-9  # tolerance of points and percents
UNTESTED = "has no value per document, and the policy sets no max_regression_percent: not tested"
SIGNIFICANT = "a loss is statistically significant"


def limits_in(unit: Unit, limits: Limits, task: str, most: float) -> tuple[float | None, float | None]:
    """(the margin, the largest observed loss that does not fail), in the unit that a task's metric is shown in. most:
    the most that can be lost. Raises `ConfigError` if nothing could exceed them."""
    if unit.name == PERCENT:
        return limits.margin_percent, limits.max_regression_percent
    if limits.margin is not None and limits.max_regression is None and most == 1.0 and limits.margin >= 100:
        raise ConfigError(
            f"accuracy: {task}: margin={limits.margin:g}: its scores are shares, which can lose no more than 100 "
            "points, so nothing could fail; set fewer points (2 is 0.75 to 0.73)"
        )
    return limits.margin, limits.max_regression


def tested_p(evidence: Evidence, limits: Limits) -> float:
    """The p-value that a failure rests on: of a loss beyond the margin, or of any loss where there is no margin."""
    margin, _ = limits_in(evidence.unit, limits, evidence.task, evidence.bound.most)
    return evidence.p if margin is None else evidence.bound.p_above(evidence.unit.metric(margin))


def judged(evidence: Evidence, limits: Limits, p: float | None, metrics: int) -> Check:
    """The check that the evidence gives. p: `tested_p` after Holm's correction over `metrics`; None without a test."""
    margin, allowed = limits_in(evidence.unit, limits, evidence.task, evidence.bound.most)
    loss = evidence.unit.shown(evidence.bound.loss)
    message = evidence.change
    failures, undecided, passed, detects, risk, need = [], "", "", "No test (alpha: null)", None, None
    if p is not None:
        assert limits.alpha is not None
        message += f"; {_p_values(evidence, p, metrics, margin)}"
        if margin is None:
            if p <= limits.alpha:
                failures.append(f"{SIGNIFICANT} (p = {p:.2g}{_after(metrics)}): {_in_unit(loss, evidence)}")
            detects = _detects(evidence, limits)
            undecided = _undecided_test(evidence, allowed, detects)
        else:
            detects, risk = _excluded(evidence, limits.alpha), evidence.bound.p_beyond(evidence.unit.metric(margin))
            within = evidence.unit.shown(evidence.bound.bound) <= margin + ROUNDING
            passed = f"{SIGNIFICANT}, but within the limit: " if within and evidence.p <= limits.alpha else ""
            if p <= limits.alpha:
                shown = f"a loss above the limit is statistically significant (p = {p:.2g}{_after(metrics)})"
                failures.append(f"{shown}: {_in_unit(loss, evidence)}, limit {margin:g}")
            elif not within:
                need = _need(evidence, margin, limits)
                undecided = _undecided_margin(evidence, margin, limits, need)
    if allowed is not None and not loss <= allowed + ROUNDING:
        failures.append(f"a loss of {_in_unit(loss, evidence)}, {allowed:g} allowed")
    if undecided and limits.require_power and not failures:
        failures.append(f"undecided: {undecided}; to allow this, set require_power: false for the task")
    if failures and margin is not None:
        detects = ""  # which larger losses are excluded does not matter then
    status: Status = "fail" if failures else "undecided" if undecided else "pass"
    reason = {"fail": "; ".join(failures) + ": ", "undecided": f"{undecided}: ", "pass": passed}[status]
    risk = None if risk is None or math.isnan(risk) else risk
    moved = evidence.change.split(", ")[0]
    brief = f"{moved}; {'; '.join(failures) or undecided or passed.rstrip(': ') or detects}"
    need = need if status == "undecided" and need is not None and need > evidence.count else None
    names = ("accuracy", evidence.task, evidence.name)
    return Check(*names, status, f"{reason}{message}", (), detects, risk, brief, need, cautions=evidence.cautions)


def without_spread(key: ScoreKey, a: Run, b: Run, limits: Limits, higher: bool) -> Check:
    """Check a metric that exists only for a whole task, such as a corpus-level F1, or whose parts a run lacks."""
    names = ("accuracy", key[0], f"{key[1]},{key[2]}")
    margin, allowed = limits.margin_percent, limits.max_regression_percent
    if margin is None and allowed is None:
        return Check(*names, "skip", UNTESTED)
    if key not in b.results:
        return Check(*names, "fail", "missing from the run")
    old, new = a.results[key][0], b.results[key][0]
    loss = (1 if higher else -1) * (old - new)
    message, limit = f"{old:.6g} -> {new:.6g}", margin if allowed is None else allowed
    assert limit is not None
    detects = f"Can detect: a loss of more than {limit:g} % of the baseline's value (no test: one value, no spread)"
    if math.isnan(old) or math.isnan(new):
        return Check(*names, "fail", f"not a number: {message}", (), detects)
    if not (old == new or loss <= abs(old) * limit / 100 + 1e-12):
        return Check(*names, "fail", f"worse by more than {limit:g} %: {message}", (), detects)
    if allowed is not None or old == new:
        return Check(*names, "pass", message, (), detects)
    why = "one value without a spread cannot show that the loss is within the margin"
    fix = "to limit the change of the value itself, set max_regression_percent"
    return Check(*names, "undecided", f"{why}; {fix}: {message}", (), detects)


def _p_values(evidence: Evidence, p: float, metrics: int, margin: float | None) -> str:
    raw = f"one-sided p of no loss {evidence.p:.3g} ({evidence.test})"
    if margin is not None:
        return f"{raw}, of a loss within the limit {p:.3g}{_after(metrics)}"
    return raw + (f", {p:.3g}{_after(metrics)}" if metrics > 1 else "; one metric, so no correction")


def _after(metrics: int) -> str:
    return f" after Holm over {metrics} metrics" if metrics > 1 else ""


def _undecided_test(evidence: Evidence, allowed: float | None, detects: str) -> str:
    """Return why the test could not detect the loss that the policy names; "" if it could."""
    if not math.isfinite(evidence.least.loss):
        return detects
    if allowed is None or evidence.unit.shown(evidence.least.loss) <= allowed:
        return ""
    return f"the policy allows losses of {amount(allowed, evidence.unit)}, and {detects}"


def _undecided_margin(evidence: Evidence, margin: float, limits: Limits, need: int | None) -> str:
    """Return why the bound is not within the margin, and what would settle it."""
    bound = evidence.bound
    if not math.isfinite(bound.error):
        return f"no loss can be excluded by {evidence.what} alone"
    assert limits.alpha is not None
    shown = f"{SIGNIFICANT} (p = {evidence.p:.2g}), and one" if evidence.p <= limits.alpha else "a loss"
    worst = _at_most(evidence)
    return f"{shown} up to {worst} is not excluded (limit {margin:g}); {_settled_by(evidence, limits, need)}"


def _need(evidence: Evidence, margin: float, limits: Limits) -> int | None:
    """Return how many documents bring the bound within the margin with the policy's probability, if there is no loss
    and they change as these do; None if no number does."""
    if not math.isfinite(evidence.bound.error) or _stopped(evidence):
        return None
    return evidence.design.needed(evidence.unit.metric(margin), limits.power)


def _stopped(evidence: Evidence) -> bool:
    """Whether a run in steps has not evaluated all documents. A plan takes time, which a look between steps must
    not."""
    return isinstance(evidence.bound, SteppedBound) and evidence.bound.whole is None


def _settled_by(evidence: Evidence, limits: Limits, need: int | None) -> str:
    """Return what would settle it: more documents if the task has them, else a different question."""
    if need is not None and need <= evidence.count:
        lost = evidence.unit.shown(evidence.bound.loss)
        seen = f"but these show a loss of {_in_unit(lost, evidence)}" if lost > 0 else "but these did not settle it"
        return f"{evidence.count} documents are usually enough if there is no loss, {seen}"
    more = need and f"about {need:,} documents would settle it with probability {limits.power:g}, if there is no loss"
    if _stopped(evidence):
        return "the run in steps stopped first"
    if not evidence.all_asked:
        return more or "no number of documents would settle it"
    instead = "a wider margin, repeats or another task would settle it"
    return (
        f"{more}; this task has {evidence.count:,}: {instead}" if more else f"no number of documents would: {instead}"
    )


def _excluded(evidence: Evidence, alpha: float) -> str:
    if not math.isfinite(evidence.bound.error) or evidence.bound.bound == evidence.bound.most:
        return f"No loss is excluded by {evidence.what}"
    return f"Excluded at {100 * (1 - alpha):g} %: losses above {_at_most(evidence)}"


def _at_most(evidence: Evidence) -> str:
    """Return the bound, rounded up to hundredths: to tenths it was above what `compare` shows of the same interval."""
    bound = max(0.0, evidence.unit.shown(evidence.bound.bound))
    return f"{math.ceil(bound * 100 - ROUNDING) / 100:.2f} {evidence.unit.name}"


def _detects(evidence: Evidence, limits: Limits) -> str:
    if not math.isfinite(evidence.least.loss):
        return f"{evidence.what} cannot show any loss: {evidence.least.why}"
    least = _in_unit(evidence.unit.shown(evidence.least.loss), evidence)
    return f"{evidence.what} show a loss of {least} or more with probability {limits.power:g} {evidence.assuming}"


def _in_unit(loss: float, evidence: Evidence) -> str:
    return f"{loss:.2f} {evidence.unit.name}"
