"""The documents that each check of a gate needs so that the whole gate passes if nothing is lost, and the probability
that it passes with the documents that there are.

All checks of a rule, and all rules of an `all_of`, must pass. Each of n checks is planned for the n-th root of its
power, as if they were independent: checks that share documents, or clusters, pass together more often. Of an `any_of`
one rule must pass, so each is planned as if it were alone. Only accuracy rules are planned, not digests and tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from evalengine.errors import ConfigError
from evalengine.report.gate.accuracy import Judged, Metric, broken, judged_metrics
from evalengine.report.gate.evidence import Mean, amount, percent_of, unit_of
from evalengine.report.gate.judging import ROUNDING, limits_in
from evalengine.report.gate.policies import AccuracyRule, AllOf, AnyOf, Limits, Policy, Rule
from evalengine.report.gate.report import Check
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.loss_bound import Stratum
from evalengine.report.stats.pass_probability import Design
from evalengine.report.stats.perplexity import ratios

RATES = (0.0, 0.005, 0.02, 0.05, 0.1)  # shares of changed answers for which the need is given
AS_SEEN = None  # instead of a rate: as the runs differ
Rate = float | None
WITHOUT = "no margin is set, so no number of documents decides it"
UNSCORED = "max_regression_percent is of the baseline's value, which only a run has; name one: runs=RUN"
WHOLE = "it has one value and no score per document, so no number of documents decides it"


@dataclass(frozen=True)
class PlannedCheck:
    """A check of a gate. Sequences have an entry for each of the plan's rates."""

    label: str  # "gsm8k exact_match,strict-match"
    limits: Limits  # the policy's
    limit: str  # the margin: "2 points"
    documents: int | None  # None: not known
    clusters: int | None
    needs: Sequence[int | None] = ()  # documents; None: no reasonable number is enough
    passes: Sequence[float] = ()  # the probability that it passes with its documents
    why: str = ""  # why nothing can be planned; "" if something can
    each: float = 0.8  # the probability with which it must pass for the rule's power: `needs` gives it


@dataclass(frozen=True)
class Plan:
    """The plan of a rule, or of a whole gate."""

    checks: Sequence[PlannedCheck]
    rates: Sequence[Rate]  # the shares of answers that change
    # The least and the largest probability that the accuracy rules pass with the documents that there are, at each
    # rate. They differ if a check is not planned, and for an `any_of`.
    passes: Sequence[tuple[float, float]]
    either: bool  # whether one of several accuracy rules is enough
    partial: bool = False  # whether the policy has rules on digests or tokens, too

    def chance(self, rate: int) -> str:
        """`passes` at one of the rates, by its index: "0.52", "at least 0.52", "at most 0.52", "0.25 to 0.52",
        "unknown"."""
        least, most = (f"{chance:.2f}" for chance in self.passes[rate])
        if least == most:
            return least
        if (least, most) == ("0.00", "1.00"):
            return "unknown"
        if most == "1.00":
            return f"at least {least}"
        return f"at most {most}" if least == "0.00" else f"{least} to {most}"


def accuracy_rules(rule: Rule) -> list[AccuracyRule]:
    """Return the accuracy rules in a policy's rule."""
    return [inner for inner in _leaves(rule) if isinstance(inner, AccuracyRule)]


def _leaves(rule: Rule) -> list[Rule]:
    """Return the rules that are not made of others."""
    return [leaf for part in rule.rules for leaf in _leaves(part)] if isinstance(rule, AllOf | AnyOf) else [rule]


def plan_of(
    policy: Policy, a: Run, rates: Sequence[Rate], pairs: Sequence[tuple[Run, Run]] = (),
    unknown: Mapping[str, str] | None = None, unscored: Collection[str] = (),
) -> Plan:  # fmt: skip
    """Return the plan of a policy's accuracy rules for a baseline.

    pairs: runs whose differences show how scores change, for perplexities and for the rate `AS_SEEN`. unknown: tasks of
    which `a` does not have the real documents, with the reason. unscored: tasks of which it does not have the real
    scores.

    Raises `ConfigError` for a policy without an accuracy rule, and for one that does not fit the baseline.
    """
    leaves = _leaves(policy.rule)
    judged = {id(leaf): judged_metrics(leaf, a, a) for leaf in leaves if isinstance(leaf, AccuracyRule)}
    if not judged:
        raise ConfigError(f"policy {policy.name} has no accuracy rule, so no number of documents matters to it")
    plan_one = partial(_planned, a=a, rates=rates, pairs=pairs, unknown=unknown or {}, unscored=unscored)
    plan = _of_rule(policy.rule, 0, judged, plan_one, rates)
    if not plan.checks:
        raise ConfigError(f"policy {policy.name}: skips every metric of {a.source}, so nothing is judged")
    checks = sorted(plan.checks, key=lambda check: check.label)
    return replace(plan, checks=checks, partial=len(judged) < len(leaves))


