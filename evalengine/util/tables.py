"""Prints tables of which nothing is lost: where a table is wider than a terminal, rich would cut its cells to "..."."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalengine.plain_text import printable
from evalengine.util.command import PROGRAM
from evalengine.util.sheet import Line, Sheet

WIDEST = 10_000  # columns that are requested to learn how wide a table is
FOLDED = 8  # columns of words are folded to no less than this


def bullets(title: str, lines: Sequence[str]) -> Iterator[str]:
    """A title and its lines; nothing if there are none."""
    if lines:
        yield f"{title}:"
        yield from (f"  - {line}" for line in lines)


def print_lines(lines: Iterable[Line], console: Console | None = None) -> None:
    """Prints sheets and single lines, to standard output if no console is given."""
    console = console or Console(file=sys.stdout, soft_wrap=True)
    for line in lines:
        if isinstance(line, str):
            for part in wrapped(printable(line), console):
                console.print(Text(part))
        else:
            print_sheet(line, console)


def print_sheet(sheet: Sheet, console: Console) -> None:
    """Prints a sheet whole, in the style of every table on the terminal. It has no markup and no control codes."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(sheet.head):
        table.add_column(Text(printable(heading)), justify="left" if number in sheet.words else "right", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    print_table(table, console)


def print_table(table: Table, console: Console) -> None:
    """Prints the table whole. A pipe has no width: a row is one line there, without blanks at its end.

    On a terminal that is too narrow, columns of words (those that are not justified right) are folded into several
    lines; where that leaves too little room, each row is printed as lines of a heading and its cell.
    """
    whole = _width(table, console)
    if not console.is_terminal:
        plain = Console(file=io.StringIO(), width=max(console.width, whole), color_system=None)
        with plain.capture() as captured:
            plain.print(table)
        for line in captured.get().split("\n")[:-1]:
            console.out(line.rstrip(" "), highlight=False)
    elif whole <= console.width or _fold(table, console):
        console.print(table)
    else:
        for row in zip(*(column.cells for column in table.columns), strict=True):
            lines = Table.grid(padding=(0, 3, 0, 0))
            lines.add_column(no_wrap=True)
            lines.add_column(overflow="fold")
            for column, cell in zip(table.columns, row, strict=True):
                if _length(cell):
                    lines.add_row(Text(f" {column.header}"), cell)
            console.print(lines)
            console.print()


def wrapped(line: str, console: Console) -> list[str]:
    """A line of prose in lines of a terminal's width that end between words; unchanged in a pipe, and where it holds a
    command, which must stay one line to be pasted. Continuations of a list's line are indented."""
    if not console.is_terminal or cell_len(line) <= console.width or PROGRAM in line:
        return [line]
    start = re.findall(r"^ *(?:- )?", line)[0]
    first, *words = line[len(start) :].split(" ")
    lines = [start + first]
    for word in words:
        if cell_len(f"{lines[-1]} {word}") <= console.width:
            lines[-1] += f" {word}"
        else:
            lines.append(" " * len(start) + word)
    return lines


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(width=WIDEST)).maximum


def _fold(table: Table, console: Console) -> bool:
    """Gives the columns of words the room that the terminal leaves them, those that need little first; returns whether
    it is enough. The first column holds names, which are searched for: its words stay whole."""
    table.padding = (0, 1, 0, 0)
    whole = [max(map(_length, (column.header, *column.cells))) for column in table.columns]
    room = console.width - (_width(table, console) - sum(whole))
    names = (str(cell) for cell in (table.columns[0].header, *table.columns[0].cells))
    longest = max(_length(word) for name in names for word in re.findall(r"^ *\S*|\S+", name))  # with its indent
    widths = [
        width if column.justify == "right" else longest if place == 0 else min(width, FOLDED)
        for place, (column, width) in enumerate(zip(table.columns, whole, strict=True))
    ]
    room -= sum(widths)
    missing = sorted((width - widths[place], place) for place, width in enumerate(whole))
    for number, (more, place) in enumerate(missing):
        given = min(more, max(room, 0) // (len(missing) - number))
        widths[place], room = widths[place] + given, room - given
    for column, width in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap, column.overflow = width, False, "fold"
    return room >= 0


def _length(cell: object) -> int:
    return cell_len(str(cell))
