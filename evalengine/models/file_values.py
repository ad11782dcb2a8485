"""Values and names out of a checkpoint's files: whether they are numbers in range, and how a message shows them."""

from __future__ import annotations

import reprlib


def is_integer(value: object, least: int = 0, largest: int = 1 << 62) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest


def is_number(value: object, least: float, largest: float) -> bool:
    """Also false for NaN, which compares with nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= largest


def shown(value: object) -> str:
    """A value in a message: Python's text of it, shortened, control characters escaped."""
    short = reprlib.Repr()
    short.maxdict, short.maxstring, short.maxother = 12, 60, 60
    return short.repr(value)


def plain(name: str) -> str:
    """A name out of a file in a message: as it is, unless that would harm a terminal or fill a page."""
    return name if name.isprintable() and len(name) <= 120 else shown(name)


def one_line(error: BaseException) -> str:
    """Another library's error in a message: one line, shortened, what cannot be printed escaped."""
    text = " ".join(str(error).split())
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:300])
    return escaped if len(text) <= 300 else f"{escaped}..."
