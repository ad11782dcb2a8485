"""Finds policies, by name among those that come with evalengine, or by file; `extends` builds on another policy.

Their YAML values are turned into a `Policy`: unknown keys, wrong types and inconsistent limits are refused, all at
once, with the path of each.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict

from evalengine.config.arguments import shown
from evalengine.config.typed import KNOWN_NAMES, Flag, Text, adapter, must, name_of, problems_of
from evalengine.errors import ConfigError
from evalengine.records.shapes import Number
from evalengine.report.gate import policies
from evalengine.report.gate.policies import ALLOWABLE, RULES, AccuracyRule, Average, Inconclusive, Limits, Policy, Rule
from evalengine.util.plain_files import deep_merged, read_yaml

Share = Annotated[Number, Field(gt=0, lt=1)]
Margin = Annotated[Number, Field(gt=0)]  # no interval's bound can lie within a margin of 0
Loss = Annotated[Number, Field(ge=0)]


def parse_policy(value: Any, name: str, where: str = "policy") -> Policy:
    """The policy in a YAML file's plain values. `where` begins each problem's text. Raises `ConfigError`."""
    try:
        given = adapter(_Policy).validate_python({} if value is None else value)
        rule = _rule({kind: given.pop(kind) for kind in RULES if kind in given})
    except ValidationError as error:
        pairs = zip(error.errors(include_url=False), problems_of(error), strict=True)
        raise ConfigError([f"{where}: {_in_words(*pair)}" for pair in pairs]) from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    return Policy(name, rule, **{**given, "allow": tuple(given.get("allow", ()))})


def _in_words(problem: Any, sentence: str) -> str:
    """Return pydantic's problem with a fix."""
    *_, key = place = problem["loc"] or ("",)
    if problem["type"] == "extra_forbidden":
        return f"{name_of(place)}: {_unknown(key, place)}"
    if problem["type"] == "value_error" and isinstance(problem["input"], Mapping):
        return f"{name_of(place)}: {problem['msg'].removeprefix('Value error, ')}"
    if problem["type"] == "float_type" and _is_exponent(problem["input"]):
        return (
            f"{sentence} (YAML reads this as text: write a decimal point and a signed exponent, as in 1.0e-4, 1.0e+4)"
        )
    return sentence


def _unknown(key: Any, place: Sequence[Any]) -> str:
    """Return why a policy cannot have a key at this place, which ends with the key, with a fix."""
    if key == "extends":
        return "unknown key; only a policy's file can extend another"
    above = ["a policy", *place[:-1]]
    # Tasks, metrics and averages have names that the user chose, and the rules of a list have numbers.
    parent = above[-2] if len(above) > 1 and above[-2] in _NAMED else above[-1]
    if fitting := [name for name, kind in _SETTINGS.items() if key in kind.__annotations__]:
        return f"not a setting of {parent}, but of {', '.join(fitting)}"
    known = [*_SETTINGS[parent].__annotations__, *(["extends"] if parent == above[0] else [])]
    return f"unknown key; {near(key, sorted(known))}"


def _is_exponent(value: Any) -> bool:
    """Whether the value is text such as 1e-4 or 1.0e308, which YAML 1.1 does not read as a number."""
    return isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+e[-+]?\d+", value, re.IGNORECASE) is not None


@with_config(KNOWN_NAMES)
class _LimitsOfMean(TypedDict, total=False):
    """What an average may set of `Limits`."""

    alpha: Share | None
    margin: Margin | None
    max_regression: Loss | None
    max_regression_percent: Loss | None
    require_power: Flag
    power: Share
    higher_is_better: Flag | None


@with_config(KNOWN_NAMES)
class _Limits(_LimitsOfMean, total=False):
    margin_percent: Margin | None
    skip: Flag


@with_config(KNOWN_NAMES)
class _Average(_LimitsOfMean):
    tasks: Annotated[Text | Annotated[list[Text], Field(min_length=1)], must("be names or patterns of tasks: [mmlu_*]")]
    metric: Annotated[Text, Field(min_length=1), must("be a metric's name, such as acc")]
    mean: NotRequired[
        Annotated[Literal["macro", "micro"], must("be macro (tasks count alike) or micro (documents do)")]
    ]


