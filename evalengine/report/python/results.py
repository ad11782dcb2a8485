"""`evalengine.load_run`, `compare` and `gate`: a finished run with its frames (metrics, samples, records), and the
commands' comparisons and verdicts, for Python. Each is shown as the command shows it. pandas is imported when a frame
is requested."""

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
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.comparability import are_models
from evalengine.report.compare.compare import LEVELS, Comparison, compared
from evalengine.report.compare.item_differences import KINDS
from evalengine.report.compare.report import report as comparison_lines
from evalengine.report.compare.report import value_text
from evalengine.report.gate.gate import gate as judge
from evalengine.report.gate.report import Report, report_lines
from evalengine.report.html.markup import Node, markup, tag
from evalengine.report.leaderboard.compose import Board, board
from evalengine.report.leaderboard.formats import board_json, board_lines
from evalengine.report.leaderboard.sheets import verdict as board_verdict
from evalengine.report.read.groups import group_documents, groups_first
from evalengine.report.read.lm_eval import requests_of
from evalengine.report.read.load import load_data
from evalengine.report.read.load import load_run as read_run
from evalengine.report.read.run import Run, RunData, Samples, ScoreKey, by_name
from evalengine.report.run_table import results_table, summary_lines
from evalengine.report.stats.metric_interval import cut_lines, cut_of
from evalengine.report.stats.paired import PairedResult
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
        lines = (_table(line) if isinstance(line, Sheet) else tag("p", line) for line in self._lines())
        return markup(tag("div", *lines))


def _table(sheet: Sheet) -> Node:
    sides = ["left" if n in sheet.words else "right" for n in range(len(sheet.head))]

    def row(name: str, cells: Sequence[str]) -> Node:
        return tag("tr", *(tag(name, printable(cell), align=side) for cell, side in zip(cells, sides, strict=True)))

    return tag("table", tag("thead", row("th", sheet.head)), tag("tbody", *(row("td", cells) for cells in sheet.rows)))


class Results(Shown):
    """A finished run: a folder of ours, an output folder of lm-eval, or a baseline.

    `metrics`, `samples` and `records` are pandas frames, made on first use. All files were checked
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
             else group_documents(run, key), *_cut(run, key).values())
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

    Raises `ConfigError` (the file at fault, and the fix) for what is missing, unfinished, damaged or edited.
    """
    return Results(load_data(path))


def _cut(run: Run, key: ScoreKey, end: str = "") -> dict[str, float | None]:
    """`cut` and `value_finished` of a metric, as the frame of metrics has them; NaN for a metric that the run lacks."""
    cut = cut_of(run, key)
    value, _ = run.results.get(key, (math.nan, None))
    share, finished = (0.0, value) if cut is None else (cut.count / cut.total, cut.finished)
    return {f"cut{end}": share, f"value_finished{end}": finished}


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
            prompts = [next(iter(words.values()), None) for words in requests_of(row)]
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


Named = str | Path | Results  # what stands for a run
DIFFERENCE = ("task", "doc_id", "request_index", "repeat", "what", "cause")  # columns of a request that differs


class Compared(Shown):
    """Two runs compared: `verdict` is IDENTICAL, SAME TOKENS or DIFFERENT, or for different models which is better."""

    def __init__(self, comparison: Comparison | Board, same: bool) -> None:
        self.comparison = comparison
        self.same = same  # whether the runs agree at the requested level; False for different models

    @property
    def verdict(self) -> str:
        """One word for runs; a sentence for models."""
        return self.comparison.verdict if isinstance(self.comparison, Comparison) else board_verdict(self.comparison)

    def to_json(self) -> dict[str, Any]:
        """The content of `compare --json`, as plain values."""
        comparison = self.comparison
        return comparison_json(comparison) if isinstance(comparison, Comparison) else board_json(comparison)

    @cached_property
    def metrics(self) -> DataFrame:
        """A row per metric, or for models per metric and model; the values are in the metric's own units.

        `ci_low` and `ci_high`: 95 % interval, of the difference of two runs, or of a model's value. `cut` and
        `value_finished` as in a run's `metrics`, for two runs one of each (`cut_a`, `cut_b`).
        """
        rows = self.to_json()["metrics"]
        if isinstance(self.comparison, Comparison):
            return _frame([_of_pair(row, self.comparison) for row in rows])
        runs = self.comparison.runs
        scores = ((row, score, run) for row in rows for score, run in zip(row["scores"], runs, strict=True) if score)
        return _frame([_of_model(*one) for one in scores])

    @cached_property
    def differences(self) -> DataFrame:
        """A row per request that differs, with its cause and a boolean column for each kind of difference. Raises
        `ConfigError` for different models: they have none."""
        if not isinstance(self.comparison, Comparison):
            raise ConfigError("differences: these are different models, whose requests are not held side by side; "
                              "compare(a, b, allow=True) does that")  # fmt: skip
        rows = comparison_json(self.comparison)["differences"]
        kinds = [{**row, **{kind: kind in row["in"] for kind in KINDS}} for row in rows]
        frame = _frame(kinds, [*DIFFERENCE, *KINDS])
        return frame.astype({**dict.fromkeys(DIFFERENCE[1:4], "int64"), **dict.fromkeys(KINDS, "bool")})

    def _lines(self) -> Iterator[Line]:
        comparison = self.comparison
        yield from comparison_lines(comparison) if isinstance(comparison, Comparison) else board_lines(comparison)


