"""What a command prints, as the text and the HTML of an object in Python: `repr(x)`, and a notebook's output."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalengine.report.html.markup import Markup, join, tag
from evalengine.report.terminal.printing import print_lines

Line = Table | str  # a part of a command's output: a table, or one line


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
    return tag("div", *(_table(line) if isinstance(line, Table) else tag("p", line) for line in lines))


def _table(table: Table) -> Markup:
    head = tag("tr", *(tag("th", _plain(column.header), align=column.justify) for column in table.columns))
    columns = [[_plain(cell) for cell in column.cells] for column in table.columns]
    aligned = [column.justify for column in table.columns]
    rows = (
        tag("tr", *(tag("td", cell, align=side) for cell, side in zip(row, aligned, strict=True)))
        for row in zip(*columns, strict=True)
    )
    return tag("table", tag("thead", head), tag("tbody", join(*rows)))


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)