@with_config(KNOWN_NAMES)
class _Task(_Limits):
    metrics: NotRequired[dict[Text, _Limits] | None]


@with_config(KNOWN_NAMES)
class _Accuracy(_Limits):
    tasks: NotRequired[dict[Text, _Task | None] | None]
    averages: NotRequired[dict[Text, _Average | None] | None]  # null takes away an average of the extended policy


@with_config(KNOWN_NAMES)
class _Tokens(TypedDict, total=False):
    epsilon: Loss | None


def _accuracy(given: Any) -> AccuracyRule:
    """The rule, checked as a whole."""
    limits = dict(given or {})
    tasks = {name: dict(own or {}) for name, own in (limits.pop("tasks", None) or {}).items()}
    tasks = {name: {**own, "metrics": own.get("metrics") or {}} for name, own in tasks.items()}
    averages = (limits.pop("averages", None) or {}).items()
    held = {name: _average(own, limits) for name, own in averages if own is not None}
    rule = AccuracyRule(Limits(**limits), tasks, held)
    if problems := [*_inconsistent(rule)]:
        raise ValueError("; ".join(problems))
    return rule


def _average(own: _Average, limits: Mapping[str, Any]) -> Average:
    """An average of a rule, whose limits hold for the average, too, except `skip`."""
    named = {name: content for name, content in own.items() if name not in ("tasks", "metric", "mean")}
    tasks = [own["tasks"]] if isinstance(own["tasks"], str) else own["tasks"]
    values: dict[str, Any] = {**limits, **named, "skip": False}
    return Average(tuple(tasks), own["metric"], own.get("mean", "macro"), Limits(**values))


def _rule(given: Any) -> Rule:
    if len(given) != 1:
        raise ValueError(f"needs exactly one of {', '.join(RULES)}; has {', '.join(given) or 'none'}")
    ((kind, content),) = given.items()
    if kind in ("all_of", "any_of"):
        return policies.AllOf(tuple(content)) if kind == "all_of" else policies.AnyOf(tuple(content))
    rule: Rule = content
    return rule


def _allowable(part: Any) -> Any:
    if part not in ALLOWABLE:
        raise ValueError(f"cannot be allowed to differ; {near(part, ALLOWABLE)}")
    return part


@with_config(KNOWN_NAMES)
class _OneRule(TypedDict, total=False):
    digest: Annotated[
        Literal["equal"], must("be: equal, the one value there is"), AfterValidator(lambda _: policies.DigestRule())
    ]
    tokens: Annotated[_Tokens | None, AfterValidator(lambda given: policies.TokensRule(**given or {}))]
    accuracy: Annotated[_Accuracy | None, AfterValidator(_accuracy)]
    all_of: _Rules
    any_of: _Rules


_Rules = Annotated[list[Annotated[_OneRule, AfterValidator(_rule)]], Field(min_length=1)]


@with_config(KNOWN_NAMES)
class _Policy(_OneRule, total=False):
    description: Text
    inconclusive: Annotated[Inconclusive, must("be fail (exit code 1), report (exit code 3) or pass (exit code 0)")]
    allow: list[Annotated[Any, AfterValidator(_allowable)]]


_NAMED = ("tasks", "metrics", "averages", "any_of", "all_of")
_SETTINGS: dict[str, Any] = {
    "a policy": _Policy, "any_of": _OneRule, "all_of": _OneRule, "tokens": _Tokens, "accuracy": _Accuracy,
    "tasks": _Task, "metrics": _Limits, "averages": _Average,
}  # fmt: skip


def _inconsistent(rule: AccuracyRule) -> Iterator[str]:
    """Rules that cannot fail, test nothing, or ask for power without a loss to detect."""
    skips = [settings.get("skip") for own in rule.tasks.values() for settings in (own, *own["metrics"].values())]
    if rule.limits.skip and False not in skips and not rule.averages:
        yield "skip: true for every task, so no metric is tested; set skip: false for one"
    places = [("", rule.limits)]
    for task, own in rule.tasks.items():
        names = [name.partition(",") for name in own["metrics"]] or [("", "", "")]
        places += [(f"tasks: {task}: ", rule.of(task, metric, rest)) for metric, _, rest in names]
    places += [(f"averages: {name}: ", average.limits) for name, average in rule.averages.items()]
    for at, limits in places:
        yield from (f"{at}{why}" for why in _inconsistent_limits(limits))


