"""Parts of sections: tables, facts, tiles, figures, where a run comes from, and the grid for thousands of rows.
Each is an element or a component that page.js, plots.js or grid.js builds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from evalengine.report.html.markup import Node, tag
from evalengine.report.html.page import Page
from evalengine.report.numbers import in_range
from evalengine.report.read.run import Run, provenance
from evalengine.util.sheet import Interval, Line, Sheet

Kind = Literal["text", "mono", "number", "mark"]


@dataclass(frozen=True)
class Column:
    """One column of a grid. A cell is a str, a number or None; in a `mark`, True (good), False (bad) or None."""

    title: str
    kind: Kind = "text"
    width: str = "1fr"  # in CSS grid-template-columns: "6ch", "minmax(12ch, 2fr)"
    digits: int | None = None  # a number's digits after the point
    phone: bool = True  # shown on a narrow screen too
    choose: bool = False  # whether a filter offers its few values
    marks: tuple[str, str] = ("yes", "no")  # the words for True and False
    about: str = ""  # what it holds: its heading's tooltip
    several: bool = False  # left out where all rows are alike, as where they are empty


def table(head: Sequence[str], rows: Iterable[Sequence[Node]], numbers: Sequence[int] = (), **attributes: Any) -> Node:
    """A plain table for tens of rows. numbers: the columns (from 0) whose cells are numbers, set to the right.

    attributes: `best`, the (row, column) of bold cells; `about`, what a column means, by its title.
    """
    return {"is": "sheet", "head": head, "rows": list(rows), "numbers": list(numbers), **attributes}


def matrix(labels: Sequence[str], cell: Callable[[int, int], Node]) -> Node:
    """A table of every pair, numbered from 1. cell(row, column): see `cell`."""
    numbers = range(1, len(labels) + 1)
    rows = [[[n, tag("span", labels[n - 1], class_="setting")], *(cell(n, m) for m in numbers)] for n in numbers]
    return table(["", *map(str, numbers)], rows, look="matrix")


def cell(look: str, *lines: str | None) -> Node:
    """A cell of a matrix, its first line bold."""
    first, *others = (line for line in lines if line)
    return tag("span", tag("b", first), *(tag("span", line) for line in others), class_=f"cell {look}".strip())


def sheet_table(sheet: Sheet) -> Node:
    """A sheet as a table, its best cells bold; before a column of intervals stands one that draws them."""
    head, columns, places = list[str](), list[Sequence[Node]](), list[int]()
    for n, title in enumerate(sheet.head):
        cells = [row[n] for row in sheet.rows]
        if any(isinstance(cell, Interval) for cell in cells):
            head.append("")
            columns.append(_drawn(cells))
        places.append(len(head))
        head.append(title)
        columns.append(cells)
    numbers = [place for n, place in enumerate(places) if n not in sheet.words]
    best = sorted((row, places[n]) for row, n in sheet.best)
    return table(head, zip(*columns, strict=True), numbers, best=best, about=sheet.about)


def _drawn(cells: Sequence[str]) -> list[Node]:
    """Each `Interval` of a column as a drawing, on one scale for each unit; None for other cells, and where an end is
    unknown or not `in_range`."""
    scales: dict[str, list[float]] = {}
    known = [cell if isinstance(cell, Interval) and all(map(in_range, cell.ends)) else None for cell in cells]
    for cell in filter(None, known):
        scales.setdefault(cell.unit, []).extend(cell.ends)
    return [None if cell is None else interval(*cell.ends, _bounds(scales[cell.unit], cell.rule), cell.rule)
            for cell in known]  # fmt: skip


def _bounds(ends: Sequence[float], rule: float | None) -> tuple[float, float]:
    """The ends of a scale that holds all of these. rule: its middle."""
    low, high = min(ends), max(ends)
    if rule is not None:
        reach = max(abs(low - rule), abs(high - rule)) or 1.0
        return rule - reach, rule + reach
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


def lines_of(lines: Iterable[Line]) -> Iterator[Node]:
    """A command's output: a paragraph for each line, and tables."""
    return (sheet_table(line) if isinstance(line, Sheet) else tag("p", line) for line in lines)


def facts(pairs: Iterable[tuple[str, Node]]) -> Node:
    """Names and values, one under the other."""
    return {"is": "facts", "pairs": [pair for pair in pairs if pair[1] is not None]}


