"""Turns lm-eval's instances into the engine's requests, each with the key of its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from evalengine.engine.request import GenerateRequest, RequestOutput, ScoreRequest
from evalengine.errors import ConfigError, EvalEngineError, first_of
from evalengine.harness.requests import HarnessRequest
from evalengine.integrations.lm_eval.generation import AnswerSettings
from evalengine.records.schema import RecordKey

UNNAMED = "unnamed"  # the task of an instance that was made without one
MAX_LISTED = 10


def instance_keys(instances: Sequence[Any]) -> list[RecordKey]:
    """(task, document, request index, repeat) of each instance; lm-eval repeats one by listing it several times."""
    repeats: Counter[tuple[str, int, int]] = Counter()
    keys = []
    for place, instance in enumerate(instances):
        document = place if instance.doc_id is None else instance.doc_id
        request = (instance.task_name or UNNAMED, document, instance.idx)
        keys.append((*request, repeats[request]))
        repeats[request] += 1
    return keys


def scored(
    place: int, key: RecordKey, kind: str, context: list[int], continuation: list[int], max_length: int
) -> HarnessRequest:
    """The request of a continuation's log-likelihood. Its context is cut from the left so that both fit, as lm-eval's
    hf model does: of max_length + 1 tokens the last is predicted, not fed. `check_requests` refuses what cannot fit."""
    cut = max(0, len(context) - max(1, max_length + 1 - len(continuation)))
    return HarnessRequest.of(key, kind, ScoreRequest(place, context[cut:], continuation), cut)


def generated(
    place: int, key: RecordKey, prompt: list[int], generation: AnswerSettings, max_length: int
) -> HarnessRequest:
    """The request of an answer. Its prompt is cut from the left to leave room for it.

    Raises: ConfigError if there is no room for any prompt.
    """
    room = max_length - generation.params.max_tokens
    if room < 1:
        raise ConfigError(
            f"max_gen_toks={generation.params.max_tokens} leaves no room for a prompt in max_model_len={max_length}; "
            "lower it (--gen_kwargs max_gen_toks=N, or model_args max_gen_toks=N for tasks that name none)"
        )
    cut = max(0, len(prompt) - room)
    return HarnessRequest.of(key, "generate_until", GenerateRequest(place, prompt[cut:], generation.params), cut)


def windows(
    keys: Sequence[RecordKey], windows_by_text: Sequence[list[tuple[list[int], list[int]]]]
) -> list[HarnessRequest]:
    """A request for each window of each text, in order; its index counts the windows of the document, as in other runs.

    windows_by_text: the windows (context, continuation) of each text.
    """
    num_windows: Counter[tuple[str, int, int]] = Counter()
    asked: list[HarnessRequest] = []
    for (task, document, _, repeat), own in zip(keys, windows_by_text, strict=True):
        for context, continuation in own:
            key = (task, document, num_windows[task, document, repeat], repeat)
            num_windows[task, document, repeat] += 1
            asked.append(
                HarnessRequest.of(key, "loglikelihood_rolling", ScoreRequest(len(asked), context, continuation))
            )
    return asked


def check_outputs(asked: Sequence[HarnessRequest], outputs: Sequence[RequestOutput]) -> None:
    """Raises EvalEngineError that names the first few of the requests that failed."""
    failed = [f"{a.named}: {output.error}" for a, output in zip(asked, outputs, strict=True) if output.error]
    if failed:
        raise EvalEngineError(f"{len(failed)} requests failed:", *first_of(failed, MAX_LISTED))


def warnings_of(asked: Sequence[HarnessRequest], max_length: int) -> Iterator[str]:
    """Yields a warning if prompts of the call were cut."""
    if cut := [a for a in asked if a.truncated]:
        most = max(a.truncated for a in cut)
        yield (
            f"{len(cut)} of {len(asked)} prompts are longer than max_model_len={max_length} leaves room for: cut from "
            f"the left, by {most} tokens at most (the first is of {cut[0].named})"
        )
