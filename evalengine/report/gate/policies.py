"""Gate policies, written in YAML: their data, and `load_policy`, which finds, merges and checks them.

description: tokens as they were, or no loss of accuracy beyond two points
extends: accuracy                     # another policy's settings, except those that stand here
inconclusive: report                  # what a gate that could not see enough means for CI: fail | report | pass
allow: [weights, dtype, numerics]     # what of the identity may differ; all else must be equal to be comparable
any_of:                               # a rule is one of: digest, tokens, accuracy, all_of, any_of
  - tokens: {epsilon: 1.0e-4}
  - accuracy:
      margin: 2.0
      tasks: {gsm8k: {margin: 1.0, metrics: {"exact_match,strict-match": {alpha: 0.01}}}, "arc_*": {margin: 3.0}}
      averages: {science: {tasks: ["arc_*", "mmlu_*"], metric: acc, margin: 0.5}}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError, with_config
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import TypedDict

from evalengine.errors import ConfigError, near
from evalengine.records.shapes import Number
from evalengine.util.plain_files import deep_merged, read_yaml
from evalengine.util.validation import KNOWN_NAMES, Flag, Text, adapter, must, name_of, problems_of, shown

POLICIES = Path(str(files("evalengine.conf"))) / "gate"
RULES = ("digest", "tokens", "accuracy", "all_of", "any_of")
# The identity's parts that a policy may let differ: those of the model and its engine. Those of the requests (rows,
# tasks, seed, limit) may never differ.
ALLOWABLE = (
    *("weights", "model_spec", "tokenizer", "chat_template", "prompts", "dtype", "numerics", "attention_backend"),
    *("gpu_architecture", "engine", "contract_version", "apply_chat_template", "fewshot_as_multiturn"),
    *("system_instruction", "long_prompts", "model_args", "chat_template_date"),
)
Inconclusive = Literal["fail", "report", "pass"]
INCONCLUSIVE: dict[Inconclusive, int] = {"fail": 1, "report": 3, "pass": 0}  # exit codes

Share = Annotated[Number, Field(gt=0, lt=1)]
Margin = Annotated[Number, Field(gt=0)]  # no interval's bound can lie within a margin of 0
Loss = Annotated[Number, Field(ge=0)]
NULL_IS_EMPTY = BeforeValidator(lambda value: {} if value is None else value)


def _given(kind: Any) -> PlainValidator:
    """Read a mapping as the settings of `kind` that it contains, without the defaults of the others; null has none."""

    def read(value: Any) -> dict[str, Any]:
        checked = None if value is None else adapter(kind).validate_python(value)
        return {name: getattr(checked, name) for name in value or ()}

    return PlainValidator(read)


@dataclass(frozen=True, kw_only=True)
class _MeanLimits:
    """The limits that a policy may set for an average, too."""

    __pydantic_config__ = KNOWN_NAMES

    alpha: Share | None = 0.05  # the error that a verdict may have; null: no test, max_regression alone decides
    margin: Margin | None = None  # points; null: no non-inferiority, the test alone
    max_regression: Loss | None = None  # points; a larger observed loss fails, whatever its p; null: no limit
    max_regression_percent: Loss | None = None  # the same in percent of the baseline's value, for every metric
    require_power: Flag = False  # an undecided check fails, whatever the policy's `inconclusive` says
    power: Share = 0.8  # the probability of a pass that is planned for, and of detecting the minimum detectable loss
    higher_is_better: Flag | None = None  # for metrics whose results do not say it


@dataclass(frozen=True, kw_only=True)
class Limits(_MeanLimits):
    """Limits on one metric of one task. Points are hundredths of the metric: 0.75 to 0.73 is a loss of 2.0.

    With a margin a metric passes if the loss is shown to lie within it (non-inferiority: the one-sided interval's
    bound, at confidence 1 - alpha); without one it passes unless a loss is shown (p, after Holm, of at most alpha).
    """

    margin_percent: Margin | None = None  # percent of the baseline; the margin for perplexities
    skip: Flag = False  # leave this task or metric out; the report says so

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (the place of a setting, why it is wrong) for limits that contradict each other or can never fail."""
        margin = "margin" if self.margin is not None else "margin_percent" if self.margin_percent is not None else ""
        allowed = [loss for loss in (self.max_regression, self.max_regression_percent) if loss is not None]
        if self.alpha is None and margin:
            yield (margin,), "needs alpha: the interval whose bound must lie within it has confidence 1 - alpha"
        if self.require_power and (self.alpha is None or (self.margin is None and not allowed)):
            losses = "margin, max_regression or max_regression_percent"
            yield ("require_power",), f"needs alpha, and {losses}: the loss that must not go undetected"
        if self.alpha is not None and self.power <= self.alpha:
            yield ("power",), f"{self.power:g} must be above alpha {self.alpha:g}"
        if self.alpha is not None and self.alpha >= 0.5 and margin:
            yield ("alpha",), f"{self.alpha:g} must be below 0.5: the bound would lie below the loss that was seen"
        if self.alpha is None and not allowed and not self.skip:
            yield ("alpha",), "no limit is set, so it could never fail; set margin, alpha or max_regression"


