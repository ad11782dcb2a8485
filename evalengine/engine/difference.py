"""Compares two answers to one request: they are equal only if every bit is."""

from __future__ import annotations

import numpy as np

from evalengine.arguments import shown
from evalengine.engine.request import RequestOutput


def difference(stored: RequestOutput, computed: RequestOutput, where: str) -> str | None:
    """A sentence on the first place where a kept answer and one computed again differ, with both values; None if every
    bit is equal.

    where: what holds the kept answer, as in "the cache".
    """
    if computed.error is not None:
        return f"{where} has an answer, and computed again it fails ({computed.error})"
    tokens = zip(stored.token_ids, computed.token_ids, stored.logprobs, computed.logprobs, strict=False)
    for place, (kept_id, computed_id, was, now) in enumerate(tokens):
        if kept_id != computed_id:
            return f"token {place} is {kept_id} in {where} and {computed_id} computed again"
        if was.tobytes() != now.tobytes():
            values = f"{_shown(was)} in {where} and {_shown(now)} computed again"
            return f"the logprob of token {place} (id {kept_id}) is {values}"
    for name in ("token_ids", "finish_reason", "text", "is_greedy"):
        before, after = getattr(stored, name), getattr(computed, name)
        if before != after:
            return f"{name} is {shown(before)} in {where} and {shown(after)} computed again"
    return _top_difference(stored, computed, where)


def _top_difference(stored: RequestOutput, computed: RequestOutput, where: str) -> str | None:
    for place, (was, now) in enumerate(zip(stored.top_logprobs or [], computed.top_logprobs or [], strict=False)):
        kept_bits = [(token, np.float32(value).tobytes()) for token, value in was.items()]
        if kept_bits != [(token, np.float32(value).tobytes()) for token, value in now.items()]:
            return f"the alternatives of token {place} are {was} in {where} and {now} computed again"
    if len(stored.top_logprobs or []) != len(computed.top_logprobs or []):
        return "one of the two has no alternatives"
    return None


def _shown(value: np.float32) -> str:
    """A float32 by its digits and its bits."""
    return f"{value!s} (0x{int(value.view(np.uint32)):08x})"
