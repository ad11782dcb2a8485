"""`python -m evalengine plan task=gsm8k`: how many documents a gate needs, before a run is made."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, Field
from rich.console import Console

from evalengine.config.schema import ITEM_MARK, Config, leaves
from evalengine.config.shipped import available, outline
from evalengine.errors import ConfigError
from evalengine.plain_text import warn
from evalengine.records.manifest_data import Manifest
from evalengine.report.gate.plan_report import further_facts, plan_lines
from evalengine.report.gate.planned import AS_SEEN, RATES, Rate, accuracy_rules, plan_of
from evalengine.report.gate.policies import Policy, load_policy
from evalengine.report.read.groups import below
from evalengine.report.read.load import load_data
from evalengine.report.read.names import all_runs, skipped_note
from evalengine.report.read.run import Run
from evalengine.report.stats.measured import pairs_of
from evalengine.report.stats.perplexity import Kind, value_of
from evalengine.tasks.registry import task_class
from evalengine.util.command import Namespace
from evalengine.util.tables import print_lines
from evalengine.util.validation import KNOWN_NAMES, must, read_as

RATIOS: dict[str, Kind] = {"weighted_perplexity": "perplexity", "bits_per_byte": "bits"}  # aggregation -> kind of ratio
HELD = ("scores", "results", "weighted", "clusters", "groups", "higher_is_better")  # of a run, what a plan reads


def _of_percent(text: str) -> Any:
    return float(text[:-1]) / 100 if text.endswith("%") else text


Names = Annotated[list[str], BeforeValidator(lambda text: [name for name in text.strip("[]").split(",") if name])]
Share = Annotated[float, Gt(0), Lt(1), BeforeValidator(_of_percent), must("be more than 0 and less than 1, or as 5%")]
Flips = Annotated[float, Ge(0), Le(1), BeforeValidator(_of_percent), must("be a share from 0 to 1, such as 0.02 or 2%")]
Margin = Annotated[float, Gt(0), Field(allow_inf_nan=False), must(
    "be a number alone, more than 0 and finite; margin=1 is one point (0.75 to 0.74), and margin_percent=1 is 1 % of a "
    "perplexity")]  # fmt: skip


LIMITS = ("margin", "margin_percent", "alpha", "power")  # settings of the policy's accuracy rules


@dataclass(frozen=True)
class PlanSettings:
    """The command's settings."""

    __pydantic_config__ = KNOWN_NAMES

    margin: Margin | None = None
    margin_percent: Margin | None = None
    alpha: Share | None = None
    power: Share | None = None
    task: Names = field(default_factory=list)  # tasks and groups; none: those of the runs
    runs: Names = field(default_factory=list)
    policy: str = "accuracy"
    flips: Flips | None = None


def main(arguments: Namespace) -> int:
    """Run `plan` with its words, and return the exit code. Raises `ConfigError` for bad usage, and for bad runs."""
    settings, policy = _parsed(arguments.words)
    chosen = [*dict.fromkeys(settings.task)]
    paths = all_runs(settings.runs)
    if len(settings.runs) == 1 and (skipped := skipped_note(settings.runs[0])):
        warn(skipped)
    if twice := [path for path, count in Counter(Path(path).resolve() for path in paths).items() if count > 1]:
        raise ConfigError([f"plan: runs: {path} is named twice; name each run once" for path in twice])
    loaded = [load_data(path) for path in paths]
    runs = [data.run for data in loaded]
    held = {name for run in runs for key in run.results for name in (key[0], *run.groups)}
    problems = [f"task={name}: no such task or group, neither shipped (`python -m evalengine tasks`) nor in the runs"
                for name in chosen if name not in available("task") and name not in held]  # fmt: skip
    if problems:
        raise ConfigError([f"plan: {problem}" for problem in problems])
    a, unknown, unscored = _baseline(chosen, runs)
    pairs = pairs_of(runs)[0]
    rates: tuple[Rate, ...] = RATES if settings.flips is None else (settings.flips + 0.0,)  # no -0
    if pairs and settings.flips is None:
        rates = (AS_SEEN,)
    plan = plan_of(policy, a, rates, pairs, unknown, unscored)
    names = chosen or sorted({key[0] for key in a.scores})
    print_lines([*plan_lines(policy.name, plan, bool(runs)), *further_facts(names, a, policy, plan, loaded)],
                Console(file=sys.stdout, soft_wrap=True, highlight=False))  # fmt: skip
    return 0


