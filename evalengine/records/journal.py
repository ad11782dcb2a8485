"""`journal.jsonl`: a line for each finished request, appended as it finishes, so that an interrupted run resumes.

A line is a JSON object that names its run (the hash of the run's whole identity) and ends with a CRC-32 of the bytes
before it. A process killed in mid-write leaves a last line that fails its check; it is cut off and its request runs
again. A damaged line anywhere else, a line of another run, or one that cannot answer any request of this run is an
error: every answer in it must be one that this very run would have computed.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.errors import EvalEngineError
from evalengine.records.folder import write_failed, write_whole
from evalengine.records.schema import Answer, RecordKey
from evalengine.records.shapes import Count, Flag, Sha256, Text, fits, with_fields, wrong
from evalengine.util.plain_files import parse_json, read_bytes

PROBE = 4096  # bytes, a page of most file systems
# SHA-256 of a request's prompt ids, and a function that says why an answer cannot be its answer (None if it can).
Expected = tuple[str, Callable[[Answer], str | None]]
Entry = tuple[RecordKey, str, Answer]  # a request, SHA-256 of its prompt ids, and its answer


class LineFile:
    """A file of whole lines, open for more. Each append is one unbuffered write.

    Lines that the disk does not take whole are removed again. A killed process leaves at most an unfinished last line.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        """size: bytes of whole lines that the file has (default: up to its last newline); what follows them is removed.
        Raises OSError."""
        if size is None:
            size = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self.path, self.size = path, size
        self.lacking = 0  # bytes that the disk did not take when they were last appended; 0 if it did
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._longer = True  # whether the file may have more bytes than `size`
        self._shorten()

    def append(self, lines: bytes) -> None:
        """Adds whole lines. Raises EvalEngineError if the disk fails; the file then has none of them."""
        try:
            self._write(lines)
        except OSError as error:
            self.lacking = len(lines)
            raise write_failed(self.path, error) from error
        self.size += len(lines)
        self._longer, self.lacking = False, 0

    def problem(self) -> str | None:
        """Why nothing can be appended now; None if what the disk did not take last, and a page, has room. It is written
        and removed again."""
        try:
            self._write(b" " * max(self.lacking, PROBE))
            self._shorten()
        except OSError as error:
            return error.strerror or str(error)
        self.lacking = 0
        return None

    def close(self) -> None:
        """Forces the lines to disk and closes the file; further calls do nothing. Raises EvalEngineError if the disk
        fails."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failed(self.path, error) from error
        finally:
            self._file.close()

    def _write(self, content: bytes) -> None:
        """Writes behind the whole lines. Raises OSError if the disk does not take all of it."""
        self._shorten()  # no line may follow an unfinished one, where that could not be removed before
        self._longer = True
        try:
            written = 0
            while written < len(content):  # a full disk takes a part, and reports an error at the next write
                written += self._file.write(content[written:]) or 0
        except BaseException:  # Ctrl-C, too
            with suppress(OSError):
                self._shorten()
            raise

    def _shorten(self) -> None:
        if self._longer:
            self._file.truncate(self.size)
            self._longer = False


class Journal:
    """An open journal: `finished` holds the answers so far, `append` adds one.

    A killed process loses at most what it was appending (`LineFile`).
    """

    def __init__(self, path: Path, run_sha256: str, finished: dict[RecordKey, Answer], size: int) -> None:
        """size: bytes of the whole lines that `path` has. Raises OSError."""
        self.path = path
        self.finished = finished
        self._run_sha256 = run_sha256
        self.file = LineFile(path, size)

    @classmethod
    def open(cls, path: Path, run_sha256: str, expectation: Callable[[RecordKey], Expected | None]) -> Journal:
        """Reads `path` (it may not exist yet) and opens it for more.

        run_sha256: the hash of the run's identity (`RunFolder.identity_sha256`). expectation: gives what a request's
        answer must fit; None for a key that is not one of the run's requests.
        Raises `EvalEngineError`, with the line and the fix, for a line that is damaged or cannot be this run's.
        """
        try:
            content = read_bytes(path) if path.exists() else b""
            return cls(path, run_sha256, *_parse(content, run_sha256, expectation))
        except ValueError as error:
            fix = "delete this file (its run starts again) or set resume=never"
            raise EvalEngineError(f"{path}: {error}; {fix}") from error
        except OSError as error:
            raise write_failed(path, error) from error

    def append(self, *entries: Entry) -> None:
        """Adds finished requests. Raises `EvalEngineError` if the disk fails; the journal then has none of them."""
        self.file.append(b"".join(_encode(*entry, self._run_sha256) for entry in entries))
        self.finished.update((key, answer) for key, _, answer in entries)

    def note(self, key: RecordKey, answer: Answer) -> None:
        """Adds a request whose answer is stored elsewhere, and writes no line: a resumed run finds it there again."""
        self.finished[key] = answer

    def forget(self, keys: Set[RecordKey]) -> None:
        """Removes requests, as if they had not finished. The file is replaced whole or not at all."""
        self.close()
        try:
            lines = read_bytes(self.path).splitlines(keepends=True)
            remaining = b"".join(line for line in lines if record_key(_body(line).get("key")) not in keys)
            write_whole(self.path, lambda path: path.write_bytes(remaining))
            self.file = LineFile(self.path, len(remaining))
        except OSError as error:
            raise write_failed(self.path, error) from error
        self.finished = {key: answer for key, answer in self.finished.items() if key not in keys}

    def close(self) -> None:
        """Forces the lines to disk and closes the file; further calls do nothing."""
        self.file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _encode(key: RecordKey, prompt_sha256: str, answer: Answer, run_sha256: str) -> bytes:
    assert answer.logprobs.dtype == np.float32 and len(answer.logprobs) == len(answer.output_ids), key
    body: dict[str, Any] = {
        "run": run_sha256,
        "key": key,
        "prompt_sha256": prompt_sha256,
        "output_ids": answer.output_ids,
        "logprobs": _base64(answer.logprobs),
        "finish_reason": answer.finish_reason,
        "text": answer.text,
        "is_greedy": answer.is_greedy,
    }
    if answer.top_ids is not None and answer.top_logprobs is not None:
        body |= {"top_ids": answer.top_ids.ravel().tolist(), "top_logprobs": _base64(answer.top_logprobs)}
    start = json.dumps(body, separators=(",", ":")).encode()[:-1]
    return start + b',"crc":"%08x"}\n' % zlib.crc32(start)


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _parse(
    content: bytes, run_sha256: str, expectation: Callable[[RecordKey], Expected | None]
) -> tuple[dict[RecordKey, Answer], int]:
    """(finished requests, bytes of whole lines). Raises ValueError for a line that cannot be this run's."""
    finished: dict[RecordKey, Answer] = {}
    lines = content.splitlines(keepends=True)
    size = 0
    for number, line in enumerate(lines, 1):
        if not _is_whole(line):
            if number == len(lines):
                break
            raise ValueError(f"line {number} is damaged")
        try:
            key, prompt_sha256, answer = _decode(line, run_sha256)
            named, expected = "{}, document {}, request {}, repeat {}".format(*key), expectation(key)
            if expected is None:
                raise ValueError(f"the run has no request {named}")
            if key in finished:
                raise ValueError(f"{named} is in an earlier line")
            if prompt_sha256 != expected[0]:
                raise ValueError(f"{named}: it answers another prompt")
            if problem := expected[1](answer):
                raise ValueError(f"{named}: {problem}")
        except ValueError as error:
            raise ValueError(f"line {number} is not of this run: {error}") from error
        finished[key] = answer
        size += len(line)
    return finished, size


