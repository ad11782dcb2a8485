"""What commands print: the style of every table and line on the terminal, and a command's findings as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evalengine.errors import ConfigError
from evalengine.plain_text import json_lines, printable
from evalengine.report.sheet import Line, Sheet
from evalengine.util.tables import print_table


def rich_table(sheet: Sheet) -> Table:
    """A sheet in the style of every table on the terminal. Nothing in it is markup, nor moves the cursor."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(sheet.head):
        table.add_column(Text(printable(heading)), justify="left" if number in sheet.words else "right", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def bullets(title: str, lines: Sequence[str]) -> Iterator[str]:
    """A title and its lines; nothing if there are none."""
    if lines:
        yield f"{title}:"
        yield from (f"  - {line}" for line in lines)


def print_findings(command: str, lines: Iterable[Line], content: dict[str, Any], target: str | None) -> None:
    """Prints `lines`, and writes `content` to the file `target`, if one is named ("-": to standard output, alone).

    The file is written first, lest a closed terminal cost it. Raises `ConfigError` if it cannot be written.
    """
    text = json_lines(content)
    if target == "-":
        sys.stdout.write(text)
        return
    if target:
        try:
            Path(target).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{command}: --json {target}: {error.strerror or error}; name another file") from error
    print_lines(lines)


def print_lines(lines: Iterable[Line], console: Console | None = None) -> None:
    """Prints sheets and single lines, to standard output if no console is given."""
    console = console or Console(file=sys.stdout, soft_wrap=True)
    for line in lines:
        if isinstance(line, str):
            console.print(Text(printable(line)))
        else:
            print_table(rich_table(line), console)
