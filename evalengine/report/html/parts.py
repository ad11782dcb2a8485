"""What sections are made of: tables, facts, figures, marks, where numbers come from, and the grid for thousands of
rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from evalengine.report.html.markup import Child, Markup, join, tag
from evalengine.report.html.page import Page
from evalengine.report.read.run import Run, provenance
from evalengine.util.sheet import Line, Sheet

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


def table(
    head: Sequence[str], rows: Iterable[Sequence[Child]], numbers: Sequence[int] = (), **attributes: Any
) -> Markup:
    """A plain table for tens of rows. numbers: the columns (from 0) whose cells are numbers, set to the right."""
    classes = ["number" if place in numbers else None for place in range(len(head))]
    top = tag("tr", *(tag("th", text, class_=kind, scope="col") for text, kind in zip(head, classes, strict=True)))
    body = [tag("tr", *(tag("td", c, class_=k) for c, k in zip(row, classes, strict=True))) for row in rows]
    inner = tag("table", tag("thead", top), tag("tbody", *body), **attributes)
    return tag("div", inner, class_="scroll", tabindex="0")


def sheet_table(sheet: Sheet) -> Markup:
    """A sheet as a table, its best cells bold."""
    rows = [
        [tag("strong", cell) if (place, n) in sheet.best else cell for n, cell in enumerate(row)]
        for place, row in enumerate(sheet.rows)
    ]
    return table(sheet.head, rows, numbers=[n for n in range(len(sheet.head)) if n not in sheet.words])


def lines_of(lines: Iterable[Line]) -> Iterator[Markup]:
    """What a command would print: a paragraph for each line, and tables."""
    return (sheet_table(line) if isinstance(line, Sheet) else tag("p", line) for line in lines)


def facts(pairs: Mapping[str, Child] | Iterable[tuple[str, Child]]) -> Markup:
    """Names and values, one under the other."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return tag("dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in items if v is not None), class_="facts")


def beginning(text: str, room: int) -> str:
    """A beginning of the text that surely takes no more than `room` bytes of UTF-8."""
    return text[: room if text.isascii() else room // 4]


def tiles(pairs: Iterable[tuple[str, Child, Child]]) -> Markup:
    """Large figures side by side: (label, figure, a word below or None)."""
    cells = (
        tag("div", tag("p", label, class_="label"), tag("p", figure, class_="figure"), tag("p", word, class_="word"))
        for label, figure, word in pairs
    )
    return tag("div", *cells, class_="tiles")


def verdict(word: str, sentence: Child, good: bool | None) -> Markup:
    """The verdict, which is read first. good: True, False, or None for neither."""
    mood = {True: "good", False: "bad", None: "plain"}[good]
    return tag("div", tag("p", word, class_="word"), tag("p", sentence, class_="sentence"), class_=f"verdict {mood}")


def figure(title: str, drawing: Markup, note: Child = None) -> Markup:
    """A plot (see `plots`) under its title."""
    caption = tag("figcaption", tag("strong", title), tag("span", note) if note is not None else None)
    return tag("figure", caption, drawing)


def row_of(*children: Child) -> Markup:
    """Figures side by side where there is room: two and two if they are two or four, else in threes."""
    return tag("div", *children, class_="row pairs" if len(children) in (2, 4) else "row")


def details(summary: Child, *children: Child) -> Markup:
    """Content that is folded until it is opened."""
    return tag("details", tag("summary", summary), *children)


def fold(summary: str, *children: Child, alone: bool = False) -> Markup:
    """Content that is open on a wide screen and folded on a narrow one, where stacked plots would hide what follows.

    alone: whether the section, which has a title, holds nothing else: a wide screen then shows no summary."""
    return tag("details", tag("summary", summary), *children, class_="fold alone" if alone else "fold", open=True)


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
) -> Markup:
    """A sortable, searchable table of any number of rows, of which only those in sight are in the document.

    rows: of JSON values; untrusted text is welcome. detail: the script's renderer (`report.details[detail]`) that fills
    the panel which a row opens. items: one a row: what a renderer gets, and what the search reads besides the row;
    blocks: the name of `page.packed_blocks` that has them already. pick: gives each row a box to tick;
    `report.picks[pick]` fills a line below the tools from the numbers of the ticked rows. Its hash `#name=K` opens row
    K (from 0).
    """
    for row in rows:
        assert len(row) == len(columns), f"{name}: a cell a column"
    if items is not None:
        page.blocks(name, items)
        blocks = name
    page.data(f"grid-{name}", {"columns": [asdict(c) for c in columns], "rows": [list(row) for row in rows],
                               "detail": detail, "blocks": blocks, "noun": noun, "pick": pick})  # fmt: skip
    return tag("div", tag("p", "Scripts are off: the table needs them.", class_="note"), class_="grid", data_grid=name)


def chosen(
    columns: Sequence[Column], rows: Sequence[Sequence[Any]], places: Sequence[int]
) -> tuple[list[Column], list[list[Any]]]:
    """The columns at these places, and the rows with their cells alone."""
    return [columns[place] for place in places], [[row[place] for place in places] for row in rows]


def origin_facts(run: Run) -> Iterator[tuple[str, Child]]:
    """(name, value) of what is known, for `parts.facts`."""
    origin = provenance(run)
    if origin.date:
        yield "Date", origin.date
    if origin.run_id:
        yield "Run", tag("code", origin.run_id)
    yield "Command", tag("code", origin.command) if origin.command else _no_command(run)


def origin_line(run: Run, command: bool = True) -> Markup:
    """`origin_facts` on one line below a run's name. command: False where the page names one for all runs."""
    origin = provenance(run)
    date_and_id = " · ".join(part for part in (origin.date, f"run {origin.run_id}" if origin.run_id else "") if part)
    last = (tag("code", origin.command) if origin.command else _no_command(run)) if command else None
    return tag("span", join(date_and_id, " · " if date_and_id and last else None, last), class_="under")


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
