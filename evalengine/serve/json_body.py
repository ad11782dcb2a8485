"""Reads the JSON of a request's body. A long one does not stop the other threads.

The standard library's reader keeps the interpreter's lock until it is done: 0.1 s for a million numbers, seconds for
millions of lists, whose garbage collection stops all threads, too. `read_json` walks the lists and objects of a long
body in Python, reads strings and runs of numbers with the library, and gives up beyond `MOST_VALUES`.
"""

from __future__ import annotations

import json
import re
from json import JSONDecodeError
from typing import Any

from evalengine.config.arguments import is_unicode
from evalengine.util.plain_files import MAX_JSON_DEPTH, parse_json

SHORT = 1 << 16  # bytes: the library reads so many in 2 ms at most
MOST_VALUES = 1 << 17  # in a body: strings, names, lists, objects, true, false and null; numbers are not counted
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBERS = re.compile(r"[-+.0-9eE, \t\n\r]{1,65536}")
_decode = json.JSONDecoder().raw_decode


def read_json(content: bytes) -> Any:
    """The value of a body in UTF-8, UTF-16 or UTF-32. All its strings are Unicode.

    Raises: ValueError if it is no JSON, holds half of a surrogate pair, or more than `MOST_VALUES` values.
    """
    text = content.decode(json.detect_encoding(content))
    if len(content) > SHORT:
        return _Reader(text).whole()
    value = parse_json(text)
    if "\\u" in text and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ValueError(_HALF)
    return value


_HALF = "a text holds half of a surrogate pair, which is no character"


class _Reader:
    """Reads one text. Each method takes the place of a value's first character, or that behind a bracket, and returns
    the place behind the value, too."""

    def __init__(self, text: str) -> None:
        self._text, self._num_values = text, 0
        self._has_escapes = "\\u" in text

    def whole(self) -> Any:
        try:
            value, end = self._value(self._skip_space(0), 0)
        except ValueError as error:
            if "integer string" in str(error):  # Python's message names a function that raises the limit
                raise ValueError("it holds an integer of thousands of digits") from error
            raise
        if end != len(self._text):
            raise JSONDecodeError("Extra data", self._text, end)
        return value

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        first = self._text[at : at + 1]
        value: Any
        if first in ("[", "{"):
            if depth == MAX_JSON_DEPTH:
                raise ValueError("its values are nested too deeply")
            self._count()
            value, at = (self._list if first == "[" else self._object)(self._skip_space(at + 1), depth + 1)
        else:
            value, at = _decode(self._text, at)
            if type(value) not in (int, float):
                self._count()
            if self._has_escapes and isinstance(value, str) and not is_unicode(value):
                raise ValueError(_HALF)
        return value, self._skip_space(at)

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        if self._text[at : at + 1] == "]":
            return values, at + 1
        while True:
            run = _NUMBERS.match(self._text, at)
            if run and (end := self._text.rfind(",", at, run.end())) > at:  # what is left begins with a value
                values += self._numbers(at, end)
                at = self._skip_space(end + 1)
                continue
            value, at = self._value(at, depth)
            values.append(value)
            if self._ends("]", at):
                return values, at + 1
            at = self._skip_space(at + 1)

    def _numbers(self, at: int, end: int) -> list[Any]:
        try:
            numbers: list[Any] = json.loads(f"[{self._text[at:end]}]")
        except JSONDecodeError as error:
            raise JSONDecodeError(error.msg, self._text, at + error.pos - 1) from error
        return numbers

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        if self._text[at : at + 1] == "}":
            return values, at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            name, at = self._value(at, depth)
            if self._text[at : at + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", self._text, at)
            values[name], at = self._value(self._skip_space(at + 1), depth)
            if self._ends("}", at):
                return values, at + 1
            at = self._skip_space(at + 1)

    def _ends(self, bracket: str, at: int) -> bool:
        """Whether the list or object ends here. Raises JSONDecodeError if no comma stands here otherwise."""
        if (found := self._text[at : at + 1]) not in (bracket, ","):
            raise JSONDecodeError("Expecting ',' delimiter", self._text, at)
        return found == bracket

    def _skip_space(self, at: int) -> int:
        space = _SPACE.match(self._text, at)
        assert space is not None, "no space is a match, too"
        return space.end()

    def _count(self) -> None:
        self._num_values += 1
        if self._num_values > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} strings, lists and objects; send several requests")
