"""What a gate asks of a run: policies, read from YAML and checked before anything else is done.

    description: tokens as they were, or no loss of accuracy that the pairs can show
    allow: [weights, dtype, numerics]     # what of the identity may differ; all else must be equal to be comparable
    any_of:                               # a rule is one of: digest, tokens, accuracy, all_of, any_of
      - tokens: {epsilon: 1.0e-4}
      - accuracy:
          alpha: 0.05
          max_regression: 2.0
          tasks: {gsm8k: {max_regression: 1.0, metrics: {"exact_match,strict-match": {alpha: 0.01}}}}

Unknown keys, wrong types and limits without sense are refused, all at once, with the path of each.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.plain_files import read_yaml
from evalengine.records.shapes import number as is_number

POLICIES = Path(__file__).parent.parent / "conf" / "gate"
RULES = ("digest", "tokens", "accuracy", "all_of", "any_of")
# The identity's parts that a policy may let differ: who answers. What is asked (rows, tasks, seed, limit) never may.
ALLOWABLE = (
    *("weights", "model_spec", "tokenizer", "chat_template", "prompts", "dtype", "numerics", "attention_backend"),
    *("gpu_architecture", "engine", "contract_version", "apply_chat_template", "fewshot_as_multiturn"),
    *("system_instruction", "long_prompts", "model_args", "chat_template_date"),
)


@dataclass(frozen=True)
class Limits:
    """What one metric of one task must keep. Points are hundredths of the metric: 0.75 to 0.73 is a loss of 2.0."""

    alpha: float | None = 0.05  # a loss whose one-sided p (after Holm) is at most this fails; null: no test
    max_regression: float | None = None  # points; a larger observed loss fails, whatever its p; null: no limit
    max_regression_percent: float | None = None  # of the baseline; for metrics without a value per document
    require_power: bool = False  # fail if a loss of max_regression could go undetected
    power: float = 0.8  # the probability of detection that the minimum detectable effect stands for
    higher_is_better: bool | None = None  # for metrics of which the results do not say
    skip: bool = False  # leave this task or metric out; the report says so


@dataclass(frozen=True)
class DigestRule:
    """Every token and every bit of every logprob as in the baseline."""


@dataclass(frozen=True)
class TokensRule:
    """The same output tokens; each request's summed logprob within `epsilon` nats (null: tokens alone).

    Sums, for a baseline file holds no others: so that a run folder and its baseline file get the same verdict.
    """

    epsilon: float | None = 0.0


@dataclass(frozen=True)
class AccuracyRule:
    """No task loses accuracy: see `Limits`. The innermost setting counts: metric, then task, then the rule."""

    limits: Limits = Limits()
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # checked; `metrics` within

    def of(self, task: str, metric: str, filter_name: str) -> Limits:
        """The limits of one metric. `metrics` names it "metric" (under any filter) or "metric,filter"."""
        own = dict(self.tasks.get(task, {}))
        metrics = own.pop("metrics", {})
        for name in (metric, f"{metric},{filter_name}"):
            own |= metrics.get(name, {})
        return replace(self.limits, **own)


@dataclass(frozen=True)
class AnyOf:
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class AllOf:
    rules: tuple[Rule, ...]


Rule = DigestRule | TokensRule | AccuracyRule | AnyOf | AllOf


@dataclass(frozen=True)
class Policy:
    name: str
    rule: Rule
    allow: tuple[str, ...] = ()  # names of `ALLOWABLE`
    description: str = ""


def available() -> list[str]:
    """The names of the policies that come with evalengine, sorted."""
    return sorted(file.stem for file in POLICIES.glob("*.yaml"))


def load_policy(name: str) -> Policy:
    """A policy by name or by file. Raises `ConfigError` with everything that is wrong with it."""
    path = POLICIES / f"{name}.yaml" if name in available() else Path(name)
    try:
        value = read_yaml(path)
    except OSError as error:
        near = _near(name, available())
        raise ConfigError(f"--policy {name}: no such policy or file ({error}); {near}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    return parse_policy(value, path.stem, str(path))


def parse_policy(value: Any, name: str, where: str = "policy") -> Policy:
    """`value`: the YAML's plain values. `where` begins each problem's text. Raises `ConfigError`."""
    reader = _Reader([])
    policy = reader.policy(value, name, where)
    if reader.problems:
        raise ConfigError(reader.problems)
    return policy


@dataclass
class _Reader:
    """Reads on after a problem, so that all of them are told at once."""

    problems: list[str]

    def policy(self, value: Any, name: str, where: str) -> Policy:
        value = self.mapping(value, where, ("description", "allow", *RULES))
        description = self.typed(value.get("description", ""), str, f"{where}: description", "")
        allow = self.typed(value.get("allow", []), list, f"{where}: allow", [])
        for part in allow:
            if part not in ALLOWABLE:
                near = _near(_said(part).strip("'"), ALLOWABLE)
                self.problems.append(f"{where}: allow: {_said(part)} cannot be allowed to differ; {near}")
        rule = self.rule({key: value[key] for key in value if key in RULES}, where)
        return Policy(name, rule, tuple(part for part in allow if part in ALLOWABLE), description)

    def rule(self, value: Any, where: str) -> Rule:
        value = self.mapping(value, where, RULES)
        if len(value) != 1:
            self.problems.append(f"{where}: needs exactly one of {', '.join(RULES)}; has {', '.join(value) or 'none'}")
            return AllOf(())
        ((kind, content),) = value.items()
        where = f"{where}: {kind}"
        if kind == "digest":
            if content != "equal":
                self.problems.append(f"{where}: is {_said(content)}; the one value is: equal")
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
        value = self.mapping(value, where, (*_LIMITS, "tasks"))
        rule = AccuracyRule(Limits(**self.limits(value, where)))
        tasks = {}
        for task, content in self.mapping(value.get("tasks"), f"{where}: tasks").items():
            at = f"{where}: tasks: {task}"
            content = self.mapping(content, at, (*_LIMITS, "metrics"))
            metrics = {
                metric: self.limits(self.mapping(inner, f"{at}: metrics: {metric}", _LIMITS), f"{at}: {metric}")
                for metric, inner in self.mapping(content.get("metrics"), f"{at}: metrics").items()
            }
            tasks[task] = {**self.limits(content, at), "metrics": metrics}
        rule = AccuracyRule(rule.limits, tasks)
        self.sense(rule, where)
        return rule

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
                checked[name] = self.number(given, at, 0.0, math.inf, null=True)
        return checked

    def sense(self, rule: AccuracyRule, where: str) -> None:
        """A rule that cannot fail, tests nothing, or asks for power towards nothing is a mistake."""
        skips = [given.get("skip") for own in rule.tasks.values() for given in (own, *own["metrics"].values())]
        if rule.limits.skip and False not in skips:
            self.problems.append(f"{where}: skip: true for every task, so no metric is tested; set skip: false for one")
        places = [(where, rule.limits)]
        for task, own in rule.tasks.items():
            names = [name.partition(",") for name in own["metrics"]] or [("", "", "")]
            places += [(f"{where}: tasks: {task}", rule.of(task, metric, rest)) for metric, _, rest in names]
        for at, limits in places:
            if limits.require_power and (limits.max_regression is None or limits.alpha is None):
                text = f"{at}: require_power needs alpha and max_regression, the loss that must not go undetected"
                self.problems.append(text)
            if limits.alpha is not None and limits.power <= limits.alpha:
                self.problems.append(f"{at}: power {limits.power:g} must be above alpha {limits.alpha:g}")
            limited = (limits.alpha, limits.max_regression, limits.max_regression_percent)
            if not limits.skip and all(limit is None for limit in limited):
                self.problems.append(f"{at}: sets no limit, so it could never fail; set alpha or max_regression")

    def mapping(self, value: Any, where: str, known: Iterable[str] | None = None) -> dict[str, Any]:
        value = {} if value is None else value
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            self.problems.append(f"{where}: is {_said(value)}; a mapping is needed (name: value)")
            return {}
        known = value if known is None else tuple(known)
        for key in value:
            if key not in known:
                self.problems.append(f"{where}: {key}: unknown key; {_near(key, known)}")
        return {key: inner for key, inner in value.items() if key in known}

    def typed(self, value: Any, kind: type, where: str, otherwise: Any) -> Any:
        if isinstance(value, kind):
            return value
        self.problems.append(f"{where}: is {_said(value)}; a {_KINDS[kind]} is needed")
        return otherwise

    def number(
        self, value: Any, where: str, low: float, high: float, null: bool = False, strict: bool = False
    ) -> float | None:
        """A number in [low, high], or (low, high) if `strict`."""
        if value is None and null:
            return None
        if is_number(value) and (low < value < high if strict else low <= value <= high):
            return float(value)
        span = f"between {low:g} and {high:g}" if high < math.inf else f"of {low:g} or more"
        hint = " (YAML reads 1e-4 as text: write 1.0e-4)" if isinstance(value, str) else ""
        self.problems.append(f"{where}: is {_said(value)}; a number {span} is needed{hint}")
        return None if null else (low + min(high, low + 1)) / 2


_LIMITS = tuple(item.name for item in fields(Limits))
_KINDS = {str: "text", bool: "true or false", list: "list"}


def _said(value: Any) -> str:
    """A value in a sentence: whole only if it is short."""
    if isinstance(value, int) and abs(value) >= 10**40:  # Python refuses to print very long ones
        return "a very long integer"
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:77]}..."


def _near(word: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), tuple(known), 1)
    return f"did you mean {near[0]}?" if near else f"there is: {', '.join(known)}"
