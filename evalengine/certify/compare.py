"""Compares answers by bytes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evalengine.engine.request import RequestOutput


@dataclass(frozen=True)
class Difference:
    """The first logprob that differs."""

    schedule: str
    request: str
    token: int  # the token's number in the answer, from 0
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.schedule}: {self.request}, token {self.token}: {self.found} against {self.expected} alone"


@dataclass
class Tally:
    """How many logprobs were compared, and how they differ."""

    logprobs: int = 0
    differing_logprobs: int = 0
    differing_bytes: int = 0
    largest_difference: float = 0.0  # between two finite logprobs of the same token
    first_difference: Difference | None = None

    def add(self, schedule: str, request: str, expected: RequestOutput, found: RequestOutput) -> None:
        """Compares token by token. A logprob of another token, or one that is missing, differs in all 4 bytes."""
        for token in range(max(len(expected.token_ids), len(found.token_ids))):
            self.logprobs += 1
            if different := self._differing_bytes(expected, found, token):
                self.differing_logprobs += 1
                self.differing_bytes += different
                if self.first_difference is None:
                    left, right = _show(expected, token), _show(found, token)
                    self.first_difference = Difference(schedule, request, token, left, right)

    def _differing_bytes(self, expected: RequestOutput, found: RequestOutput, token: int) -> int:
        if token >= min(len(expected.token_ids), len(found.token_ids)):
            return 4
        if expected.token_ids[token] != found.token_ids[token]:
            return 4
        left, right = expected.logprobs[token : token + 1], found.logprobs[token : token + 1]
        difference = abs(float(left[0]) - float(right[0]))
        if math.isfinite(difference):
            self.largest_difference = max(self.largest_difference, difference)
        return int((left.view(np.uint8) != right.view(np.uint8)).sum())

    def merge(self, other: Tally) -> None:
        self.logprobs += other.logprobs
        self.differing_logprobs += other.differing_logprobs
        self.differing_bytes += other.differing_bytes
        self.largest_difference = max(self.largest_difference, other.largest_difference)
        self.first_difference = self.first_difference or other.first_difference

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _show(answer: RequestOutput, token: int) -> str:
    """`token id: logprob (its bits)`, or why there is none."""
    if token >= len(answer.token_ids):
        return f"nothing ({answer.error})" if answer.error else "nothing"
    logprob = answer.logprobs[token : token + 1]
    return f"{float(logprob[0]):.9g} ({int(logprob.view(np.uint32)[0]):08x}) of id {answer.token_ids[token]}"
