"""Reads values that a caller hands over as the types that they must have.

Python's, NumPy's and torch's integers and floats are accepted. Nothing is rounded, parsed or guessed:
1.7 is no token id, True is no number, and bytes are no token ids though they iterate as integers.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from evalengine.errors import ConfigError

LARGEST = (1 << 63) - 1  # the largest int64
_NUMERIC_KINDS = "iuf"  # NumPy's kinds of numbers; the others (bool, datetime, ...) only look like some


def integer(value: Any) -> int | None:
    """The value as an integer; None if it is none. A bool is no integer."""
    if type(value) is int:
        return value
    value = _scalar(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """The value as a float, NaN and infinities included; None if it is no real number. Bools and strings are none."""
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def token_ids(value: Any) -> list[int] | None:
    """The integers of a sequence or a one-dimensional array as a new list; None for anything else."""
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        if getattr(value, "ndim", 0) != 1 or not _numeric(value):
            return None
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        return None
    ids = list(value)
    if set(map(type, ids)) <= {int}:  # a fast path for the usual case: 20 ns for each id
        return ids
    read = [integer(i) for i in ids]
    return None if None in read else [i for i in read if i is not None]


def no_model(model: Any, expected: str) -> str:
    """What is wrong with an argument that is no model."""
    if hasattr(model, "save_pretrained"):  # one of transformers
        return (
            f"model: a {type(model).__name__} in memory is not taken; save it and its tokenizer, each by "
            "save_pretrained(FOLDER), and give the folder"
        )
    return f"model={shown(model)}: must be {expected}"


def shown(value: Any) -> str:
    """A value in a message: Python's text of it, on one line and shortened."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # an integer of thousands of digits, or an object whose own repr fails
        return f"({type(value).__name__})"


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Fields:
    """Reads the fields of a frozen dataclass in its `__post_init__`: each is replaced by the value read, and `check`
    raises everything that is wrong at once."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.problems: list[str] = []

    def integer(self, name: str, least: int, largest: int = LARGEST, meaning: str = "") -> None:
        raw = self._raw(name)
        if type(raw) is int and least <= raw <= largest:  # the usual case, in a third of the time
            return
        value = integer(raw)
        fits = value is not None and least <= value <= largest
        limits = f"an integer of at least {least}" if largest == LARGEST else f"an integer from {least} to {largest}"
        self.take(name, value, fits, limits + meaning)

    def number(self, name: str, least: float, largest: float, expected: str, also: float = math.nan) -> None:
        """Reads a number that must lie in [least, largest] or equal `also`."""
        value = number(self._raw(name))
        self.take(name, value, value is not None and (least <= value <= largest or value == also), expected)

    def flag(self, name: str) -> None:
        value = self._raw(name)
        value = value.item() if type(value).__name__ in ("bool_", "bool") and hasattr(value, "item") else value
        self.take(name, value, isinstance(value, bool), "true or false")

    def token_ids(self, name: str, expected: str = "a sequence of integers") -> None:
        """Reads token ids as a list."""
        value = token_ids(self._raw(name))
        self.take(name, value, value is not None, expected)

    def take(self, name: str, value: Any, fits: bool, expected: str) -> None:
        """Sets the field to `value` if that `fits`; else adds a problem that says what is wanted."""
        if fits:
            object.__setattr__(self._owner, name, value)
        else:
            self.problems.append(f"{name}={shown(self._raw(name))}: must be {expected}")

    def check(self, prefix: str = "") -> None:
        """Raises ConfigError if anything was wrong."""
        if self.problems:
            raise ConfigError([prefix + problem for problem in self.problems])

    def _raw(self, name: str) -> Any:
        return getattr(self._owner, name)


def _numeric(value: Any) -> bool:
    kind = getattr(value.dtype, "kind", None)
    return str(value.dtype) != "torch.bool" if kind is None else kind in _NUMERIC_KINDS


def _scalar(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number; None for one without data; other values unchanged."""
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0 and _numeric(value):
        try:
            return value.item()
        except Exception:  # a tensor without data (device="meta")
            return None
    return value
