"""Text for a terminal or a log, a line at a time: `say` and `warn` print everything that may quote a file.

The names of tasks, models, metrics and files, and what models and programs wrote, come from others. Printed as they
are, a newline in one of them forges a line ("verdict: AGREES"), an escape sequence moves the cursor over what stands
above, and a bidirectional mark shows another text than is there.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from typing import Any


def printable(text: str) -> str:
    """The text on one line of visible characters, all others as their escapes (U+202E as \\u202e).

    `##[` is broken up, since GitHub takes it for a workflow command anywhere in a line of a log, and so are
    the colons of a text that begins like one (`::error::`).
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    text = text.replace("##[", "# #[")
    return text.replace("::", ":\\x3a", 1) if text.lstrip().startswith("::") else text


def format_warnings() -> None:
    """Has the warnings of a program that sets up no logging of its own printed by `_Printable`."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())


class _Printable(logging.Formatter):
    """Our own warnings on one line each, whatever file they quote; another library's as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        return printable(text) if record.name.startswith("evalengine") else text


def say(line: object) -> None:
    """Prints one line of a command's result to standard output."""
    print(printable(str(line)), file=sys.stdout, flush=True)


def warn(line: object, whose: str = "evalengine: ") -> None:
    """Prints one line for the user's eye to standard error. whose: what it begins with."""
    print(printable(f"{whose}{line}"), file=sys.stderr, flush=True)


def warn_of_bug() -> None:
    """Prints the traceback of the error at hand, which is a bug of ours, to standard error."""
    for line in traceback.format_exc().splitlines():
        warn(line, "")


def json_lines(content: Any) -> str:
    """JSON that reads well and ends with a newline. Letters of all scripts stay, what cannot be seen is escaped: lone
    surrogates, terminal sequences and GitHub's `##[`, too. Raises ValueError for NaN and infinities: JSON has none."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    return "\n".join(map(_visible_json, text.split("\n"))) + "\n"


def _visible_json(line: str) -> str:
    if not line.isprintable():
        line = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
    return line.replace("##[", "#\\u0023[")
