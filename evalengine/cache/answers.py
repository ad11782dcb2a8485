"""Converts an engine's answers to the cache's entries and back, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evalengine.cache.store import Entry
from evalengine.engine.request import GenerateRequest, Request, RequestOutput
from evalengine.records.schema import packed_ids

ENDINGS = ("stop", "length")


def entry_of(request: Request, output: RequestOutput) -> Entry:
    """The entry that keeps an answer, which must not have failed."""
    assert output.error is None and output.logprobs.dtype == np.float32
    entry = Entry(output.logprobs.astype("<f4").tobytes(), output.finish_reason.encode(), output.is_greedy)
    if isinstance(request, GenerateRequest):
        text = output.text.encode("utf-8", "surrogatepass")
        entry = replace(entry, token_ids=packed_ids(output.token_ids), text=text)
    if output.top_logprobs is not None:
        ids = [token for alternatives in output.top_logprobs for token in alternatives]
        values = [value for alternatives in output.top_logprobs for value in alternatives.values()]
        entry = replace(entry, top_ids=packed_ids(ids), top_logprobs=np.array(values, dtype="<f4").tobytes())
    return entry


def answer_of(request: Request, entry: Entry) -> RequestOutput | None:
    """The answer that an entry keeps; None for an entry that cannot be this request's answer."""
    generates = isinstance(request, GenerateRequest)
    prompt = request.prompt_ids if isinstance(request, GenerateRequest) else request.context_ids
    if isinstance(request, GenerateRequest):
        ids = None if entry.token_ids is None else np.frombuffer(entry.token_ids, dtype="<i4").tolist()
    else:
        ids = request.continuation_ids
    ending = entry.finish_reason.decode("ascii", "replace")
    if ids is None or len(entry.logprobs) != 4 * len(ids) or ending not in ENDINGS:
        return None
    num_alternatives = request.params.logprobs if isinstance(request, GenerateRequest) else request.logprobs
    if not len(entry.top_ids or b"") == len(entry.top_logprobs or b"") == 4 * len(ids) * num_alternatives:
        return None
    return RequestOutput(
        request_id=request.request_id,
        prompt_ids=prompt,
        token_ids=ids,
        logprobs=np.frombuffer(entry.logprobs, dtype="<f4").astype(np.float32),
        finish_reason="stop" if ending == "stop" else "length",
        text=entry.text.decode("utf-8", "surrogatepass") if generates else "",
        is_greedy=entry.is_greedy,
        top_logprobs=_top(entry, len(ids), num_alternatives) if num_alternatives else None,
    )


def _top(entry: Entry, tokens: int, num_alternatives: int) -> list[dict[int, float]] | None:
    ids = np.frombuffer(entry.top_ids or b"", dtype="<i4").reshape(tokens, num_alternatives).tolist()
    values = np.frombuffer(entry.top_logprobs or b"", dtype="<f4").reshape(tokens, num_alternatives).tolist()
    return [dict(zip(*alternatives, strict=True)) for alternatives in zip(ids, values, strict=True)]
