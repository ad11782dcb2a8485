"""From rows to documents: every row must have the task's columns, in a shape that the task can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evalengine.errors import ConfigError
from evalengine.tasks.rows import Rows
from evalengine.util.limits import LimitExceeded, OutOfTime

Doc = dict[str, Any]
Shapes = Mapping[str, tuple[type, ...]]  # column -> the types that its values may have
TEXT = (str, int, float)  # a number is a text as Python writes it


def documents_of(rows: Rows, columns: tuple[str, ...], shapes: Shapes, document: Callable[[Doc], Doc]) -> list[Doc]:
    """`document` of each row. Columns that `shapes` does not name hold text or numbers.

    Raises ConfigError that names the first row without a column, with a value of another type, or that `document`
    cannot read.
    """
    documents = []
    for number, row in enumerate(rows.rows):
        _check_columns(row, columns, shapes, rows.place(number))
        documents.append(checked(document, row, rows, number))
    return documents


def checked(function: Callable[[Doc], Any], doc: Doc, rows: Rows, number: int) -> Any:
    """`function(doc)`. What it raises over a row it cannot read becomes a ConfigError that names row `number`."""
    try:
        return function(doc)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, MemoryError, OutOfTime) as error:
        reason = str(error) if type(error) in (ValueError, LimitExceeded) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{rows.place(number)} is not as expected: {reason}") from error


def _check_columns(row: Doc, columns: tuple[str, ...], shapes: Shapes, place: str) -> None:
    missing = [column for column in columns if row.get(column) is None]
    if missing:
        others = ", ".join(repr(column) for column, value in row.items() if value is not None)
        raise ConfigError(
            f"{place} has no {', '.join(map(repr, missing))} (it is absent or null); it has {others or 'nothing'}"
        )
    for column in columns:
        types = shapes.get(column, TEXT)
        if not isinstance(row[column], types) or (isinstance(row[column], bool) and bool not in types):
            raise ConfigError(
                f"{place} has a {column!r} that is {_named(type(row[column]))}, "
                f"not {' or '.join(dict.fromkeys(map(_named, types)))}"
            )


def _named(kind: type) -> str:
    names = {str: "text", int: "a number", float: "a number", dict: "a mapping", bool: "true or false", bytes: "bytes"}
    return names.get(kind, f"a {kind.__name__}")
