"""Turns a policy's YAML values into a `Policy`: unknown keys, wrong types and limits without sense are refused, all at
once, with the path of each."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from evalengine.errors import ConfigError
from evalengine.records.shapes import Number, fits
from evalengine.report.gate.policies import (
    ALLOWABLE,
    INCONCLUSIVE,
    RULES,
    AccuracyRule,
    AllOf,
    AnyOf,
    Average,
    DigestRule,
    Limits,
    Policy,
    Rule,
    TokensRule,
)


def parse_policy(value: Any, name: str, where: str = "policy") -> Policy:
    """The policy in a YAML file's plain values. `where` begins each problem's text. Raises `ConfigError`."""
    reader = _Reader([])
    policy = reader.policy(value, name, where)
    if reader.problems:
        raise ConfigError(reader.problems)
    return policy


@dataclass
class _Reader:
    """Reads a policy, and reads on after a problem, so that all problems are reported at once."""

    problems: list[str]

    def policy(self, value: Any, name: str, where: str) -> Policy:
        value = self.mapping(value, where, ("description", "extends", "inconclusive", "allow", *RULES))
        description = self.typed(value.get("description", ""), str, f"{where}: description", "")
        allow = self.typed(value.get("allow", []), list, f"{where}: allow", [])
        for part in allow:
            if part not in ALLOWABLE:
                cure = near(quoted(part).strip("'"), ALLOWABLE)
                self.problems.append(f"{where}: allow: {quoted(part)} cannot be allowed to differ; {cure}")
        if "extends" in value:
            self.problems.append(f"{where}: extends: only a policy's file can extend another")
        rule = self.rule({key: value[key] for key in value if key in RULES}, where)
        inconclusive = value.get("inconclusive", "report")
        if not isinstance(inconclusive, str) or inconclusive not in INCONCLUSIVE:
            meaning = "fail (exit code 1), report (exit code 3) or pass (exit code 0)"
            self.problems.append(f"{where}: inconclusive: is {quoted(inconclusive)}; one of {meaning} is needed")
            inconclusive = "report"
        allowed = tuple(part for part in allow if part in ALLOWABLE)
        return Policy(name, rule, allowed, description, inconclusive)

    def rule(self, value: Any, where: str) -> Rule:
        value = self.mapping(value, where, RULES)
        if len(value) != 1:
            self.problems.append(f"{where}: needs exactly one of {', '.join(RULES)}; has {', '.join(value) or 'none'}")
            return AllOf(())
        ((kind, content),) = value.items()
        where = f"{where}: {kind}"
        if kind == "digest":
            if content != "equal":
                self.problems.append(f"{where}: is {quoted(content)}; the one value is: equal")
            return DigestRule()
        if kind == "tokens":
            content = self.mapping(content, where, ("epsilon",))
            return TokensRule(self.number(content.get("epsilon", 0.0), f"{where}: epsilon", 0.0, math.inf, null=True))
        if kind == "accuracy":
            return self.accuracy(content, where)
        parts = self.typed(content, list, where, [])
        if not parts:
            self.problems.append(f"{where}: needs a list of rules")
        rules = tuple(self.rule(part, f"{where}[{number}]") for number, part in enumerate(parts))
        return AnyOf(rules) if kind == "any_of" else AllOf(rules)

    def accuracy(self, value: Any, where: str) -> AccuracyRule:
        value = self.mapping(value, where, (*_LIMITS, "tasks", "averages"))
        limits, tasks = self.limits(value, where), {}
        for task, content in self.mapping(value.get("tasks"), f"{where}: tasks").items():
            at = f"{where}: tasks: {task}"
            content = self.mapping(content, at, (*_LIMITS, "metrics"))
            metrics = {
                metric: self.limits(self.mapping(inner, f"{at}: metrics: {metric}", _LIMITS), f"{at}: {metric}")
                for metric, inner in self.mapping(content.get("metrics"), f"{at}: metrics").items()
            }
            tasks[task] = {**self.limits(content, at), "metrics": metrics}
        given = self.mapping(value.get("averages"), f"{where}: averages").items()
        averages = {
            name: self.average(inner, limits, f"{where}: averages: {name}")
            for name, inner in given
            if inner is not None  # null takes away an average of the extended policy
        }
        rule = AccuracyRule(Limits(**limits), tasks, averages)
        self.sense(rule, where)
        return rule

    def average(self, value: Any, limits: Mapping[str, Any], where: str) -> Average:
        """An average of a rule, whose limits hold for the average, too, except `skip`."""
        of_shares = [name for name in _LIMITS if name != "skip" and not name.endswith("_percent")]
        value = self.mapping(value, where, ("tasks", "metric", "mean", *of_shares))
        tasks = value.get("tasks")
        tasks = [tasks] if isinstance(tasks, str) else tasks
        if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) for task in tasks):
            self.problems.append(f"{where}: tasks: is {quoted(tasks)}; names or patterns of tasks are needed: [mmlu_*]")
            tasks = []
        metric = value.get("metric")
        if not isinstance(metric, str) or not metric:
            self.problems.append(f"{where}: metric: is {quoted(metric)}; a metric's name is needed, such as acc")
            metric = ""
        mean = value.get("mean", "macro")
        if mean not in ("macro", "micro"):
            self.problems.append(f"{where}: mean: is {quoted(mean)}; macro (tasks count alike) or micro (documents do)")
            mean = "macro"
        own = {**limits, **self.limits(value, where), "skip": False}
        return Average(tuple(tasks), metric, mean, Limits(**own))

    def limits(self, value: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The checked settings of `Limits` in `value`, and those only."""
        checked: dict[str, Any] = {}
        for name in _LIMITS:
            if name not in value:
                continue
            at, given = f"{where}: {name}", value[name]
            if name in ("require_power", "skip"):
                checked[name] = self.typed(given, bool, at, False)
            elif name == "higher_is_better":
                checked[name] = None if given is None else self.typed(given, bool, at, True)
            elif name in ("alpha", "power"):
                checked[name] = self.number(given, at, 0.0, 1.0, null=name == "alpha", strict=True)
            else:
                strict = name.startswith("margin")  # no interval's bound can lie within a margin of 0
                checked[name] = self.number(given, at, 0.0, math.inf, null=True, strict=strict)
        return checked

    def sense(self, rule: AccuracyRule, where: str) -> None:
        """Notes rules that cannot fail, test nothing, or ask for power without a loss to detect."""
        skips = [settings.get("skip") for own in rule.tasks.values() for settings in (own, *own["metrics"].values())]
        if rule.limits.skip and False not in skips and not rule.averages:
            self.problems.append(f"{where}: skip: true for every task, so no metric is tested; set skip: false for one")
        places = [(where, rule.limits)]
        for task, own in rule.tasks.items():
            names = [name.partition(",") for name in own["metrics"]] or [("", "", "")]
            places += [(f"{where}: tasks: {task}", rule.of(task, metric, rest)) for metric, _, rest in names]
        places += [(f"{where}: averages: {name}", average.limits) for name, average in rule.averages.items()]
        for at, limits in places:
            self.problems += [f"{at}: {why}" for why in _senseless(limits)]

    def mapping(self, value: Any, where: str, known: Iterable[str] | None = None) -> dict[str, Any]:
        value = {} if value is None else value
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            self.problems.append(f"{where}: is {quoted(value)}; a mapping is needed (name: value)")
            return {}
        known = value if known is None else tuple(known)
        for key in value:
            if key not in known:
                self.problems.append(f"{where}: {key}: unknown key; {near(key, known)}")
        return {key: inner for key, inner in value.items() if key in known}

    def typed(self, value: Any, kind: type, where: str, otherwise: Any) -> Any:
        if isinstance(value, kind):
            return value
        self.problems.append(f"{where}: is {quoted(value)}; a {_KINDS[kind]} is needed")
        return otherwise

    def number(
        self, value: Any, where: str, low: float, high: float, null: bool = False, strict: bool = False
    ) -> float | None:
        """A number in [low, high], or (low, high) if `strict`."""
        if value is None and null:
            return None
        if fits(value, Number) and (low < value < high if strict else low <= value <= high):
            return float(value)
        span = f"above {low:g}" if strict else f"of {low:g} or more"
        span = f"between {low:g} and {high:g}" if high < math.inf else span
        hint = " (YAML reads 1e-4 as text: write 1.0e-4)" if isinstance(value, str) else ""
        self.problems.append(f"{where}: is {quoted(value)}; a number {span} is needed{hint}")
        return None if null else (low + min(high, low + 1)) / 2


