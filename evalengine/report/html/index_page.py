"""`index.html` of a folder of runs: a row for each run and task, which opens what is known of it and its page; and the
scores of each task and model over time."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evalengine.errors import EvalEngineError
from evalengine.records.evidence import PAGE
from evalengine.report.html.markup import Node
from evalengine.report.html.page import Page
from evalengine.report.html.parts import Column, figure, grid, row_of, tiles
from evalengine.report.numbers import in_range
from evalengine.report.read.index import DAMAGED, FINISHED, NEWEST, UNFINISHED, Entry, RunMetric, entries
from evalengine.report.read.names import INDEX
from evalengine.report.stats.metric_interval import reported_interval

LEAST = 3  # runs that make a trend
MOST = 6  # trends that are drawn: those of the most runs
POINTS = 40  # newest runs of a trend
GENERATOR, HEAD = b'name="generator" content="evalengine ', 8192  # a text in the first HEAD bytes of each page of ours
NOTE = (
    "Newest first. A row opens all metrics, the command and the run's page; tick two rows or more for the command that "
    "compares them."
)
BY_STDERR = "By the standard error, which takes documents as unrelated"
BASELINE = "Against the latest baseline of the task, in this folder or the one above it"
COLUMNS = (
    Column("Date", "text", "minmax(11ch, 17ch)"),  # of a phone it takes what the others leave: no score is cut
    Column("Experiment", "text", "minmax(8ch, 1fr)", phone=False, choose=True),
    Column("Model", "text", "minmax(8ch, 1fr)", phone=False, choose=True),
    Column("Task", "text", "minmax(8ch, 1.2fr)", choose=True),
    Column("Metric", "text", "minmax(8ch, 1.4fr)", phone=False, about="The first metric of each task"),
    Column("Score", "number", "8ch", digits=4),
    Column("95 %", "text", "14ch", phone=False, about=BY_STDERR),
    Column("Verdict", "text", "minmax(9ch, 2.2fr)", phone=False, about=BASELINE),
    Column("Cut", "number", "6ch", digits=0, phone=False, about="Answers of the run that the length limit ended"),
    Column("Digest", "mono", "10ch", phone=False),
    Column("Numerics", "text", "8ch", phone=False, choose=True),
    Column("Changed", "text", "minmax(8ch, 2fr)", phone=False, about="Settings that differ within a task and model"),
)


def interval_of(metric: RunMetric) -> tuple[float, float] | None:
    """The 95 % interval by the standard error, which takes documents as unrelated."""
    return reported_interval(metric.value, metric.stderr, metric.documents)


def trends_section(page: Page, listed: Sequence[Entry]) -> None:
    """A plot for each task and model with enough dated runs; no section where none has. listed: the newest first."""
    runs: dict[tuple[str, str], list[Entry]] = {}
    for entry in listed:
        if entry.state == FINISHED and entry.started is not None and entry.metrics:
            runs.setdefault((entry.task, entry.model), []).append(entry)
    often = sorted((own for own in runs.values() if len(own) >= LEAST), key=len, reverse=True)[:MOST]
    if often:
        drawn = [_trend(own[:POINTS][::-1]) for own in often]
        note = "The first metric of each run, oldest at the left; runs may differ in documents and settings."
        page.section("trends", "Scores over time", row_of(*drawn), note=note)


def _trend(entries: Sequence[Entry]) -> Node:
    first = entries[-1].metrics[0]
    same = [(e, m) for e in entries for m in e.metrics if (m.name, m.filter) == (first.name, first.filter)]
    points = [(m.value, interval_of(m), f"{e.started:%Y-%m-%d %H:%M}: {m.value:.4f}, {e.folder.name}")
              for e, m in same if in_range(m.value)]  # fmt: skip
    drawing = {"is": "series", "points": points, "x": "runs, oldest first", "y": first.name}
    return figure(f"{entries[0].task} on {entries[0].model}", drawing, f"{first.name}, {len(points)} runs")


def write_index(root: Path, target: Path | None = None) -> tuple[Path, int]:
    """Writes the list of the runs in `root` (default: there), whole or not at all; returns (file, runs).

    Raises `EvalEngineError` if the folder cannot be read or the disk refuses.
    """
    path = target or root / INDEX
    try:
        if target is None and not _is_ours(path):
            raise EvalEngineError(f"{path}: not a list of runs that evalengine wrote; it stays as it is (-o FILE takes "
                                  "another place)")  # fmt: skip
        listed = entries(root)
        content = index_page(root, listed, path.parent).render().encode("utf-8")
        scratch = path.parent / f".{path.name}.{os.getpid()}.partial"  # other runs may write the list at this moment
        try:
            scratch.write_bytes(content)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise EvalEngineError(f"could not write {path}: {error.strerror or error}; free the place, or name another "
                              "file (-o FILE)") from error  # fmt: skip
    return path, len({entry.folder for entry in listed})


def _is_ours(path: Path) -> bool:
    """Whether writing there loses nothing: an output folder may hold a user's own pages."""
    if not path.exists():
        return True
    with open(path, "rb") as file:
        return GENERATOR in file.read(HEAD)


