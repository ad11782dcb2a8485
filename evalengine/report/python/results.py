"""`evalengine.load_run`: a finished run for Python, with its frames; shown as the command shows it."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from evalengine.errors import ConfigError
from evalengine.plain_text import printable
from evalengine.report.compare.metric_tables import value_text
from evalengine.report.html.markup import Markup, tag
from evalengine.report.python.frames import metrics_frame, records_frame, samples_frame
from evalengine.report.read.lm_eval_folder import newest
from evalengine.report.read.load import load_run as read_run
from evalengine.report.read.run import Run
from evalengine.report.stats.metric_interval import cut_lines
from evalengine.report.terminal.run_table import results_table, summary_lines
from evalengine.report.terminal.tables import print_lines
from evalengine.util.sheet import Line, Sheet

if TYPE_CHECKING:
    from pandas import DataFrame


class Shown(ABC):
    """An object that is shown as the command shows it."""

    @abstractmethod
    def _lines(self) -> Iterator[Line]:
        """Everything to show, in order; a string is one line."""

    def __repr__(self) -> str:
        return as_text(self._lines())

    def _repr_html_(self) -> str:
        return as_html(self._lines())


def as_text(lines: Iterable[Line]) -> str:
    """The lines as a terminal without colours shows them, without spaces at their ends."""
    console = Console(file=io.StringIO(), soft_wrap=True, color_system=None)
    with console.capture() as captured:
        print_lines(lines, console)
    return "\n".join(line.rstrip() for line in captured.get().split("\n")).strip("\n")


def as_html(lines: Iterable[Line]) -> Markup:
    """The lines as markup: tables, and a paragraph for each line. Texts from outside are escaped."""
    return tag("div", *(_table(line) if isinstance(line, Sheet) else tag("p", line) for line in lines))


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

    def __init__(self, run: Run) -> None:
        self.run = run

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
        """A row per task, metric and filter (`frames.metrics_frame`)."""
        return metrics_frame(self.run)

    @cached_property
    def samples(self) -> DataFrame:
        """A row per task, document and filter (`frames.samples_frame`). Raises `ConfigError` for a baseline."""
        return samples_frame(self._texts[1], self.run.cut)

    def samples_of(self, task: str) -> DataFrame:
        """The samples of one task, with the columns of its own metrics alone."""
        samples = self._texts[1]
        if task not in samples:
            raise ConfigError(f"samples_of({task!r}): no task is called so; there are {', '.join(samples)}")
        return samples_frame({task: samples[task]}, self.run.cut)

    @cached_property
    def records(self) -> DataFrame:
        """A row per request (`frames.records_frame`). Raises `ConfigError` where there are no records."""
        return records_frame(self.run)

    @cached_property
    def _texts(self) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
        """(lm-eval's results, task -> its samples). Raises `ConfigError` for a baseline, which holds no texts."""
        if self.run.kind == "baseline":
            raise ConfigError(f"{self.path}: a baseline holds no texts; load the run's folder")
        return newest(self.path)

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
            yield _metrics_table(self.run)
        else:
            yield results_table(self._texts[0])
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
    return Results(read_run(path))


def _metrics_table(run: Run) -> Line:
    rows = [[*key, value_text(value)] for key, (value, _) in run.results.items()]
    return Sheet("Metrics", ("Task", "Metric", "Filter", "Value"), rows, (0, 1, 2))
