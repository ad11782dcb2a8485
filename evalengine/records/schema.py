"""A request's record, and `records.parquet`: a row per request, read back bit for bit."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise, repeat, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self

RecordKey = tuple[str, int, int, int]  # task, document, request index, repeat


@dataclass(frozen=True, eq=False)
class Answer:
    """An engine's answer to one request, from the engine to the report. Compare answers by their bits, not by
    `==`."""

    output_ids: Sequence[int]  # generated (up to and including the token that completes a stop), or scored
    logprobs: np.ndarray  # float32 [len(output_ids)]: natural log-probability of each token
    finish_reason: str  # stop | length
    text: str  # generated text, stop strings cut; empty for a score
    is_greedy: bool  # whether every token is the raw model's arg max
    # The n most probable tokens at each one, best first; None for a run that does not keep them.
    top_ids: np.ndarray | None = field(default=None, kw_only=True)  # int32 [len(output_ids), n]
    top_logprobs: np.ndarray | None = field(default=None, kw_only=True)  # float32 [len(output_ids), n]

    def without_top(self) -> Self:
        """The answer without alternatives, which no digest covers."""
        return replace(self, top_ids=None, top_logprobs=None)


Answers = Mapping[RecordKey, Answer]


@dataclass(frozen=True, eq=False)
class RequestRecord(Answer):
    """One finished request. Records compare by their digest's leaf (`digest.leaf_hash`), not by `==`."""

    task: str
    doc_id: int
    request_index: int  # counts a document's requests from 0: a choice, a rolling window
    repeat: int  # counts the samples of one request from 0
    kind: str  # generate_until | loglikelihood | loglikelihood_rolling
    prompt_ids: Sequence[int]
    prompt_sha256: str  # `ids_sha256(prompt_ids)`
    truncated: int  # tokens cut from the prompt's left
    # Only generations of a run that names the end of thinking have these; other runs lack the columns.
    thinking: str | None = None  # what was generated before the answer, with the text of its end
    thinking_tokens: int | None = None  # how many of `output_ids` that took
    thinking_truncated: bool | None = None  # the length limit came before the end
    # How the program in the text ended. Only tasks that run what the model wrote have this; other runs lack the column.
    outcome: str | None = None  # "passed", "failed: AssertionError", "timeout: ...", "memory", "refused: ..."

    @property
    def key(self) -> RecordKey:
        return (self.task, self.doc_id, self.request_index, self.repeat)


def ids_sha256(ids: Sequence[int]) -> str:
    """SHA-256 (hex) of token ids as int32 little-endian."""
    return hashlib.sha256(packed_ids(ids)).hexdigest()


def packed_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32 little-endian. A document's choices share a long prompt, which is packed once: comparing two
    lists takes a tenth of the time of packing one."""
    global _last_packed
    if type(ids) is not list:
        return np.asarray(ids, dtype="<i4").tobytes()
    if len(ids) < LONG:
        return struct.pack(f"<{len(ids)}i", *ids)  # of one token in a fifth of the time that an array takes
    last_ids, packed = _last_packed
    if ids != last_ids:
        packed = np.asarray(ids, dtype="<i4").tobytes()
        _last_packed = ids.copy(), packed  # a copy: the caller may change its list
    return packed


LONG = 64  # tokens from which on a packed list is worth remembering
_last_packed: tuple[list[int], bytes] = [], b""


def write_records(path: Path, records: Sequence[RequestRecord]) -> None:
    """Writes records as Parquet, in (task, document, request, repeat) order. Raises `OSError` if the disk refuses."""
    import pyarrow.parquet as pq

    # Arrow's dictionary encoding merges NaNs of different payloads, so only text columns may use it.
    ordered = sorted(records, key=lambda record: record.key)
    pq.write_table(_table(ordered), path, use_dictionary=["task", "kind", "finish_reason"], compression="zstd")


def read_records(path: Path, lists: bool = True) -> list[RequestRecord]:
    """The rows of a `records.parquet`, in its order.

    lists: whether token ids are lists of Python's integers, as the engine has them. Otherwise they are int32 arrays
    that share the file's buffer, which takes a third of the time.

    Raises OSError, and ValueError for a file that is damaged or whose columns are not those of records.
    """
    table = _read(path).combine_chunks()
    _check_columns({column.name: column.type for column in table.schema})
    columns: dict[str, Iterable[Any]] = {}
    for name in table.column_names:
        column, is_ids = table.column(name), lists and name in ("prompt_ids", "output_ids")
        values = _lists(column) if name in _LISTS else column.to_pylist()
        columns[name] = _plain_lists(values) if is_ids else values
    names = [item.name for item in fields(RequestRecord) if not item.kw_only]
    rows = zip(*(columns.get(name, repeat(None)) for name in names), strict=False)
    if "top_ids" not in columns:
        return [*starmap(RequestRecord, rows)]
    found = []
    for row, ids, values in zip(rows, columns["top_ids"], columns["top_logprobs"], strict=True):
        shape = (len(row[0]), -1)
        # A row without alternatives has empty lists.
        top = {"top_ids": ids.reshape(shape), "top_logprobs": values.reshape(shape)} if len(ids) else {}
        found.append(RequestRecord(*row, **top))
    return found


def read_endings(path: Path) -> dict[RecordKey, tuple[str, int]]:
    """Each request's (finish reason, number of prompt tokens), without reading the tokens themselves."""
    import pyarrow.compute as pc

    names = (*_KEY, "finish_reason")
    table = _read(path, [*names, "prompt_ids"])
    lengths = pc.list_value_length(table.column("prompt_ids")).to_pylist()
    *key, reasons = (table.column(name).to_pylist() for name in names)
    return dict(zip(zip(*key, strict=True), zip(reasons, lengths, strict=True), strict=True))


