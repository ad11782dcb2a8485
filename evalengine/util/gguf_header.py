"""The header of a GGUF file: its metadata, read by type, and where each tensor's bytes are, all checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` library gives the constants and the
dequantisation. Its `GGUFReader` (0.19) is not used, for two reasons:

- It makes an array for every item. With 150,000 tokens and as many merges it takes 7 s and 1 GB, this module 0.25 s.
- It does not check lengths and offsets, and computes in 64-bit integers, which wrap. A list that claims more items than
  the file has makes it loop (6 s per million items), overlapping tensors are accepted, other damage is an IndexError.

Here every length is compared with the file's, in Python's integers. The tensors must be placed as llama.cpp's reader
requires (`gguf_init_from_file_impl` in ggml/src/gguf.cpp): in the order of their descriptions, without gaps except for
the alignment's padding.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from evalengine.errors import EvalEngineError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # both have the same layout; 3 only adds files of the other byte order
ALIGNMENT_KEY = "general.alignment"
MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
# A larger count or length comes from a damaged file, and would take memory before the file's end shows the damage.
MAX_ITEMS = 1 << 23  # items of all lists together; four lists are as long as a vocabulary, at most 2^18 tokens
MAX_STRING = 1 << 28  # bytes
MAX_NAME = 1 << 10  # bytes of a key or a tensor's name
FIX = "download or copy it again, or set model.path to another file"
FLOATS = (GGUFValueType.FLOAT32, GGUFValueType.FLOAT64)
NOT_INTEGERS = (*FLOATS, GGUFValueType.STRING, GGUFValueType.BOOL)
NO_TOKEN = (1 << 32) - 1  # -1, in the type that token ids have
LARGEST = (1 << 63) - 1  # the largest signed integer of 64 bits
REQUIRED: Any = object()  # the default of a key that must be there

Default = TypeVar("Default")

# struct's letters of the types with a fixed size; the format is little-endian.
SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "B",  # read as a number, so that 2 is found to be neither true nor false
}


@dataclass(frozen=True)
class StoredValue:
    """One metadata value as the file has it. Strings stay bytes: an unread string need not be UTF-8."""

    type: GGUFValueType  # the type of the value, or of each item
    items: tuple[int | float | bytes, ...]
    is_list: bool = False


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its type and where its bytes are."""

    name: str
    shape: tuple[int, ...]  # in torch's order: the row's length is last
    kind: GGMLQuantizationType
    start: int  # byte offset in the file
    size: int  # bytes

    def stored(self, data: mmap) -> np.ndarray:
        """The tensor's bytes as they are in the file, uint8: the tensor's shape with rows of blocks in bytes."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        shape = (*self.shape[:-1], self.shape[-1] // block * block_bytes)
        return np.frombuffer(data, np.uint8, self.size, self.start).reshape(shape)


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata by key and tensors by name, both in file order."""

    metadata: dict[str, StoredValue]
    tensors: dict[str, TensorInfo]
    end: int  # byte offset behind the last tensor and its padding, which the file may lack


def open_gguf(path: Path) -> tuple[mmap, GGUFHeader]:
    """A file's content and header. Raises OSError, or ValueError as `read_header` does, also for an empty file."""
    with path.open("rb") as stream:
        data = mmap(stream.fileno(), 0, access=ACCESS_READ)
    return data, read_header(data)


