"""The documents that each check of a gate needs so that the whole gate passes if nothing is lost, and the probability
that it passes with the documents that there are.

All checks must pass. Each of n is planned for the n-th root of the power, as if they were independent: checks that
share documents, or clusters, pass together more often. In an `any_of` another rule may let the gate pass besides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evalengine.errors import ConfigError
from evalengine.report.gate.accuracy import Judged, Metric, broken, design_of, judged_metrics
from evalengine.report.gate.evidence import POINTS, percent_of
from evalengine.report.gate.judging import ROUNDING, limits_in
from evalengine.report.gate.policies import AccuracyRule, Policy, Rule
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.loss_bound import Stratum
from evalengine.report.stats.pass_probability import Design
from evalengine.report.stats.perplexity import ratios

RATES = (0.0, 0.005, 0.02, 0.05, 0.1)  # shares of changed answers for which the need is given
AS_SEEN = None  # in the place of a rate: as the runs differ
Rate = float | None
WITHOUT = "no margin is set, so no number of documents decides it"
WHOLE = "it has one value and no score per document, so no number of documents decides it"


@dataclass(frozen=True)
class PlannedCheck:
    """A check of a gate. Sequences have an entry for each of the plan's rates."""

    label: str  # "gsm8k exact_match,strict-match"
    limit: str  # "2 points"
    documents: int | None  # None: not known
    clusters: int | None
    needs: Sequence[int | None] = ()  # documents; None: no reasonable number is enough
    passes: Sequence[float] = ()  # the probability that it passes with its documents
    why: str = ""  # why nothing can be planned; "" if something can


@dataclass(frozen=True)
class Plan:
    """The plan of a whole gate."""

    checks: tuple[PlannedCheck, ...]
    rates: tuple[Rate, ...]  # the shares of answers that change
    power: float

    def passes(self, rate: int) -> float:
        """The probability that all checks pass with the documents that there are, at one of the rates, by its index; an
        upper limit if some checks are not planned (`whole`)."""
        return math.prod(check.passes[rate] for check in self.checks if not check.why)

    @property
    def each(self) -> float:
        """The probability with which each check must pass."""
        return self.power ** (1 / max(1, len(self.checks)))

    @property
    def whole(self) -> bool:
        return not any(check.why for check in self.checks)


def accuracy_rules(rule: Rule) -> list[AccuracyRule]:
    """The accuracy rules in a policy's rule."""
    if isinstance(rule, AccuracyRule):
        return [rule]
    return [inner for part in getattr(rule, "rules", ()) for inner in accuracy_rules(part)]


def plan_of(
    policy: Policy, a: Run, rates: Sequence[Rate], pairs: Sequence[tuple[Run, Run]] = (),
    unknown: Mapping[str, str] | None = None,
) -> Plan:  # fmt: skip
    """The plan of a policy's accuracy rules for a baseline.

    pairs: runs whose differences show how scores change, for perplexities and for the rate `AS_SEEN`. unknown: tasks of
    which `a` does not have the real documents, with the reason.

    Raises `ConfigError` for a policy without an accuracy rule, and for one that does not fit the baseline.
    """
    rules = accuracy_rules(policy.rule)
    if not rules:
        raise ConfigError(f"policy {policy.name} has no accuracy rule, so no number of documents matters to it")
    judged = [judged_metrics(rule, a, a) for rule in rules]
    tests = [(metric, of) for of in judged for metric in of.tests]
    untested = [check for of in judged for check in of.decided if check.status != "skip"]
    power = rules[0].limits.power
    each = power ** (1 / max(1, len(tests) + len(untested)))
    checks = [_planned(metric, of, a, rates, pairs, unknown or {}, each) for metric, of in tests]
    for check in untested:
        why = check.message if check.status == "fail" else WHOLE
        checks.append(PlannedCheck(f"{check.task} {check.name}", "", None, None, why=why))
    if not checks:
        raise ConfigError(f"policy {policy.name}: skips every metric of {a.source}, so nothing is judged")
    return Plan(tuple(sorted(checks, key=lambda check: check.label)), tuple(rates), power)