def _parsed(words: Sequence[str]) -> tuple[PlanSettings, Policy]:
    """The settings, and the policy with their limits. Raises ConfigError with all problems."""
    values = dict(word.split("=", 1) for word in words if "=" in word)
    there = f"; there is: {', '.join(item.name for item in fields(PlanSettings))}"
    problems = [f"{word!r}: settings are written name=value" for word in words if "=" not in word]
    named = Counter(word.partition("=")[0] for word in words)
    problems += [f"{name} is given twice" for name, count in named.items() if count > 1]
    try:
        settings = read_as(PlanSettings, values)
        problems += [] if settings.task or settings.runs else ["task=NAME or runs=RUN is needed"]
        limits = {name: value for name in LIMITS if (value := getattr(settings, name)) is not None}
        policy = load_policy(settings.policy, limits)
        if not accuracy_rules(policy.rule):
            problems.append(f"policy={policy.name}: has no accuracy rule, so no number of documents matters to it")
    except ConfigError as error:
        problems += [problem + there * problem.endswith("no such setting") for problem in error.problems]
    if problems:
        raise ConfigError([f"plan: {problem}" for problem in problems])
    return settings, policy


def _baseline(names: Sequence[str], runs: Sequence[Run]) -> tuple[Run, dict[str, str], set[str]]:
    """(a run as the gate would judge it, the tasks whose documents are not known, with the reason, the tasks whose
    scores are not known): what the runs hold, the first first, and by the settings of shipped tasks what they lack.
    Without `names`, all that the runs hold."""
    held = {key[0] for run in runs for key in (*run.scores, *run.results)}
    composed = [outline(name) for name in names if name not in held and name in available("task")]
    by_settings, unknown = _by_settings([config for config in composed if not held & {*config.tasks}])
    inside = {task for config in composed for task in (*config.tasks, *config.groups)}
    for name in names:
        inside |= {name, *(task for run in runs for task in below(run.groups, name))}
    merged: dict[str, Any] = {}
    for held_field in HELD:
        values = [getattr(run, held_field) for run in (by_settings, *reversed(runs))]
        merged[held_field] = {key: value for own in values for key, value in own.items()
                         if not names or (key if isinstance(key, str) else key[0]) in inside}  # fmt: skip
    unscored = {key[0] for key in by_settings.scores} - held
    unknown = {task: unknown[task] for task in unknown.keys() - held}
    return replace(runs[0] if runs else by_settings, **merged), unknown, unscored


def _by_settings(configs: Sequence[Config]) -> tuple[Run, dict[str, str]]:
    """A run of the tasks' documents, whose scores mean nothing, and the tasks whose documents are not known.

    Means differ between tasks, so that a group's value tells how it weights them.
    """
    run = Run(Path("the tasks' settings"), "baseline", "settings", None, {}, {}, Manifest({}), {}, {}, {}, {}, {}, {})
    unknown: dict[str, str] = {}
    tasks = {name: task for config in configs for name, task in config.tasks.items()}
    for number, (name, task) in enumerate(tasks.items()):
        rows = task.dataset.rows
        if task.cluster is not None:
            unknown[name] = (f"the gate counts clusters, rows of one {task.cluster!r}, and the settings do not say how "
                             "many there are; name a run of it: runs=RUN")  # fmt: skip
        elif rows is None:
            unknown[name] = "the settings do not say how many documents there are; name a run of it: runs=RUN"
        documents = range(2 if rows is None else rows)
        if task.items is not None:
            run.clusters[name] = {doc: f"{task.items}{ITEM_MARK}{doc}" for doc in documents}
        right = round(len(documents) * number / len(tasks))
        cls = task_class(task.cls or "", f"tasks.{name}.cls")
        for metric, own in cls.metrics_of(task).items():
            for filter_name in cls.filter_names(task):
                key = (name, metric, filter_name)
                run.higher_is_better[key] = own.higher_is_better
                run.results[key] = (0.0, None)
                if own.aggregation == "mean":
                    run.scores[key] = {doc: float(doc < right) for doc in documents}
                    run.results[key] = (right / len(documents), None)
                elif own.aggregation == "perplexity":  # of log-likelihoods by document: LAMBADA's
                    run.scores[key] = dict.fromkeys(documents, -1.0)
                    run.results[key] = (value_of(1.0, "perplexity"), None)
                elif isinstance(own.aggregation, str) and own.aggregation in RATIOS:
                    run.weighted[key] = dict.fromkeys(documents, (-1.0, 1.0))
                    run.results[key] = (value_of(1.0, RATIOS[own.aggregation]), None)
    for config in configs:
        for name, group in config.groups.items():
            run.groups[name] = group.tasks
            for entry in group.aggregate_metric_list or ():
                _add_mean(run, name, leaves(name, config.groups), entry["metric"], entry.get("weight_by_size", True))
    return run, unknown


def _add_mean(run: Run, group: str, tasks: Sequence[str], metric: str, by_size: bool) -> None:
    """Add a group's mean under each filter that its tasks have."""
    for filter_name in sorted({key[2] for key in run.scores if key[0] in tasks and key[1] == metric}):
        keys = [key for key in run.scores if key[0] in tasks and key[1:] == (metric, filter_name)]
        weights = [len(run.scores[key]) if by_size else 1 for key in keys]
        total = math.fsum(weight * run.results[key][0] for key, weight in zip(keys, weights, strict=True))
        run.results[group, metric, filter_name] = (total / sum(weights), None)
        run.higher_is_better[group, metric, filter_name] = run.higher_is_better[keys[0]]
