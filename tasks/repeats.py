"""Metrics over k sampled answers of every document.

    answers of one document, k = 4: "18", "[invalid]", "18", "20"; the gold answer is "18"
    pass@4 = 1.0 (one is right), pass@1 = avg@4 = 0.5 (half are right), maj@4 = 1.0 (the most frequent one is right)

A task with metrics of its own (MATH's `math_verify`, DROP's `f1`) has these of each, without maj@k: nothing says which
of its texts are one answer. pass@j then asks for an answer that is right in full, a score of 1.

Every metric has one value a document, so a standard error over documents is one clustered by document: the k
samples of a document are related, and are never counted as k documents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from evalengine.config.schema import TaskConfig
from evalengine.tasks.metric import Metric, MetricValue, pass_at_k

MEAN = "mean"


def repeats_of(config: TaskConfig) -> int:
    """How many samples a document has."""
    return config.repeats or config.generation.repeats or 1


def repeat_problems(config: TaskConfig) -> Iterator[str]:
    """Yields what is wrong with the settings; each problem starts with the setting's name. Ranges are checked earlier,
    where settings are composed."""
    count, own, older = repeats_of(config), config.repeats, config.generation.repeats
    if own is not None and older is not None and own != older:
        yield f"repeats={own}: generation.repeats={older} says otherwise; set one of them"
    if count > 1 and not config.generation.temperature:
        name = "repeats" if own is not None else "generation.repeats"
        yield f"{name}={count}: at temperature 0 all answers are one; set a temperature (task.generation.temperature)"
    if wrong := [k for k in config.pass_at or () if not 1 <= k <= count]:
        yield f"pass_at={config.pass_at}: {', '.join(map(str, wrong))} must lie in 1 ... {count}, the number of samples"


@dataclass(frozen=True)
class Repeated:
    """The metrics of k > 1 samples a document."""

    count: int  # samples per document, the k of pass@k
    passes: tuple[int, ...]  # the j of each pass@j

    @classmethod
    def of(cls, config: TaskConfig) -> Repeated | None:
        """None where a document has one sample."""
        count = repeats_of(config)
        return cls(count, tuple(sorted({*(config.pass_at or ()), count}))) if count > 1 else None

    @property
    def metrics(self) -> dict[str, Metric]:
        names = (*(f"pass@{j}" for j in self.passes), f"maj@{self.count}", f"avg@{self.count}")
        return dict.fromkeys(names, Metric("mean"))

    def scores(self, answers: Sequence[str], judge: Callable[[str], float]) -> dict[str, MetricValue]:
        """One document's values. answers: what a filter read out of each sample; judge: 1.0 for a right one, else 0.0.

        pass@j is the unbiased estimate (`estimators.pass_at_k`); maj@k judges the most frequent answer, of equally
        frequent answers the first (lm-eval's majority_vote, then take_first); avg@k is the share of right answers.
        """
        right = [judge(answer) for answer in answers]
        correct = sum(value > 0 for value in right)
        values: dict[str, MetricValue] = {f"pass@{j}": pass_at_k(len(right), correct, j) for j in self.passes}
        values[f"maj@{self.count}"] = judge(Counter(answers).most_common(1)[0][0])
        values[f"avg@{self.count}"] = math.fsum(right) / len(right)
        return values

    def metrics_of(self, own: Mapping[str, Metric]) -> dict[str, Metric]:
        """The metrics beside those of a task that scores its answers itself."""
        named: dict[str, Metric] = {}
        for name, metric in own.items():
            if metric.aggregation == MEAN:
                named.update({f"{_prefix(name, own)}pass@{j}": Metric() for j in self.passes})
            named[f"{_prefix(name, own)}avg@{self.count}"] = metric
        return named

    def scores_of(
        self, own: Mapping[str, Metric], samples: Sequence[Mapping[str, MetricValue]]
    ) -> dict[str, MetricValue]:
        """One document's values of `metrics_of`. samples: what the task's own metrics give for each answer by itself.

        A metric that is no mean has lists of values, as IFEval's of every instruction; the samples' lists are joined.
        """
        values: dict[str, MetricValue] = {}
        for name, metric in own.items():
            given, prefix = [sample[name] for sample in samples], _prefix(name, own)
            if metric.aggregation == MEAN:
                correct = sum(value >= 1 for value in given)
                values.update({f"{prefix}pass@{j}": pass_at_k(len(given), correct, j) for j in self.passes})
                values[f"{prefix}avg@{self.count}"] = math.fsum(given) / len(given)
            else:
                values[f"{prefix}avg@{self.count}"] = [*chain.from_iterable(given)]
        return values


def _prefix(name: str, own: Mapping[str, Metric]) -> str:
    """What stands before pass@k: the metric's name, where there are several (so does `report/stats/pass_at_k.py`)."""
    return f"{name} " if len(own) > 1 else ""