def _planned(
    metric: Metric, of: Judged, a: Run, rates: Sequence[Rate], pairs: Sequence[tuple[Run, Run]],
    unknown: Mapping[str, str], power: float,
) -> PlannedCheck:  # fmt: skip
    design, (task, name) = design_of(metric, a, a, of), of.names(metric)
    sums = None if isinstance(metric, str) or metric in a.scores else ratios((a, a), metric)
    unit = POINTS if sums is None else percent_of(sums[1][0])
    margin, allowed = limits_in(unit, of.tests[metric], task, design.most)
    label = f"{task} {name}"
    lacking = {key[0]: unknown[key[0]] for key in of.parts(metric) if key[0] in unknown}
    if margin is None:
        return PlannedCheck(label, "", design.documents, design.clusters, why=WITHOUT)
    limit = f"{margin:g} {unit.name}"
    if lacking:
        why = "; ".join(dict.fromkeys(lacking.values()))
        return PlannedCheck(label, limit, None, None, why=why)
    seen = _seen(metric, of, pairs)
    flips = [None if unit is not POINTS else rate for rate in rates]
    designs = [seen if rate is AS_SEEN else replace(design, flips=rate) for rate in flips]
    check = PlannedCheck(label, limit, design.documents, design.clusters)
    if None in designs:
        told = "only two runs of it show the differences of log-likelihoods; name both: runs=RUN,RUN"
        unseen = "no two of the runs have it; name two (runs=RUN,RUN), or the share of changed answers (flips=2%)"
        return replace(check, why=unseen if unit is POINTS else told)
    at_most = unit.metric(margin + ROUNDING)
    lost = math.inf if allowed is None else unit.metric(allowed + ROUNDING)
    known = [own for own in designs if own is not None]
    return replace(
        check,
        needs=[own.needed(at_most, power, lost) for own in known],
        passes=[own.passes(at_most, design.documents, lost) for own in known],
    )


def hint(policy: str, plan: Plan) -> Iterator[str]:
    """The whole gate in one line, then a line for each check that has too few documents at the highest rate."""
    known = [check for check in plan.checks if not check.why]
    if known:
        chances = " and ".join(f"{plan.passes(number):.2f} {_if(rate)}" for number, rate in enumerate(plan.rates))
        count = f"{len(known)} check{'s' * (len(known) > 1)}"
        rest = "" if plan.whole else f" of {len(plan.checks)} (`evalengine plan` explains the others)"
        yield f"policy {policy}: {count}{rest}; without a loss it passes with probability {chances}"
    for check in known:
        if check.needs[-1] is None or check.needs[-1] > (check.documents or 0):
            needs = ", ".join(f"{'too many' if need is None else f'{need:,}'} {_if(rate)}"
                              for need, rate in zip(check.needs, plan.rates, strict=True))  # fmt: skip
            yield f"{check.label}: {check.documents:,} documents; a margin of {check.limit} needs {needs}"


def _if(rate: Rate) -> str:
    return "as the runs differ" if rate is None else f"if {f'{100 * rate:g} % of' if rate else 'no'} answers change"


def _paired(a: Run, b: Run, key: ScoreKey) -> bool:
    """Whether two runs have values of a metric for the same documents."""
    return ratios((a, b), key) is not None if key not in a.scores else not broken(key, a, b)


def _seen(metric: Metric, of: Judged, pairs: Sequence[tuple[Run, Run]]) -> Design | None:
    """The differences of all pairs of runs that hold a metric, as one design; None if there are none."""
    keys = of.parts(metric)
    holding = [pair for pair in pairs if all(_paired(*pair, key) for key in keys)]
    designs = [design_of(metric, *pair, of) for pair in holding]
    if not designs:
        return None
    pooled = [Stratum(*(np.concatenate([getattr(layer, name) for layer in layers])
                        for name in ("parts", "residuals", "shares", "sizes")))
              for layers in zip(*(design.strata for design in designs), strict=True)]  # fmt: skip
    return replace(designs[0], strata=tuple(pooled), pairs=len(designs))
