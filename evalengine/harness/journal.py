"""`journal.jsonl`: a line for each finished request, appended as it finishes, so that an interrupted run resumes.

A line is a JSON object whose last member is a CRC-32 of the bytes before it. A process killed in mid-write leaves a
last line that fails its check; it is cut off and its request runs again. A damaged line anywhere else is an error.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from evalengine.errors import EvalEngineError
from evalengine.records.schema import RecordKey


@dataclass(frozen=True, eq=False)
class JournalEntry:
    """What the engine answered to one request, and the hash of the prompt it answered."""

    key: RecordKey
    prompt_sha256: str
    output_ids: list[int]
    logprobs: np.ndarray  # float32 [len(output_ids)]
    finish_reason: str
    text: str
    is_greedy: bool
    top_logprobs: list[dict[int, float]] | None = None


class Journal:
    """An open journal: `finished` holds what is already done, `append` adds to it.

    Each append is one unbuffered write, so a killed process loses at most the line it was writing.
    """

    def __init__(self, path: Path, finished: dict[RecordKey, JournalEntry], size: int) -> None:
        self.path = path
        self.finished = finished
        self._size = size  # bytes of whole lines
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Reads `path` (it may not exist yet) and opens it for more. Raises `EvalEngineError` if a line is damaged."""
        try:
            content = path.read_bytes() if path.exists() else b""
            finished, size = _parse(content, path)
            if size < len(content):
                os.truncate(path, size)
            return cls(path, finished, size)
        except OSError as error:
            raise _failed(path, error) from error

    def append(self, entry: JournalEntry) -> None:
        """Adds one finished request. Raises `EvalEngineError` if the disk refuses; the journal stays whole."""
        line = _encode(entry)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            os.truncate(self.path, self._size)
            raise _failed(self.path, error) from error
        self._size += len(line)
        self.finished[entry.key] = entry

    def close(self) -> None:
        """Forces the lines to disk and closes the file; further calls do nothing."""
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise _failed(self.path, error) from error
            finally:
                self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _encode(entry: JournalEntry) -> bytes:
    assert entry.logprobs.dtype == np.float32 and len(entry.logprobs) == len(entry.output_ids), entry.key
    body: dict[str, Any] = {
        "key": entry.key,
        "prompt_sha256": entry.prompt_sha256,
        "output_ids": entry.output_ids,
        "logprobs": base64.b64encode(entry.logprobs.astype("<f4").tobytes()).decode(),
        "finish_reason": entry.finish_reason,
        "text": entry.text,
        "is_greedy": entry.is_greedy,
    }
    if entry.top_logprobs is not None:
        body["top_logprobs"] = [list(position.items()) for position in entry.top_logprobs]
    start = json.dumps(body, separators=(",", ":")).encode()[:-1]
    return start + b',"crc":"%08x"}\n' % zlib.crc32(start)


def _parse(content: bytes, path: Path) -> tuple[dict[RecordKey, JournalEntry], int]:
    """(finished requests, bytes of whole lines)."""
    finished: dict[RecordKey, JournalEntry] = {}
    lines = content.splitlines(keepends=True)
    size = 0
    for number, line in enumerate(lines, 1):
        entry = _decode(line)
        if entry is None:
            if number == len(lines):
                break
            raise EvalEngineError(
                f"{path}: line {number} is damaged; delete this file (its run starts again) or set resume=never"
            )
        finished[entry.key] = entry
        size += len(line)
    return finished, size


_TAIL = len(b',"crc":"00000000"}\n')


def _decode(line: bytes) -> JournalEntry | None:
    """The entry, or None if the line is not whole."""
    start, tail = line[:-_TAIL], line[-_TAIL:]
    if tail != b',"crc":"%08x"}\n' % zlib.crc32(start):
        return None
    body = json.loads(start + b"}")
    task, doc_id, index, repeat = body["key"]
    alternatives = body.get("top_logprobs")
    return JournalEntry(
        key=(task, doc_id, index, repeat),
        prompt_sha256=body["prompt_sha256"],
        output_ids=body["output_ids"],
        logprobs=np.frombuffer(base64.b64decode(body["logprobs"]), dtype="<f4").astype(np.float32, copy=False),
        finish_reason=body["finish_reason"],
        text=body["text"],
        is_greedy=body["is_greedy"],
        top_logprobs=None if alternatives is None else [dict(map(tuple, position)) for position in alternatives],
    )


def _failed(path: Path, error: OSError) -> EvalEngineError:
    why = error.strerror or error
    return EvalEngineError(f"could not write {path}: {why}; cure that and run the same command again: it resumes")