def index_page(root: Path, listed: Sequence[Entry], page_folder: Path) -> Page:
    """The list as a page. page_folder: the page's folder, for its links."""
    page = Page(f"Runs in {root.resolve().name}", eyebrow="Runs", scripts=("index.js",))
    folders = {entry.folder: entry for entry in listed}
    states = [entry.state for entry in folders.values()]
    figures: list[tuple[str, str, str | None]] = [("Runs", f"{len(folders):,}", None)]
    newest = next((entry for entry in listed if entry.started), None)
    if newest is not None and newest.started is not None:
        who = f"{newest.started:%H:%M} UTC, {newest.task} on {newest.model}"
        figures.append(("Newest", f"{newest.started:%Y-%m-%d}", who))
    figures += [
        (name.capitalize(), f"{states.count(name):,}", None) for name in (UNFINISHED, DAMAGED) if name in states
    ]
    page.lead(tiles(figures))
    if not listed:
        page.section("runs", "Runs", note="There is no run in this folder yet.")
        return page
    rows = [_row(root, entry) for entry in listed]
    items = [_item(entry, page_folder) for entry in listed]
    body = grid(page, "runs", COLUMNS, rows, detail="run", items=items, pick="compare")
    page.data("folders", [shlex.quote(str(entry.folder)) if entry.state == FINISHED else None for entry in listed])
    most = f" The newest {NEWEST:,} runs." if len(folders) >= NEWEST else ""
    page.section("runs", "Runs", body, note=f"{NOTE}{most}")
    trends_section(page, listed)
    return page


def _row(root: Path, entry: Entry) -> list[Any]:
    first = entry.metrics[0] if entry.metrics else None
    date = f"{entry.started:%Y-%m-%d %H:%M}" if entry.started else ""
    task = entry.task or entry.folder.name
    metric = "" if first is None else first.name + (f" {first.filter}" if first.filter not in ("none", "") else "")
    value = None if first is None or first.value != first.value or abs(first.value) == float("inf") else first.value
    verdict = entry.verdict if entry.state == FINISHED else f"{entry.state}: {entry.problem}"
    between = _between(first) if first is not None and value is not None else ""
    experiment, *_ = (*Path(os.path.relpath(entry.folder, root)).parts[:-1], "")
    first_cells = [date, experiment, entry.model, task, metric, value, between, verdict]
    return [*first_cells, entry.cut or None, entry.digest[:10], entry.numerics, entry.changed]


def _item(entry: Entry, page_folder: Path) -> dict[str, Any]:
    """A row for index.js. The link is a quoted relative path: it can only lead to a file."""
    page = entry.folder / PAGE
    href = quote(os.path.relpath(page, page_folder)) if page.is_file() else None
    facts = [
        ("State", f"{entry.state}: {entry.problem}" if entry.problem else entry.state),
        ("Date", f"{entry.started:%Y-%m-%d %H:%M:%S} UTC" if entry.started else ""),
        ("Model", entry.model),
        ("Run", entry.run_id),
        ("Command", entry.command or ""),
        ("Digest", entry.digest),
        ("Numerics", entry.numerics),
        ("Changed", entry.changed),
        ("Cut", f"{entry.cut:,} answers of the run ended at the length limit" if entry.cut else ""),
        ("Baseline", f"{entry.baseline}: {entry.verdict}" if entry.baseline else ""),
        ("Folder", os.path.relpath(entry.folder, page_folder)),
    ]
    return {
        "title": entry.task or entry.folder.name,
        "href": None if href is None else f"./{href}",
        "facts": [[name, value] for name, value in facts if value],
        "metrics": [[m.name, m.filter, _number(m.value), _between(m)] for m in entry.metrics],
        "parts": [[name, m.name, m.filter, _number(m.value), _between(m)] for name, m in entry.parts],
    }


def _between(metric: RunMetric) -> str:
    bounds = interval_of(metric)
    return "" if bounds is None else f"{bounds[0]:.4f} to {bounds[1]:.4f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
