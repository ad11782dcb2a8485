"""A run's metrics on its page: what was asked for first, the tasks of large groups folded; and why a metric has no
interval, or one that may be too narrow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from evalengine.report.html.markup import Child, Markup, tag
from evalengine.report.html.page import Page
from evalengine.report.html.parts import details, table
from evalengine.report.html.plots import interval, percent
from evalengine.report.numbers import counted
from evalengine.report.read.groups import group_documents, in_groups, members
from evalengine.report.read.lm_eval_samples import ROLLING
from evalengine.report.read.load import RunData
from evalengine.report.read.run import ScoreKey
from evalengine.report.stats.metric_interval import cut_of, interval_cautions, metric_interval

MOST = 12  # rows of one table: of more, each group's tasks are folded
ABOUT = (
    "Intervals are over documents, or clusters of related ones: Wilson's for scores in [0, 1], Student's t for others; "
    "of perplexities by way of the nats by word or byte; of groups from their tasks' own. Stderr is lm-eval's."
)
RIGHT = ("Value", "Stderr", "Documents", "Cut", "Cut ones", "Finished", "n-shot")
Row = tuple[ScoreKey, list[Child]]


def interval_note(data: RunData, has_interval_by_key: Mapping[ScoreKey, bool], about: str) -> str:
    """The note under the metrics.

    has_interval_by_key: whether each metric has an interval. about: how the intervals were made.
    """
    reasons: dict[str, list[ScoreKey]] = {}
    for key, has_interval in has_interval_by_key.items():
        if not has_interval:
            reasons.setdefault(_why(data, key), []).append(key)
    parts = [about] if any(has_interval_by_key.values()) else []
    for key in [key for key, has_interval in has_interval_by_key.items() if has_interval]:
        parts += [f"{next(_named([key], data))}: {why}." for why in interval_cautions(data.run, key)]
    parts += [f"No interval for {', '.join(_named(keys, data))}: {why}." for why, keys in reasons.items()]
    return " ".join(parts)


def _why(data: RunData, key: ScoreKey) -> str:
    documents, scores = len(data.samples.get(key[0], {})), list(data.run.scores.get(key, {}).values())
    if key[0] not in data.samples:
        return "it is made of several tasks' results"
    if documents < 2:
        return "one document says nothing of others"
    if not scores and data.kinds.get(key[0]) == ROLLING:
        if key in data.run.weighted:
            return "its documents do not differ in it"
        return "the run does not record what each document adds to it"
    if not scores:
        return "it is no mean of numbers that the documents have"
    if not all(map(math.isfinite, scores)):
        return "a document's number is NaN or infinite"
    if len(set(scores)) == 1:
        return "all documents have the same number"
    return "it is no mean of the documents' numbers"


def _named(keys: Sequence[ScoreKey], data: RunData) -> Iterator[str]:
    for task, metric, _ in dict.fromkeys((k[0], k[1], "") for k in keys):
        yield f"{task} {metric}" if len(data.tasks) > 1 else metric


def metrics_section(page: Page, data: RunData) -> None:
    """Every metric with its interval."""
    keys = [(key, depth) for name, depth in _in_order(data) for key in data.run.results if key[0] == name]
    rows = [(key, _row(data, key, depth)) for key, depth in keys]
    head = ["Task", "Metric", "Value", "95 % interval", "0 to 1", "Stderr", "Documents"]
    head += ["Cut", "Cut ones", "Finished", "Filter", "n-shot"]
    # One task needs no name; runs of lm-eval may lack some of these columns, and mostly nothing is cut.
    names = {key[0] for key, _ in rows}
    filled = [place for place in range(len(head)) if any(row[place] != "" for _, row in rows)]
    filled = filled if len(names) > 1 else [place for place in filled if place]
    about = ABOUT + (" Cut: answers that the length limit ended." if data.run.cut else "")
    has_interval = {key: metric_interval(data.run, key) is not None for key, _ in rows}
    parts = _tables(data, head, filled, rows)
    page.section("metrics", "Metrics", *parts, note=interval_note(data, has_interval, about))


def is_share(data: RunData, key: ScoreKey) -> bool:
    """Whether a metric is a share of documents, or a mean of such shares."""
    parts = [part for part, _ in members(data.run, key)] or [key]
    return all(data.binary(part) for part in parts)


def _tables(data: RunData, head: Sequence[str], filled: Sequence[int], rows: Sequence[Row]) -> Iterator[Markup]:
    """One table, or the groups and the tasks in no group, and each group's own tasks folded below them."""
    groups = data.run.groups
    leaf = {task for tasks in groups.values() for task in tasks if task not in groups}
    if len(rows) <= MOST or not leaf:
        yield _table(head, filled, [row for _, row in rows])
        return
    yield _table(head, filled, [row for key, row in rows if key[0] not in leaf])
    for name, tasks in groups.items():
        own = [row for key, row in rows if key[0] in tasks and key[0] not in groups]
        if own:
            yield details(f"{name}: {counted(len({*tasks} - {*groups}), 'task')}", _table(head, filled, own))


def _table(head: Sequence[str], filled: Sequence[int], rows: Sequence[list[Child]]) -> Markup:
    titles = [head[place] for place in filled]
    right = [place for place, title in enumerate(titles) if title in RIGHT]
    return table(titles, [[row[place] for place in filled] for row in rows], numbers=right)


def _in_order(data: RunData) -> list[tuple[str, int]]:
    """(name, depth) of everything with results, groups above their own; in a circle of groups, as the results are."""
    listed = list(in_groups(data.results))
    missing = [(key[0], 0) for key in data.run.results if key[0] not in {name for name, _ in listed}]
    return [*listed, *dict.fromkeys(missing)]


def _row(data: RunData, key: ScoreKey, depth: int) -> list[Child]:
    value, error = data.run.results[key]
    arrow = {True: "up", False: "down", None: None}[data.run.higher_is_better.get(key)]
    bounds, cut = metric_interval(data.run, key), cut_of(data.run, key)
    drawn = interval(value, *bounds, (0.0, 1.0)) if bounds and is_share(data, key) else ""
    documents = group_documents(data.run, key) or len(data.samples.get(key[0], {}))
    shortened: list[Child] = ["", "", ""]
    if cut is not None:
        finished = "" if cut.finished is None else f"{cut.finished:.4f}"
        shortened = [percent(cut.count / cut.total), f"{cut.cut:.4f}", finished]
    inner = depth if key[0] in data.run.groups else 0
    return [
        tag("span", key[0], class_=f"depth{min(inner, 3)}") if inner else key[0],
        tag("span", key[1], class_=arrow),
        f"{value:,.4f}",
        tag("span", f"{bounds[0]:.4f} to {bounds[1]:.4f}", class_="whole") if bounds else "",
        drawn,
        "" if error is None else f"{error:.4f}",
        f"{documents:,}",
        *shortened,
        key[2],
        str(data.results.get("n-shot", {}).get(key[0], "")),
    ]
