"""Checks single values of a configuration; a problem is a sentence with the name, the value and what it must be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from evalengine.config.arguments import integer, shown

MAX_SIZE = (1 << 31) - 1  # the most tokens in a step, and pages: kernels index both with int32


def least_problems(name: str, value: float | None, lowest: int) -> Iterator[str]:
    if value is not None and not value >= lowest:
        yield f"{name}={value}: must be at least {lowest}"


def size_problems(
    name: str, value: Any, largest: int = MAX_SIZE, why: str = "", words: str = "an integer"
) -> Iterator[str]:
    """Yields a sentence if the value is no integer from 1 to `largest`."""
    size = integer(value)
    if size is None:
        yield f"{name}={as_typed(value)}: must be {words}"
    elif size > largest:
        yield f"{name}={shown(value)}: must be at most {largest}{why}"
    else:
        yield from least_problems(name, size, 1)


def choice_problems(name: str, value: str, allowed: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(value, str) or value not in allowed:
        yield f"{name}={as_typed(value)}: must be one of {', '.join(allowed)}"


def as_typed(value: Any) -> str:
    """A word as on the command line; any other value in quotes or shortened, so that "8" does not look like 8."""
    return value if isinstance(value, str) and re.fullmatch(r"[a-z][\w:.]{0,20}", value) else shown(value)


def is_folder(path: str) -> bool:
    """Whether the path is a folder; False also for names that are too long, and below folders that may not be read."""
    try:
        return Path(path).is_dir()
    except OSError:
        return False


def is_date(text: str) -> bool:
    try:
        return re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text) is not None and bool(date.fromisoformat(text))
    except ValueError:
        return False


def text_problems(value: Any, where: str) -> Iterator[str]:
    """Yields a sentence for each text that no file can hold, as bytes on the command line that are no UTF-8."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from text_problems(inner, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from text_problems(inner, where)
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            yield f"{where}={value[:40]!r}: is no text in UTF-8"
