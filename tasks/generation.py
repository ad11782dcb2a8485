"""How answers are generated, and metrics over k sampled answers of every document.

    answers of one document, k = 4: "18", "[invalid]", "18", "20"; the gold answer is "18"
    pass@4 = 1.0 (one is right), pass@1 = avg@4 = 0.5 (half are right), maj@4 = 1.0 (the most frequent one is right)

A task with different metrics (MATH's `math_verify`, DROP's `f1`) has these of each, without maj@k: nothing says which
of its texts are one answer. pass@j then counts answers that are right in full, a score of 1.

Every metric has one value a document, so a standard error over documents is one clustered by document: the k
samples of a document are related, and are never counted as k documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from evalengine.config.schema import GenerationConfig, TaskConfig
from evalengine.tasks.instance import Generation
from evalengine.tasks.metric import Metric, MetricValue, pass_at_k

MEAN = "mean"
MATCH = {"exact_match": Metric(MEAN)}  # the metric of a task whose texts are compared


def generation_settings(config: GenerationConfig, fewshot_delimiter: str) -> Generation:
    """The settings with lm-eval's defaults: greedy, at most 256 tokens, until the delimiter between exemplars."""
    return Generation(
        until=(fewshot_delimiter,) if config.until is None else tuple(config.until),
        max_gen_toks=256 if config.max_gen_toks is None else config.max_gen_toks,
        temperature=config.temperature or 0.0,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
    )


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
        yield f"pass_at={config.pass_at}: {', '.join(map(str, wrong))} must be in 1 ... {count}, the number of samples"


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

    def metrics(self, own: Mapping[str, Metric], *, vote: bool) -> dict[str, Metric]:
        """The metrics in addition to those of one sample. own: these; vote: whether equal texts are one answer."""
        named: dict[str, Metric] = {}
        for name, metric in own.items():
            kinds = [f"pass@{j}" for j in self.passes] if metric.aggregation == MEAN else []
            kinds += [f"maj@{self.count}"] if vote else []
            named.update({f"{_prefix(name, own)}{kind}": Metric() for kind in kinds})
            named[f"{_prefix(name, own)}avg@{self.count}"] = metric
        return named

    def scores(
        self, own: Mapping[str, Metric], samples: Sequence[Mapping[str, MetricValue]], vote: float | None = None
    ) -> dict[str, MetricValue]:
        """One document's values of `metrics`. samples: what the metrics `own` give for each single answer. vote: the
        score of the most frequent text, where equal texts are one answer.

        pass@j is the unbiased estimate (`metric.pass_at_k`); avg@k is the mean. A metric that is no mean has lists of
        values, as IFEval's of every instruction; the samples' lists are joined.
        """
        values: dict[str, MetricValue] = {}
        for name, metric in own.items():
            given, prefix = [sample[name] for sample in samples], _prefix(name, own)
            if metric.aggregation != MEAN:
                values[f"{prefix}avg@{self.count}"] = [*chain.from_iterable(given)]
                continue
            correct = sum(value >= 1 for value in given)
            values.update({f"{prefix}pass@{j}": pass_at_k(len(given), correct, j) for j in self.passes})
            if vote is not None:
                values[f"{prefix}maj@{self.count}"] = vote
            values[f"{prefix}avg@{self.count}"] = math.fsum(given) / len(given)
        return values


def _prefix(name: str, own: Mapping[str, Metric]) -> str:
    """Return the text before pass@k: the metric's name, if there are several (also in `report/stats/pass_at_k.py`)."""
    return f"{name} " if len(own) > 1 else ""
