"""Values that a caller hands over, read as what they must be.

Python's, NumPy's and torch's integers and floats are taken for what they are. Nothing is rounded, parsed or guessed:
1.7 is no token id, True is no number, and bytes are no token ids though they iterate as integers.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from evalengine.errors import ConfigError

LARGEST = (1 << 63) - 1  # what a tensor of int64 holds
_NUMERIC_KINDS = "iuf"  # NumPy's; the rest (bool, datetime, object, ...) is not what it may look like


def integer(value: Any) -> int | None:
    """None for what is no integer; a bool is none."""
    if type(value) is int:
        return value
    value = _scalar(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """None for what is no real number; a bool and a string are none. May be NaN or infinite."""
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def token_ids(value: Any) -> list[int] | None:
    """A new list of a sequence's or a one-dimensional array's integers; None for anything else."""
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        if getattr(value, "ndim", 0) != 1 or not _numeric(value):
            return None
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        return None
    ids = list(value)
    if set(map(type, ids)) <= {int}:  # the usual case, at the least cost: 20 ns an id
        return ids
    read = [integer(i) for i in ids]
    return None if None in read else [i for i in read if i is not None]


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
    """Reads the fields of a frozen dataclass in its `__post_init__`: each is replaced by what it was read as, and
    everything that is wrong is raised at once."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.problems: list[str] = []

    def integer(self, name: str, least: int, largest: int = LARGEST, meaning: str = "") -> None:
        value = integer(self._raw(name))
        fits = value is not None and least <= value <= largest
        limits = f"an integer of at least {least}" if largest == LARGEST else f"an integer from {least} to {largest}"
        self.take(name, value, fits, limits + meaning)

    def number(self, name: str, least: float, largest: float, wanted: str, also: float = math.nan) -> None:
        """In [least, largest], or `also`."""
        value = number(self._raw(name))
        self.take(name, value, value is not None and (least <= value <= largest or value == also), wanted)

    def flag(self, name: str) -> None:
        value = self._raw(name)
        value = value.item() if type(value).__name__ in ("bool_", "bool") and hasattr(value, "item") else value
        self.take(name, value, isinstance(value, bool), "true or false")

    def token_ids(self, name: str, wanted: str = "a sequence of integers") -> None:
        """As a list."""
        value = token_ids(self._raw(name))
        self.take(name, value, value is not None, wanted)

    def take(self, name: str, value: Any, fits: bool, wanted: str) -> None:
        """The field is `value`, if that `fits`."""
        if fits:
            object.__setattr__(self._owner, name, value)
        else:
            self.problems.append(f"{name}={shown(self._raw(name))}: must be {wanted}")

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
    """A NumPy or torch scalar as Python's."""
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0 and _numeric(value):
        try:
            return value.item()
        except Exception:  # a tensor without data (device="meta")
            return None
    return value
