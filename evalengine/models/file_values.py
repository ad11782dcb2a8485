"""Decodes and checks numbers out of a checkpoint's files, and shortens values and names for messages."""

from __future__ import annotations

import reprlib
from typing import Any

from evalengine.plain_text import printable


def is_integer(value: object, least: int = 0, largest: int = 1 << 62) -> bool:
    """Whether a value is an integer in range; a boolean is not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest


def is_number(value: object, least: float, largest: float) -> bool:
    """Whether a value is a number in range; a boolean and NaN are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= largest


def decoded(value: Any) -> Any:
    """A copy of a JSON value, in which transformers writes what JSON has no number for as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: decoded(part) for key, part in value.items()}
    return [decoded(part) for part in value] if isinstance(value, list) else value


def shown(value: object) -> str:
    """A value for a message: Python's text of it, shortened, control characters escaped."""
    short = reprlib.Repr()
    short.maxdict, short.maxstring, short.maxother = 12, 60, 60
    return short.repr(value)


def plain(name: str) -> str:
    """A name out of a file for a message: as it is, unless that would harm a terminal or fill a page."""
    return name if name.isprintable() and len(name) <= 120 else shown(name)


def one_line(error: BaseException) -> str:
    """Another library's error for a message: one line, shortened, unprintable characters escaped."""
    text = " ".join(str(error).split())
    escaped = printable(text[:300])
    return escaped if len(text) <= 300 else f"{escaped}..."