class Gated(Shown):
    """A gate's judgement: `passed`, the `verdict` (pass, fail or inconclusive), and its `checks`.

    Of a folder of several runs the verdict is the worst of theirs, and `runs` has the judgement of each.
    """

    def __init__(self, report: Report) -> None:
        self.report = report

    @property
    def verdict(self) -> str:
        """pass, fail or inconclusive: some check could not see the loss that the policy names."""
        return self.report.verdict

    @property
    def passed(self) -> bool:
        """Whether the command's exit code would be 0."""
        return self.report.exit_code == 0

    @property
    def runs(self) -> list[Gated]:
        """The judgement of each run of a folder of several; [] where one run was judged."""
        return [Gated(report) for report in self.report.reports]

    @cached_property
    def checks(self) -> DataFrame:
        """A row per check: rule, task, name, status, message, details and cautions (one text each, a line for each),
        detects, ...; of several runs also `run`."""
        of_run = [{"run": one.run} if self.report.reports else {} for one in self.report.each]
        return _frame([
            {**own, **vars(check), "details": "\n".join(check.details), "cautions": "\n".join(check.cautions)}
            for own, one in zip(of_run, self.report.each, strict=True) for check in one.checks
        ])  # fmt: skip

    def _lines(self) -> Iterator[Line]:
        yield from (line.plain for line in report_lines(self.report))


def compare(a: Named, b: Named, *, level: str | None = None, allow: bool = False) -> Compared:
    """Are two runs the same; if not, where, and why? Of different models: which is better?

    a, b: what `load_run` takes, or what it and `evaluate` return. level: what must be the same for `.same`: bitwise
    (default), tokens or answers. allow: unlike runs, different models too, on the requests that they share.

    Raises `ConfigError` for runs that cannot be read, are not comparable, or share no request.
    """
    problems = [] if level in (None, *LEVELS) else [f"level={level}: must be one of {', '.join(LEVELS)}"]
    runs = []
    for named in (a, b):
        try:
            runs.append(named.run if isinstance(named, Results) else read_run(named))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    if level is None and not allow and are_models(runs):
        return Compared(board(runs), same=False)
    comparison = compared(runs[0], runs[1], allow)
    return Compared(comparison, comparison.within(level or LEVELS[0]))  # type: ignore[arg-type]  # checked above


def gate(
    baseline: Named, run: Named, policy: str | Path = "bitwise", *, base: str | None = None, noise: Named | None = None
) -> Gated:
    """May this change be merged: is `run` as good as `baseline`, by a policy's name or file?

    run: also an experiment's folder, or one of several runs, each of which is judged separately.
    base: a git revision that the baseline file is taken from. noise: a run of the baseline's configuration in fast mode
    under another schedule, with which the run's flips are compared.

    Raises `ConfigError` with all reasons where the gate cannot judge: a bad policy, runs that cannot be read or are
    not comparable.
    """
    report = judge(_place(baseline), _place(run), str(policy), base, None if noise is None else _place(noise))
    if report.verdict == "error":
        raise ConfigError([f"gate: {f'{one.run}: ' if report.reports else ''}{one.trouble}: {problem}"
                           for one in report.each for problem in one.problems])  # fmt: skip
    return Gated(report)


def _of_pair(row: dict[str, Any], c: Comparison) -> dict[str, Any]:
    """A metric's columns, of its JSON."""
    paired = row.pop("paired") or dict.fromkeys(field.name for field in fields(PairedResult))
    del row["cut"]
    paired["cautions"] = "; ".join(paired["cautions"] or ())
    key = (row["task"], row["metric"], row["filter"])
    return {**row, **paired, **_cut(c.a, key, "_a"), **_cut(c.b, key, "_b")}


def _of_model(row: dict[str, Any], score: dict[str, Any], run: Run) -> dict[str, Any]:
    """The columns of a model's value of a metric, of its JSON."""
    key = (row["task"], row["metric"], row["filter"])
    for names, name in ((("ci_low", "ci_high"), "interval"), (("rank_best", "rank_worst"), "ranks")):
        score |= dict(zip(names, score.pop(name) or (None, None), strict=True))
    return {**by_name(key), "documents": row["documents"], **score, "cautions": "; ".join(score["cautions"]),
            **_cut(run, key)}  # fmt: skip


def _place(named: Named) -> str | Path:
    return named.path if isinstance(named, Results) else named


def _frame(rows: Sequence[Any], columns: Sequence[str] | None = None) -> DataFrame:
    """A frame of these rows, in which cells that are lists stay lists."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=None if columns is None else list(columns))
