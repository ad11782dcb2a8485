"""The scores of one task and model over time, on the list of runs: a point and its interval for each run."""

from __future__ import annotations

from collections.abc import Sequence

from evalengine.report.html.markup import Markup, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import figure, row_of
from evalengine.report.html.plots import series
from evalengine.report.read.index import FINISHED, Entry, RunMetric
from evalengine.report.stats.mean_interval import reported_interval

LEAST = 3  # runs that make a trend
MOST = 6  # trends that are drawn: those of the most runs
POINTS = 40  # newest runs of a trend


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


def _trend(entries: Sequence[Entry]) -> Markup:
    first = entries[-1].metrics[0]
    same = [(e, m) for e in entries for m in e.metrics if (m.name, m.filter) == (first.name, first.filter)]
    points = [(m.value, interval_of(m), f"{e.started:%Y-%m-%d %H:%M}: {m.value:.4f}, {e.folder.name}") for e, m in same]
    about = tag("span", f"{first.name}, {len(points)} runs")
    return figure(f"{entries[0].task} on {entries[0].model}", series(points, "runs, oldest first", first.name), about)
