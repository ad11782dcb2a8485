"""Workloads as files: gzip JSON lines of token ids, `<name>.jsonl.gz`, the same for every engine that is compared.

A line is a segment or a request (one for each continuation):

    {"kind": "segment", "ids": [...]}                                          numbered from 0 in file order
    {"kind": "generate", "prompt": [...], "max_tokens": n}
    {"kind": "loglikelihood", "context": [...], "continuations": [[...], ...]}

`"segments": [i, ...]` in a request puts those segments before its prompt or context. Nothing else is read, and
nothing unknown is passed over: a misspelt key would make another workload, and a ratio of two different ones.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.errors import ConfigError, first_of
from evalengine.records.shapes import Count, Text, with_fields, wrong
from evalengine.util.plain_files import parse_json, read_bytes
from evalengine.util.validation import must

SUFFIX = ".jsonl.gz"
LARGEST_TEXT = 1 << 30  # bytes of a file's text: a gzip of a megabyte can unpack to a thousand times as many
LONGEST = 1 << 24  # tokens of a request: a line can name one segment a million times
MOST_LISTED = 10
_IDS = Annotated[list[Count], must("be a list of token ids")]
_BEFORE = {"kind": Text, "segments?": Annotated[list[Count], must("be a list of the segments' numbers, from 0")]}
_SOME = Annotated[list[Annotated[_IDS, Field(min_length=1)]], Field(min_length=1)]
LINES = {  # a line's kind -> its keys
    "segment": with_fields({"kind": Text, "ids": _IDS}, only=True),
    "generate": with_fields(
        {**_BEFORE, "prompt": _IDS, "max_tokens": Annotated[Count, Field(ge=1, le=LONGEST)]}, only=True
    ),
    "loglikelihood": with_fields({**_BEFORE, "context": _IDS, "continuations": _SOME}, only=True),
}


def workload_files(folder: Path) -> dict[str, Path]:
    """The folder's workloads by name. Raises ConfigError for a folder that has none."""
    try:
        paths = {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}
    except OSError as error:
        raise ConfigError(f"--files {folder}: {error.strerror or error}") from error
    if not paths:
        raise ConfigError(f"--files {folder}: no *{SUFFIX} there; name the folder that holds the workloads' files")
    return paths


def read_workload(path: Path, vocab_size: int) -> list[Request]:
    """The file's requests, numbered from 0 in its order.

    Raises ConfigError that lists the damaged lines: no JSON, an unknown kind or key, ids outside the vocabulary, ...
    """
    problems: list[str] = []
    lines: list[tuple[int, dict[str, Any]]] = []
    for number, text in _texts(path):
        try:
            lines.append((number, _checked(parse_json(text), vocab_size)))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    segments = [line["ids"] for _, line in lines if line["kind"] == "segment"]
    requests: list[Request] = []
    for number, line in lines:
        named = line.get("segments") or ()
        if unknown := [i for i in named if i >= len(segments)]:
            problems.append(f"line {number}: segment {unknown[0]} is not in the file, which has {len(segments)}")
        elif sum(len(segments[i]) for i in named) > LONGEST:
            problems.append(f"line {number}: its segments have more than {LONGEST:,} tokens")
        elif line["kind"] != "segment":
            before = [token for i in named for token in segments[i]]
            requests.extend(_requests(len(requests), before, line, problems, number))
    if not requests and not problems:
        problems.append("it holds no request")
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in first_of(problems, MOST_LISTED)])
    return requests


def generation(number: int, prompt: list[int], max_tokens: int) -> GenerateRequest:
    """A greedy request of exactly `max_tokens` tokens: the end-of-sequence token is a token like any other."""
    return GenerateRequest(number, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1."""
    try:
        with gzip.open(io.BytesIO(read_bytes(path))) as stream:
            content = stream.read(LARGEST_TEXT + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read as gzip ({error}); copy it again") from error
    if len(content) > LARGEST_TEXT:
        raise ConfigError(f"{path}: its text is longer than {LARGEST_TEXT >> 20} MiB; split it into several workloads")
    return ((number, text) for number, text in enumerate(content.split(b"\n"), 1) if text.strip())


def _checked(line: Any, vocab_size: int) -> dict[str, Any]:
    """Returns the line if it follows the format. Raises ValueError with a sentence otherwise."""
    kind = line.get("kind") if isinstance(line, dict) else None
    if not isinstance(kind, str) or kind not in LINES:
        raise ValueError(f"no object whose kind is {', '.join(LINES)}")
    if problem := wrong(line, LINES[kind]):
        raise ValueError(problem)
    ids = [line.get(key, ()) for key in ("ids", "prompt", "context")] + line.get("continuations", [])
    if (largest := max(chain.from_iterable(ids), default=0)) >= vocab_size:
        raise ValueError(f"token id {largest} is beyond the model's vocabulary, 0 ... {vocab_size - 1}")
    checked: dict[str, Any] = line
    return checked


def _requests(
    first: int, before: list[int], line: dict[str, Any], problems: list[str], number: int
) -> Iterator[Request]:
    ids = before + line["prompt" if line["kind"] == "generate" else "context"]
    if not ids:
        problems.append(f"line {number}: nothing precedes the first requested token; give at least one")
    elif line["kind"] == "generate":
        yield generation(first, ids, line["max_tokens"])
    else:
        for i, continuation in enumerate(line["continuations"]):
            yield ScoreRequest(first + i, ids, continuation)
