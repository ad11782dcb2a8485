"""`evalengine.load_run`: a finished run for Python, with its frames (metrics, samples, records); shown as the command
shows it. pandas is imported when a frame is asked for."""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from evalengine.errors import ConfigError
from evalengine.plain_text import printable
from evalengine.records.folder import RECORDS
from evalengine.records.schema import RequestRecord, read_records
from evalengine.report.compare.report import value_text
from evalengine.report.html.markup import Markup, tag
from evalengine.report.read.groups import group_documents, groups_first
from evalengine.report.read.load import RunData, load_data
from evalengine.report.read.run import Run, Samples, ScoreKey
from evalengine.report.run_table import results_table, summary_lines
from evalengine.report.stats.metric_interval import cut_lines, cut_of
from evalengine.util.sheet import Line, Sheet
from evalengine.util.tables import print_lines

if TYPE_CHECKING:
    from pandas import DataFrame


METRICS = ("task", "metric", "filter", "value", "stderr", "higher_is_better", "documents", "cut", "value_finished")
SAMPLES = ("task", "doc_id", "filter", "target", "prompts", "responses", "answers", "doc", "doc_hash", "prompt_hash")


class Shown(ABC):
    """An object that is shown as the command shows it."""

    @abstractmethod
    def _lines(self) -> Iterator[Line]:
        """Everything to show, in order; a string is one line."""

    def __repr__(self) -> str:
        """The lines as a terminal without colours shows them, without spaces at their ends."""
        console = Console(file=io.StringIO(), soft_wrap=True, color_system=None)
        with console.capture() as captured:
            print_lines(self._lines(), console)
        return "\n".join(line.rstrip() for line in captured.get().split("\n")).strip("\n")

    def _repr_html_(self) -> str:
        """The lines as markup: tables, and a paragraph for each line. Texts from outside are escaped."""
        return tag("div", *(_table(line) if isinstance(line, Sheet) else tag("p", line) for line in self._lines()))


def _table(sheet: Sheet) -> Markup:
    sides = ["left" if n in sheet.words else "right" for n in range(len(sheet.head))]

    def row(name: str, cells: Sequence[str]) -> Markup:
        return tag("tr", *(tag(name, printable(cell), align=side) for cell, side in zip(cells, sides, strict=True)))

    return tag("table", tag("thead", row("th", sheet.head)), tag("tbody", *(row("td", cells) for cells in sheet.rows)))


