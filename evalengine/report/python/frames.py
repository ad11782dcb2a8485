"""A run as pandas frames: metrics, samples, records. pandas is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from evalengine.errors import ConfigError
from evalengine.records.folder import RECORDS
from evalengine.records.schema import RequestRecord, read_records
from evalengine.report.read.groups import group_documents, groups_first
from evalengine.report.read.run import Run, ScoreKey
from evalengine.report.stats.metric_interval import cut_of

if TYPE_CHECKING:
    from pandas import DataFrame

METRICS = ("task", "metric", "filter", "value", "stderr", "higher_is_better", "documents", "cut", "value_finished")
SAMPLES = ("task", "doc_id", "filter", "target", "prompts", "responses", "answers", "doc", "doc_hash", "prompt_hash")
RECORD = tuple(item.name for item in fields(RequestRecord))


def metrics_frame(run: Run) -> DataFrame:
    """A row per task, metric and filter. `value` and `stderr` are in the metric's own units (a share of 1, a
    perplexity); what the run does not say is missing. `documents`: how many have a score of their own; of a
    group, how many its tasks have together. `cut`: the share of documents with an answer that the length limit ended,
    `value_finished` the value on the others. A group stands above its tasks."""
    subtasks = run.groups
    rows = [
        (*key, *run.results[key], run.higher_is_better.get(key), len(run.scores[key]) if key in run.scores
         else group_documents(run, key), *_cut(run, key))
        for task in groups_first((key[0] for key in run.results), subtasks)
        for key in run.results if key[0] == task
    ]  # fmt: skip
    frame = _frame(rows, METRICS)
    numbers = dict.fromkeys(("value", "stderr", "cut", "value_finished"), "float64")
    return frame.astype({**numbers, "documents": "Int64", "higher_is_better": "boolean"})


def _cut(run: Run, key: ScoreKey) -> tuple[float, float | None]:
    cut = cut_of(run, key)
    return (0.0, run.results[key][0]) if cut is None else (cut.count / cut.total, cut.finished)


def samples_frame(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], cut: Mapping[str, Collection[int]] | None = None
) -> DataFrame:
    """A row per task, document and filter: prompts, responses, what counted as the answer, and a column for each metric
    (of a nullable type if a task has no such metric). `prompts`, `responses` and `answers` are lists, one entry a
    request; `cut` is whether the length limit ended one of the responses. samples: each task's rows, as lm-eval's files
    have them. cut: `Run.cut`."""
    rows = list(_samples(samples))
    frame = _frame([(*row, row[1] in (cut or {}).get(row[0], ())) for row, _ in rows], (*SAMPLES, "cut"))
    for name in dict.fromkeys(name for _, scores in rows for name in scores):
        frame[name] = _scores([scores.get(name) for _, scores in rows])
    return frame.sort_values(["task", "doc_id"], kind="stable", ignore_index=True)


def records_frame(run: Run) -> DataFrame:
    """A row per request, in (task, document, request, repeat) order: token ids (lists), raw float32 logprobs in nats
    (arrays), `sum_logprob` (nats, correctly rounded), finish reason, tokens cut from the prompt's left.

    Raises `ConfigError` for an lm-eval folder or a baseline, which hold no records.
    """
    if run.kind != "run":
        raise ConfigError(f"{run.source}: {run.kind} files hold no records; `samples` and `metrics` have what they say")
    records = read_records((run.records or run.source) / RECORDS)
    rows = [(*(getattr(record, name) for name in RECORD), run.items[record.key].sum_logprob) for record in records]
    return _frame(rows, (*RECORD, "sum_logprob"))


def _samples(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(the values of `SAMPLES`, metric -> this document's value) of each sample."""
    for task, rows in samples.items():
        for row in rows:
            calls = row.get("arguments") or {}
            prompts = [next(iter(words.values()), None) for words in calls.values()] if isinstance(calls, dict) else []
            texts = (row.get("target"), prompts, row.get("resps"), row.get("filtered_resps"), row.get("doc"))
            hashes = (row.get("doc_hash"), row.get("prompt_hash"))
            scores = {name: row[name] for name in row.get("metrics") or () if name in row}
            yield (task, row["doc_id"], row["filter"], *texts, *hashes), scores


def _scores(values: list[Any]) -> Any:
    """A metric's column: bool, int64 or float64, nullable if a value is missing; values of another kind as they are."""
    import pandas as pd

    present = [value for value in values if value is not None]
    types = set(map(type, present))
    if not types or not types <= {bool, int, float} or any(type(x) is int and abs(x) >= 1 << 63 for x in present):
        return pd.Series(values, dtype=object)
    missing = len(present) < len(values)
    if types <= {bool}:
        return pd.array(values, dtype="boolean" if missing else "bool")
    if types <= {int}:
        return pd.array(values, dtype="Int64" if missing else "int64")
    return pd.array([None if x is None else float(x) for x in values], dtype="Float64" if missing else "float64")


def _frame(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> DataFrame:
    """A frame of these rows, in which cells that are lists stay lists."""
    import pandas as pd

    return pd.DataFrame({name: [row[place] for row in rows] for place, name in enumerate(columns)})
