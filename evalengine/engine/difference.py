"""Compares two answers to one request: they are equal only if every bit is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import numpy as np

from evalengine.engine.request import RequestOutput
from evalengine.records.schema import Answer
from evalengine.util.validation import shown


def difference(first: Answer, again: RequestOutput, of_first: str, of_second: str = "computed again") -> str | None:
    """A sentence on the first place where two answers differ, with both values; None if every bit is equal.

    of_first, of_second: which answer each is, as it ends a clause: "in the cache", "computed again".
    """
    if again.error is not None:
        return f"there is an answer {of_first}, and {of_second} it fails ({again.error})"
    second = again.answer
    tokens = zip(first.output_ids, second.output_ids, first.logprobs, second.logprobs, strict=False)
    for place, (first_id, second_id, one, other) in enumerate(tokens):
        if first_id != second_id:
            return f"token {place} is {first_id} {of_first} and {second_id} {of_second}"
        if one.tobytes() != other.tobytes():
            values = f"{_shown(one)} {of_first} and {_shown(other)} {of_second}"
            return f"the logprob of token {place} (id {first_id}) is {values}"
    for name in ("output_ids", "finish_reason", "text", "is_greedy"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            return f"{name} is {shown(one)} {of_first} and {shown(other)} {of_second}"
    for place, (one, other) in enumerate(zip_longest(_alternatives(first), _alternatives(second))):
        if one != other:
            return f"the alternatives of token {place} are {one} {of_first} and {other} {of_second}"
    return None


def _alternatives(answer: Answer) -> Iterator[str]:
    """Each token's alternatives, by the digits that tell any two bit patterns apart."""
    if answer.top_ids is not None and answer.top_logprobs is not None:
        for ids, values in zip(answer.top_ids, answer.top_logprobs, strict=True):
            yield ", ".join(f"{token}: {_shown(value)}" for token, value in zip(ids, values, strict=True))


def _shown(value: np.float32) -> str:
    """A float32 by its digits and its bits."""
    return f"{value!s} (0x{int(value.view(np.uint32)):08x})"
