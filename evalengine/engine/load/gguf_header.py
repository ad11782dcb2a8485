"""The header of a GGUF file: its metadata as stored, and where each tensor lies. Every value is checked before use.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` library's own reader computes in numpy's
64-bit integers, which wrap, takes the offsets as they come and follows any length: a damaged header made it loop, or
gave weights from elsewhere in the file. Here every length is held against the file's, in Python's integers, and the
tensors must lie as llama.cpp's reader demands (`gguf_init_from_file_impl` in ggml/src/gguf.cpp): in the order of their
descriptions, without gaps but for the alignment's padding.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from mmap import mmap

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # both have the same layout; 3 only adds files of the other byte order
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
# A larger count or length comes from a damaged file, and would take memory before the file's end shows the damage.
MAX_ITEMS = 1 << 23  # items of all lists together; four lists are as long as a vocabulary, at most 2^18 tokens
MAX_STRING = 1 << 28  # bytes
MAX_NAME = 1 << 10  # bytes of a key or a tensor's name

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

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor's bytes: a row's length is that of its blocks in bytes."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return (*self.shape[:-1], self.shape[-1] // block * block_bytes)


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata by key and tensors by name, both in file order."""

    metadata: dict[str, StoredValue]
    tensors: dict[str, TensorInfo]
    end: int  # byte offset behind the last tensor and its padding, which the file may lack


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
            raise ValueError(f"the header at byte {self.at} asks for {count} bytes more, the file has {self.end}")
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
        return DEFAULT_ALIGNMENT
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
