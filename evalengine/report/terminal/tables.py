"""What commands print: tables and lines, and a command's findings as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.plain_text import json_lines, printable
from evalengine.records.folder import write_text_file
from evalengine.util.sheet import Line
from evalengine.util.tables import print_sheet, wrapped


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
            write_text_file(Path(target), text)
        except EvalEngineError as error:  # exit code 1 has another meaning
            raise ConfigError(f"{command}: --json: {error}") from error
    print_lines(lines)


def print_lines(lines: Iterable[Line], console: Console | None = None) -> None:
    """Prints sheets and single lines, to standard output if no console is given."""
    console = console or Console(file=sys.stdout, soft_wrap=True)
    for line in lines:
        if isinstance(line, str):
            for part in wrapped(printable(line), console):
                console.print(Text(part))
        else:
            print_sheet(line, console)
