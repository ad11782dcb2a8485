"""From a metric's evidence to its check: passed, failed, or blind, with the reason and what could have been seen.

With a margin (non-inferiority; Piaggio et al. 2012, "Reporting of Noninferiority and Equivalence Randomized Trials",
JAMA 308(24)):
    pass   the bound of the loss lies within the margin
    fail   it does not, and there is a loss: p, after Holm's correction, is at most alpha
    blind  it does not, and no loss is shown either: more documents would tell
Every pass alone has an error of at most alpha; no correction for the number of metrics is needed, since all must pass
(Berger 1982, "Multiparameter Hypothesis Testing and Acceptance Sampling", Technometrics 24(4)).

Without a margin:
    fail   there is a loss
    blind  none is shown, and none of the size that the policy names (or none at all) could have been
    pass   otherwise
A loss that is larger than max_regression fails with a margin and without.
"""

from __future__ import annotations

import math

from evalengine.report.gate.checks import Check, Status
from evalengine.report.gate.evidence import POINTS, Evidence
from evalengine.report.gate.policies import Limits
from evalengine.report.read.run import Run, ScoreKey

ROUNDING = 1e-9  # tolerance of points and percents


def judged(evidence: Evidence, limits: Limits, p: float | None, metrics: int) -> Check:
    """The check that the evidence gives. p: after Holm's correction over `metrics`; None without a test."""
    points = evidence.unit is POINTS
    margin = limits.margin if points else limits.margin_percent
    allowed = limits.max_regression if points else limits.max_regression_percent
    loss = evidence.unit.shown(evidence.bound.loss)
    message = evidence.change
    failures, blind, passed, detects = [], "", "", "no test (alpha: null)"
    if p is not None:
        assert limits.alpha is not None
        message += f"; {_p_values(evidence, p, metrics)}"
        lost = f"the loss is no noise: p is {p:.3g}{_after(metrics)}, alpha {limits.alpha:g}"
        if margin is None:
            failures += [lost] if p <= limits.alpha else []
            detects = _detects(evidence, limits)
            blind = _blind_test(evidence, limits, allowed, detects)
        else:
            detects = _rules_out(evidence, limits.alpha)
            within = evidence.unit.shown(evidence.bound.bound) <= margin + ROUNDING
            passed = "a loss, and within the margin: " if within and p <= limits.alpha else ""
            blind = "" if within else _blind_margin(evidence, margin, limits.alpha)
            if not within and p <= limits.alpha:
                failures.append(f"{lost}; {blind}")
    if allowed is not None and not loss <= allowed + ROUNDING:
        failures.append(f"{_in_unit(loss, evidence)} lost, {allowed:g} allowed")
    if blind and limits.require_power and not failures:
        failures.append(f"the gate is blind: {blind}; run more documents, or set require_power: false for the task")
    status: Status = "fail" if failures else "blind" if blind else "pass"
    reason = {"fail": "; ".join(failures) + ": ", "blind": f"{blind}: ", "pass": passed}[status]
    return Check("accuracy", evidence.task, evidence.name, status, f"{reason}{message}", (), detects)


def without_spread(key: ScoreKey, a: Run, b: Run, limits: Limits, higher: bool) -> Check:
    """The check of a metric that exists only over a whole task, as a corpus' F1, or whose parts a run does not hold."""
    names = ("accuracy", key[0], f"{key[1]},{key[2]}")
    margin, allowed = limits.margin_percent, limits.max_regression_percent
    if margin is None and allowed is None:
        text = "has no value per document, and the policy sets no max_regression_percent: not tested"
        return Check(*names, "skip", text)
    if key not in b.results:
        return Check(*names, "fail", "missing from the run")
    old, new = a.results[key][0], b.results[key][0]
    loss = (1 if higher else -1) * (old - new)
    message, limit = f"{old:.6g} -> {new:.6g}", margin if allowed is None else allowed
    assert limit is not None
    detects = f"a loss of more than {limit:g} % of the baseline's value (no test: one value, no spread)"
    if not (old == new or loss <= abs(old) * limit / 100 + 1e-12):  # a NaN on either side is no pass
        return Check(*names, "fail", f"worse by more than {limit:g} %: {message}", (), detects)
    if margin is None or old == new:
        return Check(*names, "pass", message, (), detects)
    why = "one value without a spread cannot show that a loss lies within the margin; set margin_percent: null and"
    return Check(*names, "blind", f"{why} max_regression_percent to hold the value alone: {message}", (), detects)


def _p_values(evidence: Evidence, p: float, metrics: int) -> str:
    if metrics <= 1:
        return f"one-sided p {evidence.p:.3g} ({evidence.test}; one metric, so no correction)"
    return f"one-sided p {evidence.p:.3g} raw ({evidence.test}), {p:.3g} after Holm over {metrics} metrics"


def _after(metrics: int) -> str:
    return f" after Holm over {metrics} metrics" if metrics > 1 else ""


def _blind_test(evidence: Evidence, limits: Limits, allowed: float | None, detects: str) -> str:
    """Why the test could not see the loss that the policy names; "" if it could."""
    if not math.isfinite(evidence.least.loss):
        return detects
    if allowed is None or evidence.unit.shown(evidence.least.loss) <= allowed:
        return ""
    return f"the policy asks for losses of {allowed:g} {evidence.unit.name}, and {detects}"


def _blind_margin(evidence: Evidence, margin: float, alpha: float) -> str:
    """Why the bound does not lie within the margin, and how many more documents might bring it there."""
    bound = evidence.bound
    if not math.isfinite(bound.error):
        return f"no loss can be ruled out: {evidence.what} say nothing about others"
    times = bound.times_the_documents(evidence.unit.metric(margin))
    cure = f"; {_times(times)} as many documents would tell" if math.isfinite(times) else ""
    worst = _in_unit(evidence.unit.shown(bound.bound), evidence)
    return f"the loss may be {worst}, {margin:g} allowed (confidence {1 - alpha:g}{cure})"


def _times(times: float) -> str:
    return f"{times:.1f} times" if times < 10 else f"{times:.0f} times"


def _rules_out(evidence: Evidence, alpha: float) -> str:
    if not math.isfinite(evidence.bound.error) or evidence.bound.bound == evidence.bound.most:
        return f"{evidence.what} rule out no loss"
    worst = _in_unit(max(0.0, evidence.unit.shown(evidence.bound.bound)), evidence)
    assumed = ", whatever flips" if evidence.unit is POINTS else ""
    return f"{evidence.what} rule out losses of more than {worst} (confidence {1 - alpha:g}{assumed})"


def _detects(evidence: Evidence, limits: Limits) -> str:
    if not math.isfinite(evidence.least.loss):
        return f"{evidence.what} cannot show any loss: {evidence.least.why}"
    least = _in_unit(evidence.unit.shown(evidence.least.loss), evidence)
    return f"{evidence.what} show a loss of {least} or more with probability {limits.power:g} {evidence.assuming}"


def _in_unit(loss: float, evidence: Evidence) -> str:
    return f"{loss:.2f} {evidence.unit.name}"
