"""A split's rows and the documents made of them.

Every row must have the columns of the task, in a shape that it can read, and must be one that a run can hash, write
and read back, so that none fails at its end.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from evalengine.config.schema import ITEM_MARK, TaskConfig
from evalengine.errors import ConfigError, first_of
from evalengine.util.limits import LimitExceeded, OutOfTime

Row = dict[str, Any]

MAX_DEPTH = 100  # json's own limit depends on how deep its caller's stack is
MAX_BITS = 13_000  # about 3,900 digits; Python writes integers of at most 4,300
# Types of `datasets` columns that JSON has no values for; hashes and files hold their text.
WRITTEN_AS_TEXT = (date, time, timedelta, Decimal, bytes)
SHOWN = 10  # problems listed; more would say the same
LONGEST_NAME = 80  # characters of a cluster's name; a passage is named by its hash


@dataclass(frozen=True)
class Rows:
    """The rows of one split, in order, and where they were found."""

    rows: list[Row]
    source: str  # a file or folder, or hub:<id>/<configuration>
    revision: str | None = None  # the Hub commit; None for local rows, whose origin is unverified
    file: str | None = None  # the file, if each row has its own line
    lines: Sequence[int] = ()
    # column -> text -> the rows that have it there, for columns that `where` was used with: MMLU's 57 tasks each take
    # their part of the same rows.
    found: dict[str, dict[str, list[int]]] = field(default_factory=dict, repr=False, compare=False)

    def place(self, number: int) -> str:
        """Where a person finds the row: "FILE:LINE: row 3", or "SOURCE: row 3". Rows count from 0, lines from 1."""
        return f"{self.file}:{self.lines[number]}: row {number}" if self.lines else f"{self.source}: row {number}"

    def where(self, texts: Mapping[str, str]) -> Rows:
        """The rows that have each of these texts in the column of that name."""
        numbers = [*range(len(self.rows))]
        for column, text in texts.items():
            if column not in self.found:
                self.found[column] = defaultdict(list)
                for number, row in enumerate(self.rows):
                    self.found[column][str(row.get(column))].append(number)
            having = {*self.found[column].get(text, ())}
            numbers = [number for number in numbers if number in having]
        lines = [self.lines[number] for number in numbers] if self.lines else ()
        return replace(self, rows=[self.rows[number] for number in numbers], lines=lines, found={})


def check_rows(rows: Rows, *, thorough: bool = False) -> Rows:
    """The rows as they are. thorough: for rows that are not from JSON, whose keys may be anything.

    Raises ConfigError that names each row that no file of a run could hold.
    """
    problems = []
    for number, row in enumerate(rows.rows):
        if (thorough or not _is_plain(row)) and (why := _problem(row)):
            problems.append(f"{rows.place(number)} cannot be used: {why}")
    if problems:
        raise ConfigError(first_of(problems, SHOWN, "more rows"))
    return rows


def cluster_names(rows: Rows, task: TaskConfig, name: str) -> list[str] | None:
    """The cluster of each row: the value of the column `task.cluster` (questions about one passage, say; a long
    one by its hash), or its number within the set `task.items`. None where the task has neither.

    Raises ConfigError that names the setting and each row where it is missing, null, or neither text nor number.
    """
    prefix = "" if task.items is None else task.items + ITEM_MARK
    if task.cluster is not None:
        return [prefix + value for value in _values(rows, task.cluster, f"tasks.{name}.cluster")]
    return None if task.items is None else [f"{prefix}{number}" for number in range(len(rows.rows))]


def _values(rows: Rows, column: str, setting: str) -> list[str]:
    names, problems = [], []
    for number, row in enumerate(rows.rows):
        value = row.get(column)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            text = str(value)
            names.append(text if len(text) <= LONGEST_NAME else hashlib.sha256(text.encode()).hexdigest()[:16])
            continue
        what = "no" if value is None else f"{json.dumps(value, default=str)[:40]}, neither text nor number, as its"
        problems.append(f"{setting}={column}: {rows.place(number)} has {what} {column!r}")
    if problems:
        there = ", ".join(repr(name) for name in rows.rows[0])
        fix = f"the first row has {there}; name a column that every row has, or set {setting}=null: all rows unrelated"
        raise ConfigError([*first_of(problems, SHOWN, "more rows"), fix])
    return names


def content_hash(rows: Iterable[Row]) -> str:
    """SHA-256 over the rows in order. Key order does not count, so the Hub's rows and a local copy of them agree."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)
        digest.update(line.encode("utf-8") + b"\n")
    return digest.hexdigest()


def _is_plain(row: Row) -> bool:
    """True for nearly every row, in a tenth of the time that `_problem` takes; after False `_problem` must decide."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (ValueError, TypeError, RecursionError):
        return False
    return text.count("[") + text.count("{") < MAX_DEPTH and len(text) < MAX_BITS // 4


def _problem(row: Row) -> str | None:
    """Why a run could not hold the row, or None."""
    waiting: list[tuple[Any, str, int]] = [(row, "", 0)]
    while waiting:
        value, where, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return f"{where} is nested more than {MAX_DEPTH} levels deep"
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str):
                    return f"{where or 'it'} has a key that is no text: {str(key)[:40]!r}"
                if why := _text_problem(key):
                    return f"a column's name {why}"
                waiting.append((inner, where or f"column {key[:40]!r}", depth + 1))
        elif isinstance(value, (list, tuple)):
            waiting.extend((inner, where, depth + 1) for inner in value)
        elif why := _value_problem(value):
            return f"{where} {why}"
    return None


def _value_problem(value: Any) -> str | None:
    if value is None or isinstance(value, (bool, *WRITTEN_AS_TEXT)):
        return None
    if isinstance(value, str):
        return _text_problem(value)
    if isinstance(value, int):
        return "holds a number of thousands of digits" if value.bit_length() > MAX_BITS else None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"holds {value}, which is no number that JSON can write"
    return f"holds a {type(value).__name__}, which is neither text, number, list nor mapping"


def _text_problem(text: str) -> str | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds half a character (the lone surrogate U+{ord(text[error.start]):04X}), which no file can hold"
    return None


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


LETTERS = "ABCDEFGHIJ"


def reordered(row: Doc, seed: int) -> Doc:
    """The row with its options in a random order, and the answer that names the same one. The order depends on seed and
    row alone. Raises ValueError for a row that lists no options in one of the two forms."""
    column = next((name for name in ("choices", "options") if isinstance(row.get(name), list)), None)
    answer = row.get("answer")
    place: Any = LETTERS.find(answer) if isinstance(answer, str) and len(answer) == 1 else answer
    if column is None or not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(row[column]):
        raise ValueError("choice_order is set, and it lists no choices or options with an answer's number or letter")
    order = [*range(len(row[column]))]
    random.Random(f"{seed} {content_hash([row])}").shuffle(order)
    now = order.index(place)
    changed = {column: [row[column][old] for old in order], "answer": LETTERS[now] if isinstance(answer, str) else now}
    return {**row, **changed, **({"answer_index": now} if "answer_index" in row else {})}
