"""`answers.jsonl`: what an endpoint answered, a line an answer, appended as it comes, so that a killed run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evalengine.errors import EvalEngineError
from evalengine.harness.requests import HarnessRequest
from evalengine.integrations.endpoint.http import Cleaner, Reply
from evalengine.records.folder import write_failed
from evalengine.records.journal import LineFile
from evalengine.records.lm_eval_file import CONTENT_FILTER, EMPTY_ANSWER, NULL_CONTENT
from evalengine.records.schema import Answer, RecordKey
from evalengine.records.shapes import Count, Flag, Text, with_fields, wrong
from evalengine.tasks.instance import Instance
from evalengine.util.plain_files import parse_json, read_bytes

ANSWERS = "answers.jsonl"
_LINE = with_fields({
    "number": Count, "ask": Count, "text": Text, "finish_reason": Text, "attempts": Count, "fingerprint?": Text,
    "surrogates?": Count, "keys?": Count, "null?": Flag, "model?": Text,
})  # fmt: skip
FILTERED = ("content_filter", "refusal", "safety")  # finish reasons of an answer that was withheld, all or in part
Document = tuple[str, int]  # (task, document)
Place = tuple[int, int]  # (the request's place in the plan, which of its identical requests)


@dataclass(frozen=True)
class EndpointAnswer:
    """One answer, as it came but for what `Cleaner` replaced in its strings."""

    text: str
    finish_reason: str  # the endpoint's own word
    attempts: int
    fingerprint: str | None = None  # the endpoint's `system_fingerprint`
    seconds: float = 0.0
    reasoning: str | None = None
    usage: Mapping[str, Any] | None = None
    surrogates: int = 0  # lone surrogates that were replaced by U+FFFD
    keys: int = 0  # occurrences of the API key that were replaced
    null: bool = False  # whether the text was null or missing, as of a model that only thought or called a tool
    model: str | None = None  # the model that the endpoint named


def answer_of(reply: Reply) -> EndpointAnswer:
    """The content of a reply, in either path's format."""
    assert reply.value is not None
    choice = reply.value["choices"][0]
    choice = choice if isinstance(choice, dict) else {}
    message = choice.get("message") if isinstance(choice.get("message"), dict) else None
    text = choice.get("text") if message is None else message.get("content")
    reasoning = None if message is None else message.get("reasoning_content") or message.get("reasoning")
    fingerprint, spent = reply.value.get("system_fingerprint"), reply.value.get("usage")
    return EndpointAnswer(
        text if isinstance(text, str) else "",
        str(choice.get("finish_reason")),
        reply.attempts,
        fingerprint if isinstance(fingerprint, str) else None,
        round(reply.seconds, 3),
        reasoning if isinstance(reasoning, str) else None,
        spent if isinstance(spent, dict) else None,
        reply.surrogates,
        reply.keys,
        text is None,
        model if isinstance(model := reply.value.get("model"), str) else None,
    )


class AnswersFile:
    """The file, open for more. `stored` holds its answers.

    It consists of whole lines (`LineFile`), one for each place: an answer counts only once its line is written.
    """

    def __init__(self, folder: Path, cleaner: Cleaner) -> None:
        """Reads the file of `folder`, which may not exist yet. Raises EvalEngineError if it is damaged, or if the disk
        fails."""
        path = folder / ANSWERS
        try:
            self.stored, size = _read(path, cleaner) if path.exists() else ({}, 0)
            self._file = LineFile(path, size)
        except OSError as error:
            raise write_failed(path, error) from error

    def append(self, place: Place, answer: EndpointAnswer) -> None:
        """Adds the answer of a place that has none. Raises EvalEngineError if the disk fails; the file then is as
        before."""
        assert place not in self.stored, place
        fields = {"number": place[0], "ask": place[1], **vars(answer)}
        self._file.append(json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode() + b"\n")
        self.stored[place] = answer

    def close(self) -> None:
        """Forces the lines to disk and closes the file; further calls do nothing. Raises EvalEngineError if the disk
        fails."""
        self._file.close()


def _read(path: Path, cleaner: Cleaner) -> tuple[dict[Place, EndpointAnswer], int]:
    """(the answers, the bytes of its whole lines). Raises EvalEngineError for a damaged file."""
    content = read_bytes(path)
    whole = content[: content.rfind(b"\n") + 1]
    answers: dict[Place, EndpointAnswer] = {}
    try:
        for number, line in enumerate(whole.splitlines(), 1):
            cleaned = cleaner.clean(parse_json(line))  # older versions wrote lone surrogates
            value = cleaned.value
            if problem := wrong(value, _LINE):
                raise ValueError(f"line {number}: {problem}")
            place = value.pop("number"), value.pop("ask")
            answer = EndpointAnswer(**value)
            if place in answers:
                raise ValueError(f"line {number}: a second answer to request {place[0]}, ask {place[1]}")
            answers[place] = replace(
                answer, surrogates=answer.surrogates + cleaned.surrogates, keys=answer.keys + cleaned.keys
            )
    except (ValueError, TypeError) as error:
        raise EvalEngineError(
            f"{path}: damaged ({error}); delete it (its run starts again) or set resume=never"
        ) from error
    return answers, len(whole)


def entries(
    requests: Sequence[HarnessRequest],
    answers: Mapping[Place, EndpointAnswer],
    ask: int,
    end_of_thinking: str | None,
    left_out: Set[Document],
) -> dict[RecordKey, Answer]:
    """Key -> the answer of one ask, as scorers take it: a text without tokens. left_out: documents without entries."""
    none = np.empty(0, dtype=np.float32)
    return {
        item.key: Answer([], none, _ending(answers[number, ask].finish_reason),
                               _cut(answers[number, ask].text, item.instance, end_of_thinking), False)
        for number, item in enumerate(requests) if item.key[:2] not in left_out
    }  # fmt: skip


def why_unanswered(answer: EndpointAnswer, scored: str) -> str | None:
    """Why the answer is none, one of `UNANSWERED`; None for one with a text. scored: what is left of its text after its
    thinking and before its stop strings."""
    if answer.finish_reason.lower() in FILTERED:
        return CONTENT_FILTER
    if answer.null:
        return NULL_CONTENT
    return None if scored.strip() else EMPTY_ANSWER


def _ending(reason: str) -> str:
    return "length" if reason in ("length", "max_tokens", "model_length") else "stop"


def _cut(text: str, instance: Instance, end_of_thinking: str | None) -> str:
    """The answer behind its thinking, cut at every stop string as lm-eval cuts it."""
    if end_of_thinking is not None:
        text = text.rpartition(end_of_thinking)[2].lstrip()
    assert instance.generation is not None
    for stop in instance.generation.until:
        text = text.split(stop)[0] if stop else text
    return text
