"""What a gate asks of a run: policies, written in YAML (`policy_reader` finds and checks them).

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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

RULES = ("digest", "tokens", "accuracy", "all_of", "any_of")
# The identity's parts that a policy may let differ: those that say who answers. Those that say what is asked (rows,
# tasks, seed, limit) may never differ.
ALLOWABLE = (
    *("weights", "model_spec", "tokenizer", "chat_template", "prompts", "dtype", "numerics", "attention_backend"),
    *("gpu_architecture", "engine", "contract_version", "apply_chat_template", "fewshot_as_multiturn"),
    *("system_instruction", "long_prompts", "model_args", "chat_template_date"),
)
Inconclusive = Literal["fail", "report", "pass"]
INCONCLUSIVE: dict[Inconclusive, int] = {"fail": 1, "report": 3, "pass": 0}  # exit codes


@dataclass(frozen=True)
class Limits:
    """What one metric of one task must keep. Points are hundredths of the metric: 0.75 to 0.73 is a loss of 2.0.

    With a margin a metric passes if the loss is shown to lie within it (non-inferiority: the one-sided interval's
    bound, at confidence 1 - alpha); without one it passes unless a loss is shown (p, after Holm, of at most alpha).
    """

    alpha: float | None = 0.05  # the error that a verdict may have; null: no test, max_regression alone decides
    margin: float | None = None  # points; null: no non-inferiority, the test alone
    margin_percent: float | None = None  # percent of the baseline; the margin for perplexities
    max_regression: float | None = None  # points; a larger observed loss fails, whatever its p; null: no limit
    max_regression_percent: float | None = None  # the same in percent of the baseline's value, for every metric
    require_power: bool = False  # a undecided check fails, whatever the policy's `inconclusive` says
    power: float = 0.8  # the probability of a pass that is planned for, and of detecting the minimum detectable loss
    higher_is_better: bool | None = None  # for metrics whose results do not say it
    skip: bool = False  # leave this task or metric out; the report says so


@dataclass(frozen=True)
class DigestRule:
    """Every token and every bit of every logprob is as in the baseline."""


@dataclass(frozen=True)
class TokensRule:
    """The same output tokens; each request's summed logprob within `epsilon` nats (null: tokens alone).

    A baseline file holds no other logprobs than sums: so a run folder and its baseline file get the same verdict.
    """

    epsilon: float | None = 0.0


@dataclass(frozen=True)
class Average:
    """A mean over tasks, held to limits of its own: "half a point on the average of all mmlu tasks"."""

    tasks: tuple[str, ...]  # names or patterns, as in a shell: mmlu_*; a pattern skips groups
    metric: str  # "metric", or "metric,filter" where a task has several filters
    mean: Literal["macro", "micro"]  # every task counts alike, or every document
    limits: Limits


@dataclass(frozen=True)
class AccuracyRule:
    """No task loses accuracy: see `Limits`. The innermost setting counts: metric, then task, then the rule."""

    limits: Limits = Limits()
    # Checked limits, `metrics` among them, by a task's or group's name or by a pattern of names.
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    averages: Mapping[str, Average] = field(default_factory=dict)

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
    """What a gate asks of a run."""

    name: str
    rule: Rule
    allow: tuple[str, ...] = ()  # names of `ALLOWABLE`
    description: str = ""
    inconclusive: Inconclusive = "report"
