"""Metadata of a GGUF file, read by type: a value of another type or out of range is an error that names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from gguf import GGUFValueType

from evalengine.engine.load.gguf_header import StoredValue
from evalengine.errors import EvalEngineError

CURE = "download or copy it again, or set model.path to another file"
FLOATS = (GGUFValueType.FLOAT32, GGUFValueType.FLOAT64)
NOT_INTEGERS = (*FLOATS, GGUFValueType.STRING, GGUFValueType.BOOL)
NO_TOKEN = (1 << 32) - 1  # -1, in the type that token ids have
LARGEST = (1 << 63) - 1  # the largest signed integer of 64 bits
REQUIRED: Any = object()  # the default of a key that must be there

Default = TypeVar("Default")


def shown(text: object) -> str:
    """A file's text in a message: shortened, and quoted if a terminal would not show it as it is."""
    short = str(text)[:100]
    return short if short.isprintable() else repr(short)


class GGUFFields:
    """The values below a prefix. Each method takes the key after the prefix and what an absent key means.

    Raises `EvalEngineError` for a key that is missing without a default, of another type or out of range.
    """

    def __init__(self, path: Path, metadata: Mapping[str, StoredValue], prefix: str = "") -> None:
        self.path = path
        self._metadata = metadata
        self._prefix = prefix

    def under(self, prefix: str) -> GGUFFields:
        """The values of the keys that begin with `prefix` and a dot."""
        return GGUFFields(self.path, self._metadata, f"{self._prefix}{prefix}.")

    def names(self) -> list[str]:
        """The keys, in file order."""
        return [key.removeprefix(self._prefix) for key in self._metadata if key.startswith(self._prefix)]

    def integer(
        self, key: str, default: Default = REQUIRED, *, least: int = 0, largest: int = LARGEST
    ) -> int | Default:
        """An integer, stored with any number of bits; a boolean or 2.0 is no integer."""
        if (stored := self._stored(key, default)) is None:
            return default
        value = stored.items[0] if not stored.is_list and stored.type not in NOT_INTEGERS else None
        if not isinstance(value, int) or not least <= value <= largest:
            self._wrong(key, f"an integer from {least} to {largest}")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """A token's id; None without one, as for -1 and, in llama.cpp, for an id outside the vocabulary."""
        number = self.integer(key, None, least=-1)
        return number if number is not None and 0 <= number < vocab_size else None

    def number(self, key: str, default: Default = REQUIRED) -> float | Default:
        """A finite number. A float32 is read as its shortest decimal, which is what the model's own config has."""
        if (stored := self._stored(key, default)) is None:
            return default
        value = stored.items[0] if not stored.is_list and stored.type in FLOATS else None
        if not isinstance(value, float) or not math.isfinite(value):
            self._wrong(key, "a finite floating-point number")
        return float(str(np.float32(value))) if stored.type == GGUFValueType.FLOAT32 else value

    def boolean(self, key: str, default: Default = REQUIRED) -> bool | Default:
        """True or false; a byte other than 0 and 1 is an error."""
        if (stored := self._stored(key, default)) is None:
            return default
        if stored.is_list or stored.type != GGUFValueType.BOOL or stored.items[0] not in (0, 1):
            self._wrong(key, "true or false")
        return bool(stored.items[0])

    def string(self, key: str, default: Default = REQUIRED) -> str | Default:
        """One string."""
        if (stored := self._stored(key, default)) is None:
            return default
        if stored.is_list or stored.type != GGUFValueType.STRING:
            self._wrong(key, "a string")
        return self._texts(key, stored)[0]

    def strings(self, key: str, default: Default = REQUIRED) -> list[str] | Default:
        """A list of strings."""
        if (stored := self._stored(key, default)) is None:
            return default
        if not stored.is_list or stored.type != GGUFValueType.STRING:
            self._wrong(key, "a list of strings")
        return self._texts(key, stored)

    def integers(
        self, key: str, default: Default = REQUIRED, *, length: int | None = None, largest: int = LARGEST
    ) -> list[int] | Default:
        """A list of integers from 0 on, of `length` items where that is given."""
        if (stored := self._stored(key, default)) is None:
            return default
        items = [item for item in stored.items if isinstance(item, int) and 0 <= item <= largest]
        fits = stored.is_list and stored.type not in NOT_INTEGERS and len(items) == len(stored.items)
        if not fits or length not in (None, len(items)):
            self._wrong(key, f"a list of {'' if length is None else f'{length} '}integers from 0 to {largest}")
        return items

    def count(self, key: str) -> int | None:
        """How many items a list has; None for an absent key."""
        stored = self._metadata.get(self._prefix + key)
        return None if stored is None else len(stored.items)

    def any(self, key: str) -> bool | int | float | str | list[Any] | None:
        """The value, whatever its type; None for an absent key. Bytes of a string that are not UTF-8 are replaced."""
        if (stored := self._metadata.get(self._prefix + key)) is None:
            return None
        values: list[Any] = [i.decode(errors="replace") if isinstance(i, bytes) else i for i in stored.items]
        if stored.type == GGUFValueType.BOOL:
            values = [bool(value) for value in values]
        return values if stored.is_list else values[0]

    def _stored(self, key: str, default: object) -> StoredValue | None:
        stored = self._metadata.get(self._prefix + key)
        if stored is None and default is REQUIRED:
            raise EvalEngineError(f"{self.path}: metadata key {self._prefix}{key} is missing; {CURE}")
        return stored

    def _texts(self, key: str, stored: StoredValue) -> list[str]:
        try:
            return [item.decode("utf-8") for item in stored.items if isinstance(item, bytes)]
        except UnicodeDecodeError:
            self._wrong(key, "UTF-8 text")

    def _wrong(self, key: str, expected: str) -> NoReturn:
        stored = self._metadata[self._prefix + key]
        if stored.is_list:
            actual = f"a list of {len(stored.items)} values of type {stored.type.name}"
        else:
            value = stored.items[0]
            actual = f"{stored.type.name} {f'{value[:40]!r}' if isinstance(value, bytes) else value}"
        raise EvalEngineError(f"{self.path}: metadata key {self._prefix}{key} is {actual}, expected {expected}; {CURE}")