def read_kinds(path: Path) -> dict[str, str]:
    """Each task's kind of request."""
    tasks, kinds = (column.to_pylist() for column in _read(path, ["task", "kind"]).columns)
    return dict(zip(tasks, kinds, strict=True))


def read_optional(path: Path, *names: str) -> dict[RecordKey, tuple[Any, ...]]:
    """Each request's values in optional columns, without requests that have none in the first of them, such as
    `thinking_tokens` and `thinking_truncated`, or `outcome`."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        if names[0] not in file.schema_arrow.names:
            return {}
        table = file.read([*_KEY, *names])
    rows = zip(*(table.column(name).to_pylist() for name in (*_KEY, *names)), strict=True)
    return {row[:4]: row[4:] for row in rows if row[4] is not None}


_KEY = ("task", "doc_id", "request_index", "repeat")
_COLUMNS = {  # in the file's order
    "task": "string",
    "doc_id": "int64",
    "request_index": "int64",
    "repeat": "int64",
    "kind": "string",
    "prompt_ids": "int32",
    "prompt_sha256": "string",
    "output_ids": "int32",
    "logprobs": "float32",
    "finish_reason": "string",
    "truncated": "int64",
    "text": "string",
    "is_greedy": "bool_",
    "thinking": "string",
    "thinking_tokens": "int64",
    "thinking_truncated": "bool_",
    "outcome": "string",
    "top_ids": "int32",
    "top_logprobs": "float32",
}
_LISTS = ("prompt_ids", "output_ids", "logprobs", "top_ids", "top_logprobs")
# Columns that are written if any row has a value.
_OPTIONAL = ("thinking", "thinking_tokens", "thinking_truncated", "outcome", "top_ids", "top_logprobs")
_LONGEST = (1 << 31) - 1  # bytes of all texts of one array, whose offsets are int32


def _read(path: Path, columns: list[str] | None = None) -> Any:
    """The file's columns (default: all). One file needs no `read_table`, whose dataset modules take 0.2 s to import."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        return file.read(columns)


def _check_columns(types: dict[str, Any]) -> None:
    """Raises ValueError unless all columns of records are there with their types, and no others."""
    import pyarrow as pa

    wrong = []
    for name, kind in types.items():
        inner = getattr(kind, "value_type", None)  # of a list
        known = name in _COLUMNS and (inner is not None) == (name in _LISTS)
        if not known or (kind if inner is None else inner) != getattr(pa, _COLUMNS[name])():
            wrong.append(name)
    wrong += ["top_ids"] if ("top_ids" in types) != ("top_logprobs" in types) else []
    if missing := [name for name in _COLUMNS if name not in _OPTIONAL and name not in types] + wrong:
        raise ValueError(f"not a file of records: it lacks a column or has one of another kind: {missing[0][:60]}")


def _table(records: Sequence[RequestRecord]) -> Any:
    import pyarrow as pa

    columns = {}
    for name, kind in _COLUMNS.items():
        values = [getattr(record, name) for record in records]
        if name in _OPTIONAL and all(value is None for value in values):
            continue
        if name in _LISTS:
            flat = [() if value is None else value.ravel() for value in values] if name in _OPTIONAL else values
            columns[name] = _list_column(flat, kind)
        else:
            columns[name] = pa.array(values, type=getattr(pa, kind)()) if name in _OPTIONAL else _column(values, kind)
    return pa.Table.from_arrays([*columns.values()], [*columns])


def _column(values: Sequence[Any], kind: str) -> Any:
    """Values without nulls as an Arrow array.

    It is made of its buffers: `pyarrow.array` imports pandas, if that is installed, to see whether it was given some,
    which takes 0.3 s of every run.
    """
    import pyarrow as pa

    if kind == "int64":
        return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.array(values, dtype="<i8"))])
    if kind == "bool_":
        bits = np.packbits(np.array(values, dtype=bool), bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])
    texts = [value.encode("utf-8") for value in values]
    ends = np.cumsum([0, *map(len, texts)], dtype="<i8")
    if ends[-1] > _LONGEST:
        return pa.array(values, type=pa.string())  # in chunks
    return pa.StringArray.from_buffers(
        len(values), pa.py_buffer(ends.astype("<i4")), pa.py_buffer(b"".join(texts)), None, 0
    )


def _list_column(rows: Sequence[Any], kind: str) -> Any:
    import pyarrow as pa

    if kind == "int32":
        values = np.frombuffer(b"".join([packed_ids(row) for row in rows]), dtype="<i4")
    else:  # one buffer: the bits go in as they are
        values = np.concatenate([np.empty(0, dtype=kind), *(np.asarray(row, dtype=kind) for row in rows)])
    offsets = np.cumsum([0, *map(len, rows)], dtype="int64")
    flat = pa.Array.from_buffers(getattr(pa, kind)(), len(values), [None, pa.py_buffer(values)])
    return pa.LargeListArray.from_arrays(
        pa.Array.from_buffers(pa.int64(), len(offsets), [None, pa.py_buffer(offsets)]), flat
    )


def _plain_lists(arrays: Sequence[np.ndarray]) -> list[list[int]]:
    """Lists of integers; equal neighbours, as a document's choices have them, are one list."""
    lists: list[list[int]] = []
    last = None
    for array in arrays:
        raw = array.tobytes()
        lists.append(lists[-1] if raw == last else array.tolist())
        last = raw
    return lists


def _lists(column: Any) -> list[np.ndarray]:
    """A list column as one array a row, which share the column's buffer."""
    import pyarrow as pa

    if not len(column):
        return []
    array = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    offsets, values = np.from_dlpack(array.offsets), np.from_dlpack(array.values)  # to_numpy() would import pandas
    return [values[start:end] for start, end in pairwise(offsets)]
