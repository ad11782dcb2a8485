"""Converts an engine's answers to the cache's entries and back, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evalengine.cache.store import StoredAnswer
from evalengine.engine.expected import ExpectedAnswer, Top
from evalengine.engine.request import GenerateRequest, Request, RequestOutput
from evalengine.records.schema import packed_ids


def entry_of(request: Request, output: RequestOutput) -> StoredAnswer:
    """The entry that keeps an answer, which must not have failed."""
    assert output.error is None and output.logprobs.dtype == np.float32
    entry = StoredAnswer(output.logprobs.astype("<f4").tobytes(), output.finish_reason.encode(), output.is_greedy)
    if isinstance(request, GenerateRequest):
        text = output.text.encode("utf-8", "surrogatepass")
        entry = replace(entry, token_ids=packed_ids(output.token_ids), text=text)
    if output.top_logprobs is not None:
        ids = [token for alternatives in output.top_logprobs for token in alternatives]
        values = [value for alternatives in output.top_logprobs for value in alternatives.values()]
        entry = replace(entry, top_ids=packed_ids(ids), top_logprobs=np.array(values, dtype="<f4").tobytes())
    return entry


def answer_of(request: Request, entry: StoredAnswer, expected: ExpectedAnswer) -> RequestOutput | None:
    """The answer that an entry keeps; None for an entry that cannot be this request's answer."""
    scored = None if isinstance(request, GenerateRequest) else request.continuation_ids
    if (scored is None) != (entry.token_ids is not None):
        return None
    try:
        ids = np.frombuffer(entry.token_ids or b"", dtype="<i4").tolist() if scored is None else scored
        logprobs = np.frombuffer(entry.logprobs, dtype="<f4").astype(np.float32)
        text = entry.text.decode("utf-8", "surrogatepass")
        top = _top(entry, len(ids))
    except ValueError:  # half a number, no UTF-8, or no table
        return None
    ending = entry.finish_reason.decode("ascii", "replace")
    if expected.problem(ids, logprobs, ending, text, entry.is_greedy, top) is not None:
        return None
    return RequestOutput(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        token_ids=ids,
        logprobs=logprobs,
        finish_reason="stop" if ending == "stop" else "length",
        text=text,
        is_greedy=entry.is_greedy,
        top_logprobs=None if top is None else [dict(zip(*row, strict=True)) for row in zip(*_lists(top), strict=True)],
    )


def _lists(top: Top) -> tuple[list[list[int]], list[list[float]]]:
    return top[0].tolist(), top[1].tolist()


def _top(entry: StoredAnswer, tokens: int) -> Top | None:
    """The alternatives of each token. Raises ValueError if they make no table."""
    if entry.top_ids is None or entry.top_logprobs is None:
        return None
    ids, values = np.frombuffer(entry.top_ids, dtype="<i4"), np.frombuffer(entry.top_logprobs, dtype="<f4")
    return ids.reshape(tokens, -1), values.reshape(tokens, -1)