@dataclass(frozen=True, kw_only=True)
class _Task(Limits):
    """The settings of a task, or of a pattern of names."""

    metrics: Annotated[dict[Text, Annotated[Limits, _given(Limits)]], NULL_IS_EMPTY] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Average(_MeanLimits):
    """A mean over tasks with separate limits: "half a point on the average of all mmlu tasks"."""

    tasks: Annotated[  # names or patterns, as in a shell: mmlu_*; a pattern skips groups
        tuple[Text, ...], Field(min_length=1), BeforeValidator(lambda own: [own] if isinstance(own, str) else own),
        must("be names or patterns of tasks: [mmlu_*]"),
    ]  # fmt: skip
    # "metric", or "metric,filter" where a task has several filters
    metric: Annotated[Text, Field(min_length=1), must("be a metric's name, such as acc")]
    mean: Annotated[Literal["macro", "micro"], must("be macro (tasks count alike) or micro (documents do)")] = "macro"

    @property
    def limits(self) -> Limits:
        return Limits(**{one.name: getattr(self, one.name) for one in fields(_MeanLimits)})


@dataclass(frozen=True)
class DigestRule:
    """Every token and every bit of every logprob is as in the baseline."""


@dataclass(frozen=True)
class TokensRule:
    """The same output tokens; each request's summed logprob within `epsilon` nats (null: tokens alone).

    A baseline file holds no other logprobs than sums: so a run folder and its baseline file get the same verdict.
    """

    __pydantic_config__ = KNOWN_NAMES

    epsilon: Loss | None = 0.0


@dataclass(frozen=True, kw_only=True)
class AccuracyRule(Limits):
    """No task loses accuracy: see `Limits`. The innermost setting counts: metric, then task, then the rule."""

    # Checked settings of `_Task`, by a task's or group's name or by a pattern of names.
    tasks: Annotated[dict[Text, Annotated[dict[str, Any], _given(_Task)]], NULL_IS_EMPTY] = field(default_factory=dict)
    averages: Annotated[dict[Text, Annotated[Average, _given(Average)]], NULL_IS_EMPTY] = field(default_factory=dict)

    @property
    def limits(self) -> Limits:
        """The limits of a metric for which `tasks` has none."""
        return Limits(**{one.name: getattr(self, one.name) for one in fields(Limits)})

    def of(self, task: str, metric: str, filter_name: str) -> Limits:
        """The limits of one metric. `metrics` names it "metric" (under any filter) or "metric,filter". A task's own
        name counts before a pattern that fits it, and a later pattern before an earlier one."""
        own: dict[str, Any] = {}
        of_metrics: dict[str, Any] = {}
        for settings in self.entries(task):
            own |= {name: value for name, value in settings.items() if name != "metrics"}
            for name in (metric, f"{metric},{filter_name}"):
                of_metrics |= settings.get("metrics", {}).get(name, {})
        return replace(self.limits, **{**own, **of_metrics})

    def entries(self, task: str) -> list[Mapping[str, Any]]:
        """The entries of `tasks` that name the task: patterns, in the policy's order, and then its own name."""
        fitting = [own for pattern, own in self.tasks.items() if pattern != task and fnmatchcase(task, pattern)]
        return [*fitting, *([self.tasks[task]] if task in self.tasks else [])]

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Those of each task, metric and average, too, and of a rule that tests nothing."""
        yield from super().problems()
        skips = [one.get("skip") for own in self.tasks.values() for one in (own, *own.get("metrics", {}).values())]
        if self.skip and False not in skips and not self.averages:
            yield ("skip",), "true for every task, so no metric is tested; set skip: false for one"
        places: list[tuple[tuple[str, ...], Limits]] = []
        for task, own in self.tasks.items():
            for metric in own.get("metrics", {}):
                name, _, filter_name = metric.partition(",")
                places.append((("tasks", task, "metrics", metric), self.of(task, name, filter_name)))
            if not own.get("metrics"):
                places.append((("tasks", task), self.of(task, "", "")))
        places += [(("averages", name), average.limits) for name, average in self.averages.items()]
        yield from (((*at, *own), why) for at, limits in places for own, why in limits.problems())


@dataclass(frozen=True)
class AnyOf:
    """Holds if one of its rules does."""

    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class AllOf:
    """Holds if all of its rules do."""

    rules: tuple[Rule, ...]


Rule = DigestRule | TokensRule | AccuracyRule | AnyOf | AllOf


@dataclass(frozen=True)
class Policy:
    """The requirements of a gate on a run."""

    name: str
    rule: Rule
    allow: tuple[str, ...] = ()  # names of `ALLOWABLE`
    description: str = ""
    inconclusive: Inconclusive = "report"


def _accuracy(given: dict[str, Any]) -> AccuracyRule:
    """Return the rule of checked settings. An average has the rule's limits, too; null removes one."""
    shared = {one.name: given[one.name] for one in fields(_MeanLimits) if one.name in given}
    means = {name: Average(**{**shared, **own}) for name, own in given.get("averages", {}).items() if own}
    rule = AccuracyRule(**{**given, "averages": means})
    problems = [InitErrorDetails(type=_wrong(why), loc=place, input=None) for place, why in rule.problems()]
    if problems:
        raise ValidationError.from_exception_data("accuracy", problems)
    return rule