def _senseless(limits: Limits) -> Iterator[str]:
    """What is wrong with the limits of one place taken together."""
    margins = (limits.margin, limits.margin_percent)
    if limits.alpha is None and any(margin is not None for margin in margins):
        yield "margin needs alpha: the interval whose bound must lie within it has confidence 1 - alpha"
    if limits.require_power and (limits.alpha is None or (limits.margin, limits.max_regression) == (None, None)):
        yield "require_power needs alpha and margin or max_regression, the loss that must not go undetected"
    if limits.alpha is not None and limits.power <= limits.alpha:
        yield f"power {limits.power:g} must be above alpha {limits.alpha:g}"
    if limits.alpha is not None and limits.alpha >= 0.5 and any(margin is not None for margin in margins):
        yield f"alpha {limits.alpha:g} must be below 0.5: the bound would lie below the loss that was seen"
    limited = (limits.alpha, limits.max_regression, limits.max_regression_percent)
    if not limits.skip and all(limit is None for limit in limited):
        yield "sets no limit, so it could never fail; set margin, alpha or max_regression"


_LIMITS = tuple(item.name for item in fields(Limits))
_KINDS = {str: "text", bool: "true or false", list: "list"}


def quoted(value: Any) -> str:
    """A value for a sentence, cut if it is long."""
    if isinstance(value, int) and abs(value) >= 10**40:  # Python refuses to print very long ones
        return "a very long integer"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def near(word: Any, choices: Iterable[str]) -> str:
    """The known word that was probably meant, or all known words, as a part of a sentence."""
    matches = difflib.get_close_matches(str(word), tuple(choices), 1)
    return f"did you mean {matches[0]}?" if matches else f"there is: {', '.join(choices)}"
