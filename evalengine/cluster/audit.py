"""Which requests are answered twice, where two answers part, and whose are then in doubt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np

from evalengine.engine.request import RequestOutput


def sample(request_ids: Iterable[int], share: float, seed: int) -> set[int]:
    """The requests that are audited: each with probability `share`, by a hash of seed and number; at least one."""
    if share <= 0:
        return set()
    draws = {number: _draw(number, seed) for number in request_ids}
    chosen = {number for number, draw in draws.items() if draw < share}
    return chosen or set(sorted(draws, key=draws.__getitem__)[:1])


def difference(first: RequestOutput, second: RequestOutput) -> str | None:
    """Where two answers to a request first part, in words; None if every bit is the same."""
    bits = first.logprobs.astype(np.float32).view(np.uint32), second.logprobs.astype(np.float32).view(np.uint32)
    first_tokens = zip(first.token_ids, bits[0].tolist(), first.logprobs.tolist(), strict=True)
    second_tokens = zip(second.token_ids, bits[1].tolist(), second.logprobs.tolist(), strict=True)
    for place, (a, b) in enumerate(zip_longest(first_tokens, second_tokens)):
        if a is None or b is None:
            return f"token {place}: only one of the answers goes on"
        if a[:2] != b[:2]:
            return f"token {place}: id {a[0]} with logprob {a[2]:.9g} against id {b[0]} with logprob {b[2]:.9g}"
    if first.top_logprobs != second.top_logprobs:
        pairs = zip_longest(first.top_logprobs or [], second.top_logprobs or [])
        place = next(place for place, (a, b) in enumerate(pairs) if a != b)
        return f"token {place}: its alternatives differ"
    if (first.text, first.finish_reason, first.is_greedy) != (second.text, second.finish_reason, second.is_greedy):
        return "behind the last token: the text or the finish reason differs"
    return None


def verdict(answers: Sequence[tuple[str, RequestOutput]]) -> tuple[str, set[str]]:
    """(what to say of two answers that differ, which of their machines are in doubt). A third answer, if there is one,
    judges them. answers: (where it was computed, the answer) each."""
    (where_a, a), (where_b, b), *third = answers
    sentences, doubted = [f"{where_a} and {where_b} computed different bits: {difference(a, b)}"], {where_a, where_b}
    if not third:
        sentences.append("no third replica is there to say which of them is right, so check both")
    for judge, c in third:
        agrees = [where for where, answer in answers[:2] if difference(answer, c) is None]
        if agrees:
            doubted -= {*agrees}
            sentences.append(f"{judge} agrees with {agrees[0]}: take {'; '.join(doubted)} out of the fleet")
        else:
            doubted.add(judge)
            sentences.append(f"{judge} agrees with neither: check all three")
    return "; ".join(sentences), doubted


def _draw(number: int, seed: int) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(f"audit {seed} {number}".encode()).digest()[:7], "big") / 2**56