class Results(Shown):
    """A finished run: a folder of ours, an output folder of lm-eval, or a baseline.

    `metrics`, `samples` and `records` are pandas frames, made when they are first asked for. All files were checked
    against the manifest's hashes when the run was loaded.
    """

    def __init__(self, data: RunData) -> None:
        self.run = data.run
        self._data = data

    @property
    def path(self) -> Path:
        """The run's folder; a baseline's file."""
        return self.run.source

    @property
    def digest(self) -> str | None:
        """64 hex digits: equal digests mean equal bits. None for a run of lm-eval's own."""
        return self.run.digest

    @property
    def manifest(self) -> dict[str, Any]:
        """`manifest.json`: what the run ran on, and how it went; empty where there is none."""
        return self.run.manifest.content

    @cached_property
    def metrics(self) -> DataFrame:
        """A row per task, metric and filter, a group above its tasks.

        `value` and `stderr` are in the metric's units (a share of 1, a perplexity); what the run does not say is
        missing. `documents`: how many have a score; of a group, how many its tasks have together. `cut`: the share of
        documents with an answer that the length limit ended, `value_finished` the value on the others.
        """
        run = self.run
        rows = [
            (*key, *run.results[key], run.higher_is_better.get(key), len(run.scores[key]) if key in run.scores
             else group_documents(run, key), *cut_values(run, key))
            for task in groups_first((key[0] for key in run.results), run.groups)
            for key in run.results if key[0] == task
        ]  # fmt: skip
        frame = _frame(rows, METRICS)
        numbers = dict.fromkeys(("value", "stderr", "cut", "value_finished"), "float64")
        return frame.astype({**numbers, "documents": "Int64", "higher_is_better": "boolean"})

    @cached_property
    def samples(self) -> DataFrame:
        """A row per task, document and filter (`samples_frame`). Raises `ConfigError` for a baseline."""
        return samples_frame(self._rows, self.run.cut)

    def samples_of(self, task: str) -> DataFrame:
        """The samples of one task, with the columns of its own metrics alone."""
        if task not in self._rows:
            raise ConfigError(f"samples_of({task!r}): no task is called so; there are {', '.join(self._rows)}")
        return samples_frame({task: self._rows[task]}, self.run.cut)

    @property
    def _rows(self) -> Samples:
        if self.run.kind == "baseline":
            raise ConfigError(f"{self.path}: a baseline holds no texts; load the run's folder")
        return self._data.rows

    @cached_property
    def records(self) -> DataFrame:
        """A row per request, in (task, document, request, repeat) order: token ids (lists), raw float32 logprobs in
        nats (arrays), `sum_logprob` (nats, correctly rounded), finish reason, tokens cut from the prompt's left.

        Raises `ConfigError` for an lm-eval folder or a baseline, which hold no records.
        """
        run = self.run
        if run.kind != "run":
            raise ConfigError(
                f"{run.source}: {run.kind} files hold no records; `samples` and `metrics` have what they say"
            )
        records = read_records((run.records or run.source) / RECORDS)
        names = [item.name for item in fields(RequestRecord)]
        rows = [(*(getattr(record, name) for name in names), run.items[record.key].sum_logprob) for record in records]
        return _frame(rows, (*names, "sum_logprob"))

    def value(self, metric: str, task: str | None = None, filter: str | None = None) -> float:
        """One metric's value, in its own units. Raises `ConfigError` unless exactly one fits the given names."""
        keys = [
            key for key in self.run.results
            if key[1] == metric and task in (None, key[0]) and filter in (None, key[2])
        ]  # fmt: skip
        if len(keys) != 1:
            names = "; ".join(", ".join(key) for key in (keys or self.run.results))
            how_many = f"{len(keys)} results are called so" if keys else "no result is called so"
            raise ConfigError(f"value({metric!r}): {how_many}; there are (task, metric, filter): {names}")
        return self.run.results[keys[0]][0]

    def _lines(self) -> Iterator[Line]:
        if self.run.kind == "baseline":
            rows = [[*key, value_text(value)] for key, (value, _) in self.run.results.items()]
            yield Sheet("Metrics", ("Task", "Metric", "Filter", "Value"), rows, (0, 1, 2))
        else:
            yield results_table(self._data.results)
        if self.run.kind == "run" and "counts" in self.manifest:
            yield from summary_lines(self.run.manifest)
        yield from cut_lines(self.run)
        yield str(self.path)
        if self.digest is not None:
            yield f"digest: {self.digest}"


def load_run(path: str | Path) -> Results:
    """A run's folder, an lm-eval output folder, a baseline file; or `latest`, `FOLDER:latest`, `SWEEP:3`.

    Raises `ConfigError` (the file at fault, and the cure) for what is missing, unfinished, damaged or edited.
    """
    return Results(load_data(path))


def cut_values(run: Run, key: ScoreKey) -> tuple[float, float | None]:
    """`cut` and `value_finished` of a metric, as the frame of metrics has them; NaN for a metric that the run lacks."""
    cut = cut_of(run, key)
    value, _ = run.results.get(key, (math.nan, None))
    return (0.0, value) if cut is None else (cut.count / cut.total, cut.finished)


def samples_frame(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], cut: Mapping[str, Collection[int]] | None = None
) -> DataFrame:
    """A row per task, document and filter: prompts, responses, what counted as the answer, and a column for each metric
    (of a nullable type if a task has no such metric). `prompts`, `responses` and `answers` are lists, one entry per
    request; `doc` is the dataset's row, a dict; `cut` is whether the length limit ended one of the responses.

    samples: each task's rows, as lm-eval's files have them. cut: `Run.cut`."""
    rows, scores = [], []
    for task, own in samples.items():
        for row in own:
            calls = row.get("arguments") or {}
            prompts = [next(iter(words.values()), None) for words in calls.values()] if isinstance(calls, dict) else []
            texts = (row.get("target"), prompts, row.get("resps"), row.get("filtered_resps"), row.get("doc"))
            ended = row["doc_id"] in (cut or {}).get(task, ())
            hashes = (row.get("doc_hash"), row.get("prompt_hash"))
            rows.append((task, row["doc_id"], row["filter"], *texts, *hashes, ended))
            scores.append({name: row[name] for name in row.get("metrics") or () if name in row})
    frame = _frame(rows, (*SAMPLES, "cut"))
    for name in dict.fromkeys(name for own in scores for name in own):
        frame[name] = _scores([own.get(name) for own in scores])
    return frame.sort_values(["task", "doc_id"], kind="stable", ignore_index=True)


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