_TAIL = len(b',"crc":"00000000"}\n')
_LINE = with_fields(
    {
        "run": Sha256,
        "prompt_sha256": Sha256,
        "output_ids": list[Count],
        "logprobs": Text,
        "finish_reason": Text,
        "text": Text,
        "is_greedy": Flag,
        "top_ids?": list[Count],
        "top_logprobs?": Text,
    }
)
_KEY = tuple[Text, Count, Count, Count]


def _is_whole(line: bytes) -> bool:
    return line[-_TAIL:] == b',"crc":"%08x"}\n' % zlib.crc32(line[:-_TAIL])


def _body(line: bytes) -> Any:
    return parse_json(line[:-_TAIL] + b"}")


def _decode(line: bytes, run_sha256: str) -> Entry:
    """The entry. Raises ValueError if it is another run's, or no entry at all."""
    body = _body(line)
    if isinstance(body, dict) and body.get("run") != run_sha256:
        raise ValueError(f"it names the run {str(body.get('run'))[:12]}, and this one is {run_sha256[:12]}")
    if problem := wrong(body, _LINE):
        raise ValueError(problem)
    ids, values = _alternatives(body)
    answer = Answer(
        output_ids=body["output_ids"],
        logprobs=_floats(body["logprobs"]),
        finish_reason=body["finish_reason"],
        text=body["text"],
        is_greedy=body["is_greedy"],
        top_ids=ids,
        top_logprobs=values,
    )
    return record_key(body.get("key")), body["prompt_sha256"], answer


def _alternatives(body: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """The alternatives of a line's tokens; Nones if it has none. Raises ValueError if they make no table."""
    if "top_ids" not in body:
        return None, None
    flat, tokens, values = body["top_ids"], max(1, len(body["output_ids"])), _floats(body.get("top_logprobs", ""))
    if len(values) != len(flat) or len(flat) % tokens or max(flat, default=0) >= 1 << 31:
        raise ValueError("its alternatives are no table")
    ids = np.array(flat, dtype=np.int32).reshape(tokens, -1)
    return ids, values.reshape(ids.shape)


def _floats(text: str) -> np.ndarray:
    """The float32 numbers of a line's base64. Raises ValueError if they are none."""
    raw = base64.b64decode(text, validate=True)
    if len(raw) % 4:
        raise ValueError(f"its logprobs are {len(raw)} bytes, which no float32 numbers are")
    return np.frombuffer(raw, dtype="<f4").astype(np.float32, copy=False)


def record_key(value: Any) -> RecordKey:
    """The request's key of a JSON value. Raises ValueError if it is none."""
    if not fits(value, _KEY):
        raise ValueError("its key is no task, document, request and repeat")
    return (value[0], value[1], value[2], value[3])
