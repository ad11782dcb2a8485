"""A request's record, and `records.parquet`: a row per request, read back bit for bit."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np

RecordKey = tuple[str, int, int, int]  # task, document, request index, repeat


@dataclass(eq=False)  # A frozen one takes eight times as long to make, and a run makes one for each request.
class RequestRecord:
    """One finished request. Records compare by their digest's leaf (`digest.leaf_hash`), not by `==`."""

    task: str
    doc_id: int
    request_index: int  # counts a document's requests from 0: a choice, a rolling window
    repeat: int  # counts the samples of one request from 0
    kind: str  # generate_until | loglikelihood | loglikelihood_rolling
    prompt_ids: Sequence[int]
    prompt_sha256: str  # `ids_sha256(prompt_ids)`
    output_ids: Sequence[int]  # generated (up to and including the token that completes a stop), or scored
    logprobs: np.ndarray  # float32 [len(output_ids)]
    finish_reason: str  # stop | length
    truncated: int  # tokens cut from the prompt's left
    text: str  # generated text, stop strings cut
    is_greedy: bool
    # Only generations of a run that names the end of thinking have these; other runs lack the columns.
    thinking: str | None = None  # what was generated before the answer, with the text of its end
    thinking_tokens: int | None = None  # how many of `output_ids` that took
    thinking_truncated: bool | None = None  # the length limit came before the end
    # How the program in the text ended. Only tasks that run what the model wrote have this; other runs lack the column.
    outcome: str | None = None  # "passed", "failed: AssertionError", "timeout: ...", "memory", "refused: ..."
    # The n most probable tokens at each generated one, best first. Runs that do not keep them lack the columns.
    top_ids: np.ndarray | None = None  # int32 [len(output_ids) * n]
    top_logprobs: np.ndarray | None = None  # float32 [len(output_ids) * n]

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
    columns: dict[str, list[Any]] = {
        name: _lists(table.column(name)) if name in (*_LISTS, *_OPTIONAL_LISTS) else table.column(name).to_pylist()
        for name in table.column_names
    }
    for name in ("prompt_ids", "output_ids") if lists else ():
        columns[name] = _plain_lists(columns[name])
    rows = zip(*columns.values(), strict=True)
    if [*columns] == [item.name for item in fields(RequestRecord)][: len(columns)]:  # as most runs have them
        return [*starmap(RequestRecord, rows)]
    return [RequestRecord(**dict(zip(columns, row, strict=True))) for row in rows]


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


def read_thinking(path: Path) -> dict[RecordKey, tuple[int, bool]]:
    """Each generation's (tokens of its thinking, whether the length limit came before its end); empty for a run that
    named no end of thinking."""
    columns = _names(path)
    if "thinking_tokens" not in columns:
        return {}
    table = _read(path, [*_KEY, "thinking_tokens", "thinking_truncated"])
    *key, tokens, truncated = (column.to_pylist() for column in table.columns)
    rows = zip(zip(*key, strict=True), tokens, truncated, strict=True)
    return {place: (count, bool(cut)) for place, count, cut in rows if count is not None}


def read_outcomes(path: Path) -> dict[RecordKey, str]:
    """How the program in each generation ended; empty for a run that ran none."""
    if "outcome" not in _names(path):
        return {}
    *key, outcomes = (column.to_pylist() for column in _read(path, [*_KEY, "outcome"]).columns)
    rows = zip(zip(*key, strict=True), outcomes, strict=True)
    return {place: outcome for place, outcome in rows if outcome is not None}


def _names(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        return list(file.schema_arrow.names)


_KEY = ("task", "doc_id", "request_index", "repeat")
_LISTS = {"prompt_ids": "int32", "output_ids": "int32", "logprobs": "float32"}
_SCALARS = {
    "task": "string",
    "doc_id": "int64",
    "request_index": "int64",
    "repeat": "int64",
    "kind": "string",
    "prompt_sha256": "string",
    "finish_reason": "string",
    "truncated": "int64",
    "text": "string",
    "is_greedy": "bool_",
}
_LONGEST = (1 << 31) - 1  # bytes of all texts of one array, whose offsets are int32
_OPTIONAL_LISTS = {"top_ids": "int32", "top_logprobs": "float32"}
_OPTIONAL = {  # columns that are written where any row has a value
    "thinking": "string",
    "thinking_tokens": "int64",
    "thinking_truncated": "bool_",
    "outcome": "string",
}


def _read(path: Path, columns: list[str] | None = None) -> Any:
    """The file's columns (default: all). One file needs no `read_table`, whose dataset modules take 0.2 s to import."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        return file.read(columns)


def _check_columns(types: dict[str, Any]) -> None:
    """Raises ValueError unless all columns of records are there with their types, and no others."""
    import pyarrow as pa

    flat, lists = {**_SCALARS, **_OPTIONAL}, {**_LISTS, **_OPTIONAL_LISTS}
    wrong = []
    for name, kind in types.items():
        inner = getattr(kind, "value_type", None)  # of a list
        wanted = lists.get(name) if inner is not None else flat.get(name)
        if wanted is None or (kind if inner is None else inner) != getattr(pa, wanted)():
            wrong.append(name)
    if missing := [name for name in (*_SCALARS, *_LISTS) if name not in types] + wrong:
        raise ValueError(f"not a file of records: it lacks a column or has one of another kind: {missing[0][:60]}")


def _table(records: Sequence[RequestRecord]) -> Any:
    import pyarrow as pa

    columns = {name: _column([getattr(record, name) for record in records], kind) for name, kind in _SCALARS.items()}
    for name, kind in _LISTS.items():
        columns[name] = _list_column([getattr(record, name) for record in records], kind)
    for name, kind in _OPTIONAL_LISTS.items():
        if any(getattr(record, name) is not None for record in records):
            none = np.empty(0, dtype=kind)  # what a row without such a list holds
            columns[name] = _list_column([none if (x := getattr(r, name)) is None else x for r in records], kind)
    for name, kind in _OPTIONAL.items():
        values = [getattr(record, name) for record in records]
        if any(value is not None for value in values):
            columns[name] = pa.array(values, type=getattr(pa, kind)())
    names = [item.name for item in fields(RequestRecord) if item.name in columns]
    return pa.Table.from_arrays([columns[name] for name in names], names)


def _column(values: Sequence[Any], kind: str) -> Any:
    """Values without nulls as an Arrow array of one of `_SCALARS`' types.

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
