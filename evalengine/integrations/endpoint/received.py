"""Makes the strings that an endpoint sent safe to store and print: no API key, no lone surrogates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

HIDDEN = "(the key)"  # replaces the API key
PLACEHOLDERS = ("empty", "none", "null", "dummy", "unused", "no-key", "not-needed")  # keys that are no secret
WHOLE_WORD = 5  # characters; a shorter key is replaced only as a whole word, since it is part of many words
LONGEST_LINE = 300  # characters of an error text


@dataclass
class Cleaned:
    """A JSON value whose strings are clean, and what that took."""

    value: Any = None
    surrogates: int = 0  # lone surrogates that became U+FFFD
    keys: int = 0  # occurrences of the API key that became `HIDDEN`


class Cleaner:
    """Cleans strings, mappings' keys included.

    A lone surrogate (half of a character, as from an emoji cut in two) cannot be encoded as UTF-8 and becomes U+FFFD;
    two halves in a row become their character. The API key becomes `HIDDEN`, however its characters are escaped
    (backslashes, \\u00xx, %xx).
    """

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None or key.lower() in PLACEHOLDERS else _pattern(key)

    def clean(self, value: Any) -> Cleaned:
        """A copy of a JSON value. Clean it after parsing: JSON escapes hide keys and surrogates."""
        result = Cleaned()
        result.value = self._value(value, result)
        return result

    def line(self, text: str) -> str:
        """The text in one line of at most `LONGEST_LINE` characters; truncated last, since half a key would remain."""
        return str(self.clean(" ".join(text.split())).value)[:LONGEST_LINE]

    def _value(self, value: Any, counts: Cleaned) -> Any:
        if isinstance(value, str):
            return self._text(value, counts)
        if isinstance(value, list):
            return [self._value(item, counts) for item in value]
        if isinstance(value, dict):
            return {self._text(name, counts): self._value(item, counts) for name, item in value.items()}
        return value

    def _text(self, text: str, counts: Cleaned) -> str:
        if not text.isascii():
            before = text.count("\ufffd")
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            counts.surrogates += text.count("\ufffd") - before
        if self._key is not None:
            text, found = self._key.subn(HIDDEN, text)
            counts.keys += found
        return text


def _pattern(key: str) -> re.Pattern[str]:
    """Matches an ASCII key, whichever of its characters are escaped."""
    spellings = "".join(
        rf"(?:\\{{0,8}}{re.escape(char)}|(?i:\\{{1,8}}u00{ord(char):02x}|%{ord(char):02x}))" for char in key
    )
    return re.compile(spellings if len(key) >= WHOLE_WORD else rf"(?<![A-Za-z0-9]){spellings}(?![A-Za-z0-9])")