def _inconsistent_limits(limits: Limits) -> Iterator[str]:
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


def near(word: Any, choices: Iterable[str]) -> str:
    """The known word that was probably meant, or all known words, as a part of a sentence."""
    matches = difflib.get_close_matches(str(word), tuple(choices), 1)
    return f"did you mean {matches[0]}?" if matches else f"there is: {', '.join(choices)}"


POLICIES = Path(str(files("evalengine.conf"))) / "gate"


def available() -> list[str]:
    """The names of the policies that come with evalengine, sorted."""
    return sorted(file.stem for file in POLICIES.glob("*.yaml"))


def load_policy(name: str, limits: Mapping[str, float] | None = None) -> Policy:
    """Return a policy by name or by file, on top of what it extends. limits: settings that replace those of its
    accuracy rules (`plan`). Raises `ConfigError` with everything that is wrong."""
    chain, value = _chain(name, "--policy " if limits is None else "policy=")
    where = " <- ".join(str(file) for file in chain)  # a problem may be in any of them
    policy = parse_policy(value, chain[0].stem, where)
    if not limits:
        return policy
    named = " ".join(f"{key}={own:g}" for key, own in limits.items())
    return parse_policy(_with_limits(value, limits), chain[0].stem, named)


def policy_files(name: str) -> list[Path]:
    """Return a policy's files: its own, then those that it extends. Raises `ConfigError` if one cannot be read."""
    return _chain(name, "--policy ")[0]


def _chain(name: str, setting: str) -> tuple[list[Path], Any]:
    """Return (the files of a policy, its values on top of those that it extends)."""
    path, value = _read(name, Path(), f"{setting}{name}")
    chain = [path]
    while isinstance(value, dict) and "extends" in value:
        parent, base = _parent(value.pop("extends"), chain)
        chain.append(parent)
        value = merged(base, value)
    return chain, value


def _with_limits(value: Any, limits: Mapping[str, float]) -> Any:
    """A policy's values with these limits of its accuracy rules; what is no rule stays for the reader to report."""
    if isinstance(value, list):
        return [_with_limits(part, limits) for part in value]
    if not isinstance(value, dict):
        return value
    changed = {key: _with_limits(value[key], limits) for key in ("all_of", "any_of") if key in value}
    own = value.get("accuracy") or {}
    if "accuracy" in value and isinstance(own, dict):
        changed["accuracy"] = {**own, **limits}
    return {**value, **changed}


def merged(base: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` on top of `base`: mappings are merged key by key, `allow` adds to what the base allows, and everything else
    (numbers, texts, other lists, null) replaces what the base says. A rule of another kind replaces the base's rule.
    """
    base = dict(base) if isinstance(base, dict) else {}
    if any(key in own for key in RULES):
        base = {key: value for key, value in base.items() if key not in RULES or key in own}
    return deep_merged(base, own) | _allowed(base.get("allow"), own.get("allow"))


def _allowed(base: Any, own: Any) -> dict[str, Any]:
    """The merged `allow`; empty where one of the two is no list, which the reader will report."""
    if not isinstance(base, list) or not isinstance(own, list):
        return {}
    return {"allow": [*base, *(part for part in own if part not in base)]}


def _parent(name: Any, chain: list[Path]) -> tuple[Path, Any]:
    """The policy that the last of `chain` extends: a name, or a file beside it."""
    here = chain[-1]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{here}: extends: is {shown(name)}; name a policy ({', '.join(available())}) or a file")
    path, value = _read(name, here.parent, f"{here}: extends: {name}")
    if path.resolve() in [file.resolve() for file in chain]:
        turns = " -> ".join(str(file) for file in [*chain, path])
        raise ConfigError(f"{here}: extends: {name}: these policies extend each other in a circle: {turns}")
    return path, value


def _read(name: str, folder: Path, where: str) -> tuple[Path, Any]:
    path = POLICIES / f"{name}.yaml" if name in available() else folder / name
    try:
        value = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"{where}: no such policy or file ({error}); {near(name, available())}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    return path, value
