"""A comparison as JSON: complete, with names that stay. Numbers that are not finite are null."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.plain_text import json_lines
from evalengine.records.folder import write_text_file
from evalengine.records.manifest_data import resumed_fast
from evalengine.report.compare.compare import LEVELS, Comparison
from evalengine.report.compare.item_differences import NEAR_TIE, TIE_CEILING, LogprobChange, tally
from evalengine.report.compare.metric_deltas import MetricDelta
from evalengine.report.numbers import finite_json
from evalengine.report.read.run import Key, Run, by_name
from evalengine.report.stats.metric_interval import Cut, cut_of

FORMAT = "evalengine.compare"
VERSION = 2  # rises when a name below changes its meaning or is removed


def write_json(command: str, content: dict[str, Any], target: str) -> None:
    """Write a command's findings to the file `target`; "-": to standard output. Raises `ConfigError` if it cannot be
    written: exit code 1 has another meaning."""
    if target == "-":
        sys.stdout.write(json_lines(content))
        return
    try:
        write_text_file(Path(target), json_lines(content))
    except EvalEngineError as error:
        raise ConfigError(f"{command}: --json: {error}") from error


def comparison_json(c: Comparison) -> dict[str, Any]:
    """One pair of runs."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "verdict": c.verdict,
        "within": {level: c.within(level) for level in LEVELS},
        "digests_equal": c.a.digest == c.b.digest if c.a.digest and c.b.digest else None,
        "runs": {"a": run_json(c.a), "b": run_json(c.b)},
        "requests": {"common": c.common, "only_a": c.only_a, "only_b": c.only_b, "differing": len(c.differences)},
        "unlike": c.unlike,
        "settings": c.settings,
        "surroundings": c.surroundings,
        "unchecked": c.unchecked,
        "differing_in": c.kinds,
        "answers": c.answers,
        "answers_by_metric": [{**by_name(key), **counts} for key, counts in sorted(tally(c.flips).items())],
        "causes": c.causes,
        "causes_explained": {cause: c.why.get(cause, []) for cause in c.causes},
        "tensors": c.tensors,
        "rescored": c.rescored,
        "differences": [{**_key(d.key), "what": d.kinds[0], "in": d.kinds, "cause": d.cause} for d in c.differences],
        "logprobs": None if c.logprobs is None else _logprobs(c.logprobs),
        "near_tie_nat": NEAR_TIE,
        "near_tie_ceiling": TIE_CEILING,
        "divergences": [{**_key(d.key), **{k: v for k, v in asdict(d).items() if k != "key"}} for d in c.divergences],
        "flips": [asdict(flip) for flip in c.flips],
        "metrics": [_metric(metric, {"a": c.a, "b": c.b}) for metric in c.metrics],
    }
    plain: dict[str, Any] = finite_json(content)
    return plain


def run_json(run: Run) -> dict[str, Any]:
    """The facts that identify a run."""
    return {
        "source": str(run.source),
        "name": run.name,
        "kind": run.kind,
        "digest": run.digest,
        "task_digests": run.task_digests,
        "requests": len(run.items),
        "resumed_fast": resumed_fast(run.manifest) > 0,
        "bound": not run.unbound and not run.by_lm_eval,
    }


def _key(key: Key) -> dict[str, Any]:
    return dict(zip(("task", "doc_id", "request_index", "repeat"), key, strict=True))


def _logprobs(change: LogprobChange) -> dict[str, Any]:
    """The logprobs' change; its distances are null where logprobs differ and no distance could be measured."""
    content = asdict(change)
    if change.differing and not change.measured:
        content |= {"max_abs": None, "percentiles": None, "max_ulps": None, "percentile_ulps": None}
    return content


def _metric(metric: MetricDelta, runs: Mapping[str, Run]) -> dict[str, Any]:
    return {
        **by_name(metric.key),
        "a": metric.value_a,
        "b": metric.value_b,
        "common_a": metric.common_a,
        "common_b": metric.common_b,
        "delta": metric.difference,
        "no_delta_because": metric.apart or None,
        "paired": None if metric.paired is None else asdict(metric.paired),
        "p_holm": metric.p_holm,
        "unit": metric.unit,
        "left_out": metric.left_out,
        "cut": {side: cut_json(cut_of(run, metric.key)) for side, run in runs.items()},
    }


def cut_json(cut: Cut | None) -> dict[str, Any] | None:
    """Documents whose answers the length limit cut, of how many, and the metric's value on these and on the others."""
    return None if cut is None else asdict(cut)