def beginning(text: str, room: int) -> str:
    """A beginning of the text that surely takes no more than `room` bytes of UTF-8."""
    return text[: room if text.isascii() else room // 4]


def tiles(pairs: Iterable[tuple[str, Node, Node]]) -> dict[str, Any]:
    """Large figures side by side: (label, figure, a word below or None)."""
    return {"is": "tiles", "tiles": list(pairs)}


def verdict(word: str, sentence: Node, good: bool | None) -> dict[str, Any]:
    """The verdict, which is read first. good: True, False, or None for neither."""
    return {"is": "verdict", "word": word, "sentence": sentence, "good": good}


def listed(lines: Iterable[Node], kind: str = "plain") -> Node:
    """Sentences as a list."""
    return tag("ul", *(tag("li", line) for line in lines), class_=kind)


def figure(title: str, drawing: Node, note: Node = None) -> Node:
    """A plot (see plots.js) under its title."""
    return tag("figure", tag("figcaption", tag("strong", title), note and tag("span", note)), drawing)


def row_of(*children: Node) -> Node:
    """Figures side by side where there is room: two and two if they are two or four, else in threes."""
    return tag("div", *children, class_="row pairs" if len(children) in (2, 4) else "row")


def details(summary: Node, *children: Node, **attributes: str | bool) -> Node:
    """Content that is folded until it is opened."""
    return tag("details", tag("summary", summary), *children, **attributes)


def fold(summary: str, *children: Node, alone: bool = False) -> Node:
    """Content that is open on a wide screen and folded on a narrow one, where stacked plots would hide what follows.

    alone: whether the section, which has a title, holds nothing else: a wide screen then shows no summary."""
    return details(summary, *children, class_="fold alone" if alone else "fold", open=True)


def interval(value: float, low: float, high: float, bounds: tuple[float, float], rule: float | None = None) -> Node:
    """A value with its interval on a scale shared by a table's rows: drawn small, for a cell.

    What lies outside `bounds` is drawn at the edge. rule: a line at this x.
    """
    return {"is": "interval", "value": value, "low": low, "high": high, "bounds": bounds, "rule": rule}


def percent(share: float) -> str:
    """A share of 1 with one digit: 12.5 %."""
    return f"{share * 100:.1f} %"


def grid(
    page: Page,
    name: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Any]],
    detail: str | None = None,
    items: Sequence[Any] | None = None,
    blocks: str | None = None,
    noun: str = "rows",
    pick: str | None = None,
) -> Node:
    """A sortable, searchable table of any number of rows, of which only those in sight are in the document.

    rows: of JSON values; untrusted text is welcome. detail: the script's renderer (`report.details[detail]`) that fills
    the panel which a row opens. items: one a row: what a renderer gets, and what the search reads in addition to the
    row; blocks: the name of `page.packed_blocks` that has them already. pick: gives each row a box to tick;
    `report.picks[pick]` fills a line below the tools from the numbers of the ticked rows. Its hash `#name=K` opens row
    K (from 0).
    """
    for row in rows:
        assert len(row) == len(columns), f"{name}: a cell a column"
    values = [{row[n] for row in rows} for n in range(len(columns))]
    shown = [n for n, c in enumerate(columns) if values[n] - {None, ""} and not (c.several and len(values[n]) == 1)]
    if items is not None:
        page.blocks(name, items)
        blocks = name
    content = {"columns": [asdict(columns[n]) for n in shown], "rows": [[row[n] for n in shown] for row in rows]}
    page.data(f"grid-{name}", {**content, "detail": detail, "blocks": blocks, "noun": noun, "pick": pick})
    return tag("div", class_="grid", data_grid=name)


def origin_facts(run: Run) -> Iterator[tuple[str, Node]]:
    """(name, value) of what is known, for `parts.facts`."""
    origin = provenance(run)
    if origin.date:
        yield "Date", origin.date
    if origin.run_id:
        yield "Run", tag("code", origin.run_id)
    yield "Command", tag("code", origin.command) if origin.command else _no_command(run)


def origin_line(run: Run, command: bool = True) -> Node:
    """`origin_facts` on one line below a run's name. command: False where the page names one for all runs."""
    origin = provenance(run)
    date_and_id = " · ".join(part for part in (origin.date, f"run {origin.run_id}" if origin.run_id else "") if part)
    last = (tag("code", origin.command) if origin.command else _no_command(run)) if command else None
    return tag("span", date_and_id, " · " if date_and_id and last else None, last, class_="under")


def common_command(runs: Sequence[Run]) -> str | None:
    """The command that all of the runs come from, as a sweep's do; None if they come from several."""
    commands = {provenance(run).command for run in runs}
    return commands.pop() if len(commands) == 1 else None


def _no_command(run: Run) -> str:
    if run.by_lm_eval:
        return f"{run.program} records no command"
    if run.program == "evalengine in lm-eval":
        return "run by lm-eval, which records no command"
    return "started from Python" if run.manifest.started else "command not recorded (an older run)"
