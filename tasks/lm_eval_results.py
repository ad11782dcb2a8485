"""lm-eval's aggregations and standard errors over all documents' values, as this package's `Aggregation`s."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evalengine.tasks.lm_eval_quiet import quiet
from evalengine.tasks.metric import Aggregation

FEW = ("bleu", "chrf", "chrf++", "ter")  # lm-eval resamples these a hundred times at most
SAME = ("mean", "perplexity", "weighted_perplexity", "bits_per_byte")  # those of harness.metrics, which sum exactly


def aggregations(functions: Mapping[str, Any]) -> dict[str, str | Aggregation]:
    """Metric -> the name of the harness's own aggregation if it is the same, else lm-eval's function."""
    from lm_eval.api import metrics

    own = {getattr(metrics, name): name for name in SAME}
    return {metric: own.get(function) or _theirs(metric, function) for metric, function in functions.items()}


def _theirs(metric: str, function: Callable[[list[Any]], Any]) -> Aggregation:
    def value(items: list[Any]) -> Any:
        with quiet():
            total = function(items)
        return total.item() if hasattr(total, "item") else total

    def stderr(items: list[Any], iterations: int) -> float | None:
        from lm_eval.api.metrics import stderr_for_metric

        count = min(iterations, 100) if metric in FEW else iterations
        with quiet():
            error = stderr_for_metric(metric=function, bootstrap_iters=count)
            return None if error is None else float(error(items))

    return Aggregation(value, stderr)
