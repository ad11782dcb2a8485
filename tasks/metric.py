"""How a task's values become numbers: metrics, their keys in the results, and their aggregations.

Also the metrics that a templated task can name, under lm-evaluation-harness's names and with its meaning (0.4.13).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalengine.tasks.filters import ExactMatch, Unbuilt, pattern_problems
from evalengine.util.plain_files import Tagged

MetricKey = tuple[str, str]  # (metric, filter)
# A score, (log-likelihood, weight) for the weighted aggregations, or whatever an `Aggregation` of the task's own takes.
MetricValue = Any


@dataclass(frozen=True)
class Metric:
    """How the values of one metric become one number: an aggregation of harness.metrics by its name, or another one."""

    aggregation: str | Aggregation = "mean"
    higher_is_better: bool = True


@dataclass(frozen=True)
class Aggregation:
    """How the values of one metric become one number, where harness.metrics has no such aggregation."""

    value: Callable[[list[Any]], Any]
    stderr: Callable[[list[Any], int], float | None]  # (at least two values, resamples); None: there is none


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate from n samples of a document, `correct` of them right: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1.
    """
    assert 0 <= correct <= n and 1 <= k <= n
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


MEAN = Metric("mean")
DEFAULTS: dict[str, dict[str, Metric]] = {  # output type -> its metrics; `UNNAMED` without a metric_list
    "multiple_choice": {"acc": MEAN, "acc_norm": MEAN, "acc_bytes": MEAN, "exact_match": MEAN},
    "generate_until": {"exact_match": MEAN},
    "loglikelihood": {"perplexity": Metric("perplexity", higher_is_better=False), "acc": MEAN},
    "loglikelihood_rolling": {
        "word_perplexity": Metric("weighted_perplexity", higher_is_better=False),
        "byte_perplexity": Metric("weighted_perplexity", higher_is_better=False),
        "bits_per_byte": Metric("bits_per_byte", higher_is_better=False),
    },
}
UNNAMED = {**{kind: (*known,) for kind, known in DEFAULTS.items()}, "multiple_choice": ("acc", "acc_norm")}
MATCH_OPTIONS: dict[str, type] = {  # options of exact_match over generated text
    "regexes_to_ignore": list,
    "ignore_case": bool,
    "ignore_punctuation": bool,
    "ignore_numbers": bool,
}


@dataclass(frozen=True)
class Scores:
    """A task's metrics, and how its generated answers are compared."""

    metrics: dict[str, Metric]
    match: ExactMatch


def read_metrics(metric_list: Any, output_type: str, own: Mapping[str, Metric] | None = None) -> Scores:
    """The metrics of lm-eval's `metric_list`. Raises ValueError with a line for each thing that is wrong.

    own: the metrics that the task's class computes itself; they replace the list.
    """
    if own:
        return Scores(dict(own), ExactMatch())
    defaults = DEFAULTS[output_type]
    if metric_list is None:
        return Scores({name: defaults[name] for name in UNNAMED[output_type]}, ExactMatch())
    if metric_list == [] and output_type == "generate_until":  # a judge alone scores the answers
        return Scores({}, ExactMatch())
    if problems := list(metric_problems(metric_list, output_type)):
        raise ValueError("\n".join(problems))
    metrics, match = {}, ExactMatch()
    for entry in metric_list:
        usual = defaults[entry["metric"]]
        better = entry.get("higher_is_better", usual.higher_is_better)
        metrics[entry["metric"]] = Metric(usual.aggregation, better)
        if output_type == "generate_until":
            match = ExactMatch(
                ignore=tuple(entry.get("regexes_to_ignore") or ()),
                ignore_case=entry.get("ignore_case", False),
                ignore_punctuation=entry.get("ignore_punctuation", False),
                ignore_numbers=entry.get("ignore_numbers", False),
            )
    return Scores(metrics, match)


def metric_problems(metric_list: Any, output_type: str) -> Iterator[str]:
    """Yields what is wrong with a `metric_list`; each problem begins with its place."""
    if not isinstance(metric_list, list) or not metric_list:
        yield "metric_list: must be a list of {metric, aggregation, higher_is_better}"
        return
    built = DEFAULTS[output_type]
    for entry in metric_list:
        name = entry.get("metric") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in built:
            problem = f"metric_list: {str(name or entry)[:60]} is not built for {output_type}; there are "
            yield (Unbuilt if isinstance(name, (str, Tagged)) else str)(problem + ", ".join(built))
            continue
        if (named := entry.get("aggregation", built[name].aggregation)) != built[name].aggregation:
            known = built[name].aggregation
            yield Unbuilt(f"metric_list.{name}: aggregation {str(named)[:60]} is not built; it is {known}")
        yield from (f"metric_list.{name}: {problem}" for problem in _option_problems(entry, output_type))


def _option_problems(entry: Mapping[str, Any], output_type: str) -> Iterator[str]:
    options: dict[str, type] = {"higher_is_better": bool, **(MATCH_OPTIONS if output_type == "generate_until" else {})}
    for name, value in entry.items():
        if name in ("metric", "aggregation") or (name == "hf_evaluate" and value is False):
            continue
        if not isinstance(value, options.get(name, ())):
            yield f"{name}={str(value)[:60]!r} is no option of it, or of the wrong type"
        elif isinstance(value, list):
            yield from (problem for pattern in value for problem in pattern_problems(name, str(pattern)))


def choice_scores(
    metrics: Sequence[str], gold: Sequence[int], choices: Sequence[str], answers: Sequence[tuple[float, bool]]
) -> dict[str, MetricValue]:
    """Scores of one document of multiple choice.

    gold: the indices of the right choices. answers: (log-likelihood, is_greedy), one a choice.

    acc takes the choice of highest log-likelihood, acc_norm divides by its characters first, acc_bytes by its UTF-8
    bytes; of equal choices the first counts. exact_match: greedy decoding would have written a right choice.
    """
    logprobs = np.array([loglikelihood for loglikelihood, _ in answers], dtype=np.float64)
    lengths = {
        "acc": np.ones(len(choices)),
        "acc_norm": np.array([float(len(choice)) for choice in choices]),
        "acc_bytes": np.array([float(len(choice.encode("utf-8"))) for choice in choices]),
    }
    scores: dict[str, MetricValue] = {}
    for name in metrics:
        if name == "exact_match":
            scores[name] = float(any(answers[index][1] for index in gold))
            continue
        with np.errstate(divide="ignore", invalid="ignore"):  # an empty choice becomes -inf, which is never the highest
            scores[name] = float(int(np.argmax(logprobs / lengths[name])) in gold)
    return scores


def generated_scores(
    metrics: Sequence[str], judge: Callable[[str], float], several: bool, answer: Any
) -> dict[str, MetricValue]:
    """Scores of one generated answer. judge: 1.0 for a right text. several: whether more than one answer is right.

    If a filter leaves several answers, each is compared with the one gold answer and the share of right ones is the
    score; if several gold answers exist, one right answer is enough."""
    answers = answer if isinstance(answer, list) else [answer]
    right = [judge(text) for text in answers]
    value = float(max(right) > 0) if several else math.fsum(right) / len(right)
    return dict.fromkeys(metrics, value)


def rolling_scores(metrics: Sequence[str], text: str, loglikelihood: float) -> dict[str, MetricValue]:
    """(log-likelihood, weight) of one text for each metric; the weight counts words or UTF-8 bytes."""
    words, size = len(re.split(r"\s+", text)), len(text.encode("utf-8"))
    return {name: (loglikelihood, words if name == "word_perplexity" else size) for name in metrics}