def read_header(data: mmap | bytes) -> GGUFHeader:
    """The header of a whole GGUF file. Raises ValueError with what is wrong, in words that follow "not a GGUF file"."""
    cursor = _Cursor(data)
    if (magic := cursor.take(4)) != MAGIC:
        raise ValueError(f"it begins with {magic!r}, not with {MAGIC!r}")
    version = cursor.integer("I")
    if version and version & 0xFFFF == 0:
        raise ValueError("it is in big-endian byte order, which is not supported; convert it (gguf-convert-endian)")
    if version not in VERSIONS:
        raise ValueError(f"it has version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are supported")
    tensor_count, value_count = cursor.count("tensors"), cursor.count("metadata values")
    metadata: dict[str, StoredValue] = {}
    for _ in range(value_count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise ValueError(f"metadata key {key} occurs twice")
        metadata[key] = _value(cursor, key)
    described = [_described(cursor) for _ in range(tensor_count)]
    return GGUFHeader(metadata, *_laid_out(described, cursor.at, _alignment(metadata), len(data)))


class _Cursor:
    """A place in the file, from which values are read. Raises ValueError for a value beyond the file's end."""

    def __init__(self, data: mmap | bytes) -> None:
        self.data, self.at, self.end = data, 0, len(data)
        self.items_left = MAX_ITEMS

    def take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise ValueError(f"the header at byte {self.at} needs {count} bytes more, the file has {self.end}")
        taken = self.data[self.at : self.at + count]
        self.at += count
        return taken

    def integer(self, letter: str) -> int:
        return int(self.numbers(letter, 1)[0])

    def numbers(self, letter: str, count: int) -> tuple[int | float, ...]:
        form = f"<{count}{letter}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def count(self, what: str) -> int:
        """How many items a list of the header has. Raises ValueError once all lists have more than any model needs."""
        count = self.integer("Q")
        self.items_left -= count
        if self.items_left < 0:
            raise ValueError(f"it claims {count} {what}, more than any model has")
        return count

    def string(self) -> bytes:
        length = self.integer("Q")
        if length > MAX_STRING:
            raise ValueError(f"the header at byte {self.at} has a string of {length} bytes, longer than any model's")
        return self.take(length)

    def text(self, what: str) -> str:
        raw = self.string()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8: {raw[:40]!r}") from error
        if not text.isprintable() or not 0 < len(raw) <= MAX_NAME:
            raise ValueError(f"{what} cannot be meant: {raw[:40]!r}")
        return text


def _value(cursor: _Cursor, key: str) -> StoredValue:
    kind = _value_type(cursor.integer("I"), key)
    if kind != GGUFValueType.ARRAY:
        return StoredValue(kind, _items(cursor, kind, 1))
    kind = _value_type(cursor.integer("I"), key)
    if kind == GGUFValueType.ARRAY:  # the format allows it, but no known file has one and llama.cpp refuses it
        raise ValueError(f"metadata key {key} is a list of lists")
    count = cursor.count(f"items of metadata key {key}")
    return StoredValue(kind, _items(cursor, kind, count), is_list=True)


def _items(cursor: _Cursor, kind: GGUFValueType, count: int) -> tuple[int | float | bytes, ...]:
    if kind == GGUFValueType.STRING:
        return tuple(cursor.string() for _ in range(count))
    return cursor.numbers(SCALARS[kind], count)


def _value_type(number: int, key: str) -> GGUFValueType:
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise ValueError(f"metadata key {key} has type {number}, which the format does not know") from error


def _alignment(metadata: dict[str, StoredValue]) -> int:
    if (stored := metadata.get(ALIGNMENT_KEY)) is None:
        return GGUF_DEFAULT_ALIGNMENT
    value = stored.items[0] if stored.type == GGUFValueType.UINT32 and not stored.is_list else None
    if not isinstance(value, int) or value.bit_count() != 1:
        raise ValueError(f"{ALIGNMENT_KEY} must be a power of two, an unsigned integer of 32 bits")
    return value


def _described(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """One tensor's name, shape (a row's length last), type and offset in the data."""
    name = cursor.text("a tensor's name")
    dims = cursor.integer("I")
    if not 1 <= dims <= MAX_DIMS:
        raise ValueError(f"tensor {name} has {dims} dimensions, expected 1 to {MAX_DIMS}")
    shape = tuple(int(size) for size in reversed(cursor.numbers("Q", dims)))
    number, offset = cursor.integer("I"), cursor.integer("Q")
    try:
        kind = GGMLQuantizationType(number)
        block, _ = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ValueError(f"tensor {name} has type {number}, which the gguf library does not know") from error
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"tensor {name} is {kind.name} {list(shape)}: rows must be multiples of {block}, none empty")
    return name, shape, kind, offset


def _laid_out(
    described: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], header_end: int, alignment: int, end: int
) -> tuple[dict[str, TensorInfo], int]:
    """The tensors by name, each of which must begin where the one before ends, and where the last one ends."""
    data_start = _padded(header_end, alignment)
    tensors: dict[str, TensorInfo] = {}
    at = 0
    for name, shape, kind, offset in described:
        if name in tensors:
            raise ValueError(f"tensor {name} occurs twice")
        if offset != at:
            raise ValueError(f"tensor {name} is at offset {offset}, expected {at}, where the one before ends")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = math.prod(shape) // block * block_bytes
        if data_start + at + size > end:
            raise ValueError(f"tensor {name} ends at byte {data_start + at + size}, the file has {end}")
        tensors[name] = TensorInfo(name, shape, kind, data_start + at, size)
        at = _padded(at + size, alignment)
    return tensors, data_start + at


def _padded(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


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
            raise EvalEngineError(f"{self.path}: metadata key {self._prefix}{key} is missing; {FIX}")
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
        raise EvalEngineError(f"{self.path}: metadata key {self._prefix}{key} is {actual}, expected {expected}; {FIX}")


def shown(text: object) -> str:
    """A file's text in a message: shortened, and quoted if a terminal would not show it as it is."""
    short = str(text)[:100]
    return short if short.isprintable() else repr(short)