def _rule(given: dict[str, Any]) -> Rule:
    if len(given) != 1:
        raise _wrong(f"needs exactly one of {', '.join(RULES)}; has {', '.join(given) or 'none'}")
    rule: Rule = next(iter(given.values()))
    return rule


def _policy(given: dict[str, Any]) -> Policy:
    rule = _rule({kind: given.pop(kind) for kind in RULES if kind in given})
    return Policy("", rule, **given)


def _wrong(why: str) -> PydanticCustomError:
    """Return a problem whose message does not repeat the value."""
    return PydanticCustomError("policy", "{why}", {"why": why})


def _allowable(part: str) -> str:
    if part not in ALLOWABLE:
        raise ValueError(f"cannot be allowed to differ; {near(part, ALLOWABLE)}")
    return part


@with_config(KNOWN_NAMES)
class _OneRule(TypedDict, total=False):
    digest: Annotated[
        Literal["equal"], must("be: equal, the one value there is"), AfterValidator(lambda _: DigestRule())
    ]
    tokens: Annotated[TokensRule, NULL_IS_EMPTY]
    accuracy: Annotated[AccuracyRule, _given(AccuracyRule), AfterValidator(_accuracy)]
    all_of: Annotated[_Rules, AfterValidator(AllOf)]
    any_of: Annotated[_Rules, AfterValidator(AnyOf)]


_Rules = Annotated[list[Annotated[_OneRule, AfterValidator(_rule)]], Field(min_length=1), AfterValidator(tuple)]


@with_config(KNOWN_NAMES)
class _Policy(_OneRule, total=False):
    description: Text
    inconclusive: Annotated[Inconclusive, must("be fail (exit code 1), report (exit code 3) or pass (exit code 0)")]
    allow: Annotated[list[Annotated[Text, AfterValidator(_allowable)]], AfterValidator(tuple)]


_KINDS: dict[str, Any] = {
    "tokens": TokensRule, "accuracy": AccuracyRule, "tasks": _Task, "metrics": Limits, "averages": Average,
}  # fmt: skip
SETTINGS = {  # by the place that has them
    "a policy": {*_Policy.__annotations__, "extends"},
    **{place: {one.name for one in fields(kind)} for place, kind in _KINDS.items()},
}


def parse_policy(value: Any, name: str, where: str = "policy") -> Policy:
    """The policy in a YAML file's plain values. `where` begins each problem's text. Raises `ConfigError`."""
    try:
        read = adapter(Annotated[_Policy, AfterValidator(_policy), NULL_IS_EMPTY]).validate_python(value)
    except ValidationError as error:
        pairs = zip(error.errors(include_url=False), problems_of(error), strict=True)
        raise ConfigError([f"{where}: {_in_words(*pair)}" for pair in pairs]) from error
    return replace(read, name=name)


