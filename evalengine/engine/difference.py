"""Compares two answers to one request: they are equal only if every bit is."""

from __future__ import annotations

import numpy as np

from evalengine.config.arguments import shown
from evalengine.engine.request import RequestOutput


def difference(
    first: RequestOutput, second: RequestOutput, of_first: str, of_second: str = "computed again"
) -> str | None:
    """A sentence on the first place where two answers differ, with both values; None if every bit is equal.

    of_first, of_second: which answer each is, as it ends a clause: "in the cache", "computed again".
    """
    if second.error is not None:
        return f"there is an answer {of_first}, and {of_second} it fails ({second.error})"
    tokens = zip(first.token_ids, second.token_ids, first.logprobs, second.logprobs, strict=False)
    for place, (first_id, second_id, one, other) in enumerate(tokens):
        if first_id != second_id:
            return f"token {place} is {first_id} {of_first} and {second_id} {of_second}"
        if one.tobytes() != other.tobytes():
            values = f"{_shown(one)} {of_first} and {_shown(other)} {of_second}"
            return f"the logprob of token {place} (id {first_id}) is {values}"
    for name in ("token_ids", "finish_reason", "text", "is_greedy"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            return f"{name} is {shown(one)} {of_first} and {shown(other)} {of_second}"
    return _top_difference(first, second, of_first, of_second)


def _top_difference(first: RequestOutput, second: RequestOutput, of_first: str, of_second: str) -> str | None:
    for place, (one, other) in enumerate(zip(first.top_logprobs or [], second.top_logprobs or [], strict=False)):
        bits = [(token, np.float32(value).tobytes()) for token, value in one.items()]
        if bits != [(token, np.float32(value).tobytes()) for token, value in other.items()]:
            return f"the alternatives of token {place} are {one} {of_first} and {other} {of_second}"
    if len(first.top_logprobs or []) != len(second.top_logprobs or []):
        return "one of the two has no alternatives"
    return None


def _shown(value: np.float32) -> str:
    """A float32 by its digits and its bits."""
    return f"{value!s} (0x{int(value.view(np.uint32)):08x})"