def _of_rule(
    rule: Rule, others: int, judged: Mapping[int, Judged], plan_one: Callable[..., PlannedCheck], rates: Sequence[Rate]
) -> Plan:
    """Plan a rule. others: how many checks of other rules must pass, too. judged: by the id of an accuracy rule."""
    count = others + _count(rule, judged)
    if isinstance(rule, AccuracyRule):
        of = judged[id(rule)]
        checks = [plan_one(metric, of, count) for metric in of.tests]
        checks += [PlannedCheck(f"{check.task} {check.name}", rule.limits, "", None, None,
                                why=check.message if check.status == "fail" else WHOLE)
                   for check in _untested(of)]  # fmt: skip
        most = [math.prod(check.passes[n] for check in checks if not check.why) for n in range(len(rates))]
        whole = not any(check.why for check in checks)
        return Plan(checks, rates, [(chance if whole else 0.0, chance) for chance in most], either=False)
    either = isinstance(rule, AnyOf)
    plans = [_of_rule(part, others if either else count - _count(part, judged), judged, plan_one, rates)
             for part in getattr(rule, "rules", ()) if accuracy_rules(part)]  # fmt: skip
    either = either and len(plans) > 1
    passes = []
    for chances in zip(*(plan.passes for plan in plans), strict=True):
        lower, upper = zip(*chances, strict=True)
        # How the rules of an any_of pass together is not known.
        passes.append((max(lower), min(1.0, math.fsum(upper))) if either else (math.prod(lower), math.prod(upper)))
    checks = [check for plan in plans for check in plan.checks]
    return Plan(checks, rates, passes, either or any(plan.either for plan in plans))


def _count(rule: Rule, judged: Mapping[int, Judged]) -> int:
    """Return how many checks must pass for a rule; of an any_of those of its largest rule."""
    if isinstance(rule, AccuracyRule):
        return len(judged[id(rule)].tests) + len(_untested(judged[id(rule)]))
    counts = [_count(part, judged) for part in getattr(rule, "rules", ())]
    return max(counts, default=0) if isinstance(rule, AnyOf) else sum(counts)


def _untested(of: Judged) -> list[Check]:
    return [check for check in of.decided if check.status != "skip"]


def _planned(
    metric: Metric, of: Judged, count: int, a: Run, rates: Sequence[Rate], pairs: Sequence[tuple[Run, Run]],
    unknown: Mapping[str, str], unscored: Collection[str],
) -> PlannedCheck:  # fmt: skip
    """Plan one of `count` checks that must pass together."""
    mean = of.tests[metric]
    design, limits = mean.design(a, a), mean.limits
    unit = percent_of(mean.ratios(a, a)[1][0]) if mean.is_ratio else unit_of(design.most)
    margin, allowed = limits_in(unit, limits, mean.task, design.most)
    each = limits.power ** (1 / count)
    check = PlannedCheck(f"{mean.task} {mean.name}", limits, "", design.documents, design.clusters, each=each)
    if margin is None:
        return replace(check, why=WITHOUT)
    check = replace(check, limit=amount(margin, unit))
    if lacking := dict.fromkeys(unknown[key[0]] for key in mean.keys if key[0] in unknown):
        return replace(check, documents=None, clusters=None, why="; ".join(lacking))
    by_value = not mean.is_ratio and limits.max_regression_percent is not None
    if by_value and any(key[0] in unscored for key in mean.keys):
        return replace(check, why=UNSCORED)
    seen = _seen(mean, a, pairs)
    designs = [seen if mean.is_ratio or rate is AS_SEEN else replace(design, flips=rate) for rate in rates]
    if None in designs:
        likelihoods = "the differences of log-likelihoods are known only from two runs; name both: runs=RUN,RUN"
        unseen = "no two of the runs have it; name two (runs=RUN,RUN), or the share of changed answers (flips=2%)"
        return replace(check, why=likelihoods if mean.is_ratio else unseen)
    at_most = unit.metric(margin + ROUNDING)
    lost = math.inf if allowed is None else unit.metric(allowed + ROUNDING)
    known = [own for own in designs if own is not None]
    return replace(
        check,
        needs=[own.needed(at_most, each, lost) for own in known],
        passes=[own.passes(at_most, design.documents, lost) for own in known],
    )


def _paired(a: Run, b: Run, mean: Mean) -> bool:
    """Whether two runs have values for the same documents."""
    if mean.is_ratio:
        return ratios((a, b), mean.keys[0]) is not None
    return all(key in a.scores and not broken(key, a, b) for key in mean.keys)


def _seen(mean: Mean, a: Run, pairs: Sequence[tuple[Run, Run]]) -> Design | None:
    """Return the differences of all pairs of runs that hold a metric, as one design; None if there are none.

    Its clusters are the baseline's, as in the gate: some runs may not name theirs. A pair of other documents may still
    have other strata; it is left out.
    """
    designs = []
    for pair in pairs:
        if _paired(*pair, mean):
            x, y = (replace(run, clusters=_clusters(run, a, mean.keys)) for run in pair)
            designs.append(mean.design(x, y))
    designs = [own for own in designs if _weights(own) == _weights(designs[0])]
    if not designs:
        return None
    pooled = [Stratum(*(np.concatenate([getattr(layer, name) for layer in layers])
                        for name in ("parts", "residuals", "shares", "sizes")))
              for layers in zip(*(design.strata for design in designs), strict=True)]  # fmt: skip
    return replace(designs[0], strata=tuple(pooled), pairs=len(designs))


def _clusters(run: Run, a: Run, keys: Sequence[ScoreKey]) -> dict[str, dict[int, str]]:
    """A run's clusters: the baseline's, where it names those of all documents."""
    own = dict(run.clusters)
    for key in keys:
        names = a.clusters.get(key[0], {})
        if names.keys() >= (run.scores.get(key) or run.weighted.get(key) or {}).keys():
            own[key[0]] = names
    return own


def _weights(design: Design) -> list[float]:
    """The weight of each stratum."""
    return [round(float(layer.shares.sum()), 9) for layer in design.strata]