def _in_words(problem: Any, sentence: str) -> str:
    """Return pydantic's problem with a fix."""
    kind, place, value = problem["type"], problem["loc"], problem["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        owners = ", ".join(owner for owner, names in SETTINGS.items() if place[-1] in names)
        known = sorted({name for names in SETTINGS.values() for name in names})
        why = f"not a setting here, but of {owners}" if owners else f"unknown setting; {near(place[-1], known)}"
        return f"{name_of(place)}: {why}"
    if kind == "policy":
        return ": ".join(filter(None, (name_of(place), problem["msg"])))
    exponent = r"[-+]?[\d.]+e[-+]?\d+"  # which YAML 1.1 reads as text
    if kind == "float_type" and isinstance(value, str) and re.fullmatch(exponent, value, re.IGNORECASE):
        sentence += " (YAML reads this as text: write a decimal point and a signed exponent, as in 1.0e-4, 1.0e+4)"
    return sentence


def available() -> list[str]:
    """The names of the policies that come with evalengine, sorted."""
    return sorted(file.stem for file in POLICIES.glob("*.yaml"))


def load_policy(name: str, limits: Mapping[str, float] | None = None) -> Policy:
    """Return a policy by name or by file, on top of what it extends. limits: settings that replace those of its
    accuracy rules (`plan`). Raises `ConfigError` with everything that is wrong."""
    chain, value = _read(name, Path(), "--policy " if limits is None else "policy=")
    policy = parse_policy(value, chain[0].stem, " <- ".join(map(str, chain)))  # a problem may be in any of them
    if not limits:
        return policy
    named = " ".join(f"{key}={own:g}" for key, own in limits.items())
    return parse_policy(_with_limits(value, limits), chain[0].stem, named)


def policy_files(name: str) -> list[Path]:
    """Return a policy's files: its own, then those that it extends. Raises `ConfigError` if one cannot be read."""
    return _read(name, Path(), "--policy ")[0]


def _with_limits(rules: Mapping[str, Any], limits: Mapping[str, float]) -> dict[str, Any]:
    """Return a checked policy's values with these limits of its accuracy rules."""
    changed: dict[str, Any] = {}
    if "accuracy" in rules:
        changed["accuracy"] = {**(rules["accuracy"] or {}), **limits}
    for kind in rules.keys() & {"all_of", "any_of"}:
        changed[kind] = [_with_limits(part, limits) for part in rules[kind]]
    return {**rules, **changed}


def merged(base: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` on top of `base`: mappings are merged key by key, `allow` adds to what the base allows, and everything else
    (numbers, texts, other lists, null) replaces what the base says. A rule of another kind replaces the base's rule.
    """
    base = dict(base) if isinstance(base, dict) else {}
    if any(key in own for key in RULES):
        base = {key: value for key, value in base.items() if key not in RULES or key in own}
    result, allowed = deep_merged(base, own), (base.get("allow"), own.get("allow"))
    if all(isinstance(names, list) for names in allowed):  # anything else is reported where it is checked
        result["allow"] = [*base["allow"], *(part for part in own["allow"] if part not in base["allow"])]
    return result


def _read(name: Any, folder: Path, where: str, above: Sequence[Path] = ()) -> tuple[list[Path], Any]:
    """Return (the files of a policy: its own, then those that it extends; its values on top of theirs).

    name: of a shipped policy, or of a file in `folder`. where: what names it. above: the files that extend it.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}{shown(name)}: must name a policy ({', '.join(available())}) or a file")
    path = POLICIES / f"{name}.yaml" if name in available() else folder / name
    if path.resolve() in [file.resolve() for file in above]:
        turns = " -> ".join(str(file) for file in [*above, path])
        raise ConfigError(f"{where}{name}: these policies extend each other in a circle: {turns}")
    try:
        value = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"{where}{name}: no such policy or file ({error}); {near(name, available())}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(value, dict) or "extends" not in value:
        return [path], value
    chain, base = _read(value.pop("extends"), path.parent, f"{path}: extends: ", [*above, path])
    return [path, *chain], merged(base, value)
