"""The style of every table and line on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from evalengine.plain_text import printable


def house_table(headings: Sequence[str], left: Sequence[int] = ()) -> Table:
    """A table in the style of a run's results; columns in `left` hold words, the others numbers.

    A heading may be a metric's or a setting's name: it is no markup and one line."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(Text(printable(heading)), justify="left" if number in left else "right", no_wrap=True)
    return table


def add(table: Table, cells: Sequence[str]) -> None:
    """Adds a row of plain text: nothing in it is markup, nor moves the cursor."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


def bullets(title: str, lines: Sequence[str]) -> Iterator[str]:
    """A title and its lines; nothing if there are none."""
    if lines:
        yield f"{title}:"
        yield from (f"  - {line}" for line in lines)
