"""Which requests are answered twice, where two answers part, and whose are then in doubt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from evalengine.engine.difference import difference
from evalengine.engine.request import RequestOutput


def sample(request_ids: Iterable[int], share: float, seed: int) -> set[int]:
    """The requests that are audited: each with probability `share`, by a hash of seed and number; at least one."""
    if share <= 0:
        return set()
    draws = {number: _draw(number, seed) for number in request_ids}
    chosen = {number for number, draw in draws.items() if draw < share}
    return chosen or set(sorted(draws, key=draws.__getitem__)[:1])


def verdict(answers: Sequence[tuple[str, RequestOutput]]) -> tuple[str, set[str]]:
    """(what to say of two answers that differ, which of their machines are in doubt). A third answer, if there is one,
    judges them. answers: (where it was computed, the answer) each."""
    (where_a, a), (where_b, b), *third = answers
    parted = difference(a, b, f"on {where_a}", f"on {where_b}")
    sentences, doubted = [f"{where_a} and {where_b} computed different bits: {parted}"], {where_a, where_b}
    if not third:
        sentences.append("no third replica is there to say which of them is right, so check both")
    for judge, c in third:
        agrees = [where for where, answer in answers[:2] if is_same(answer, c)]
        if agrees:
            doubted -= {*agrees}
            sentences.append(f"{judge} agrees with {agrees[0]}: take {'; '.join(doubted)} out of the fleet")
        else:
            doubted.add(judge)
            sentences.append(f"{judge} agrees with neither: check all three")
    return "; ".join(sentences), doubted


def is_same(first: RequestOutput, second: RequestOutput) -> bool:
    """Whether two answers to a request have every bit alike."""
    return difference(first, second, "in the first", "in the second") is None


def _draw(number: int, seed: int) -> float:
    """Uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(f"audit {seed} {number}".encode()).digest()[:7], "big") / 2**56
