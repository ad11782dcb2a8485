"""`asked.jsonl`: what was asked of a model that others asked, a line a request, as the engine was given it.

A run of tasks is planned again from its rows. Requests that came from clients stand nowhere else, so that they are kept
beside the answers: `check` and `prove` compute them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.errors import ConfigError
from evalengine.harness.requests import HarnessRequest
from evalengine.records.evidence import ASKED
from evalengine.records.schema import RecordKey
from evalengine.records.shapes import Count, Text, fits, with_fields, wrong
from evalengine.util.plain_files import parse_json, read_bytes

SERVED = "serve"  # `harness` of a run's identity whose requests came from clients
_KEY = tuple[Text, Count, Count, Count]
_LINE = with_fields({
    "key": list, "prompt_ids": list[Count], "params?": dict, "scored?": list[Count], "logprobs?": Count
})  # fmt: skip


def with_own_noise(request: GenerateRequest) -> GenerateRequest:
    """The same request by itself: which of a prompt's samples it is goes into the name of its noise."""
    if not request.sample:
        return request
    name = request.params.noise_key
    if name is None:
        name = "ids:" + ",".join(map(str, request.prompt_ids))
    return replace(request, sample=0, params=replace(request.params, noise_key=f"{name}\0sample {request.sample}"))


def asked_line(key: RecordKey, request: Request) -> bytes:
    """The line of one request."""
    line: dict[str, Any] = {"key": key, "prompt_ids": request.prompt_ids}
    if isinstance(request, GenerateRequest):
        assert not request.sample, "with_own_noise"
        line["params"] = asdict(request.params)
    else:
        line |= {"scored": request.continuation_ids, "logprobs": request.logprobs}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def read_asked(folder: Path, unfinished: bool = False) -> dict[RecordKey, Request]:
    """Key -> request, numbered from 0 in the file's order.

    unfinished: whether a last line that was cut off by a kill may be there; it is left out.
    Raises ConfigError for a file that is missing or damaged.
    """
    file = folder / ASKED
    try:
        content = read_bytes(file)
        whole = content[: content.rfind(b"\n") + 1] if unfinished else content
        requests: dict[RecordKey, Request] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            key, request = _request(parse_json(line), len(requests), number)
            if key in requests:
                raise ValueError(f"line {number}: its key stands in a line before")
            requests[key] = request
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: missing or damaged ({error}); take the folder from where it was copied") from error
    return requests


def in_order(asked: Mapping[RecordKey, Request]) -> list[HarnessRequest]:
    """The requests of a plan: in the order of their keys, numbered from 0."""
    planned = []
    for number, key in enumerate(sorted(asked)):
        kind = "generate_until" if isinstance(asked[key], GenerateRequest) else "loglikelihood"
        planned.append(HarnessRequest.of(key, kind, replace(asked[key], request_id=number)))
    return planned


def _request(line: Any, request_id: int, number: int) -> tuple[RecordKey, Request]:
    if problem := wrong(line, _LINE):
        raise ValueError(f"line {number}: {problem}")
    key = line["key"]
    if not fits(tuple(key), _KEY):
        raise ValueError(f"line {number}: its key is no task, document, request and repeat")
    if "params" not in line:
        return tuple(key), ScoreRequest(request_id, line["prompt_ids"], line.get("scored", []), line.get("logprobs", 0))
    return tuple(key), GenerateRequest(request_id, line["prompt_ids"], _params(line["params"], number))


def _params(plain: Mapping[str, Any], number: int) -> SamplingParams:
    try:
        return SamplingParams.of_plain(plain)
    except TypeError as error:
        raise ValueError(f"line {number}: {error}") from error
