"""Tells how long a run still takes: a bound from the tokens left, and an estimate once requests finish.

The caller passes the time; nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SHARE = 0.05  # share of requests to be done before an estimate: a large batch finishes its requests late
WINDOW = 10.0  # the rate of tokens is taken over so many last seconds


@dataclass(frozen=True)
class Work:
    """The amount of a run's work."""

    requests: int
    tokens: int | None  # tokens of prompts and scored texts, with generations at their limits; None: not known


class TimeLeft:
    """Seconds left of some work."""

    def __init__(self, work: Work) -> None:
        self._requests, self._tokens = work.requests, work.tokens
        self._finished = 0
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)])  # (seconds since the start, tokens done)

    def finished(self, spare: int = 0) -> None:
        """A request is done. spare: tokens below its limit, which it will never generate."""
        self._finished += 1
        self._tokens = None if self._tokens is None else self._tokens - spare

    def step(self, elapsed: float, tokens: int) -> None:
        """Notes that `tokens` are done after `elapsed` seconds."""
        self._marks.append((elapsed, tokens))
        while len(self._marks) > 2 and elapsed - self._marks[1][0] >= WINDOW:
            self._marks.popleft()

    @property
    def most(self) -> float | None:
        """Seconds until every request has reached its limit, at the rate of the last `WINDOW`; None before any."""
        (begin, before), (now, done) = self._marks[0], self._marks[-1]
        if self._tokens is None or now <= begin or done <= before:
            return None
        return max(0, self._tokens - done) * (now - begin) / (done - before)

    @property
    def estimate(self) -> float | None:
        """Seconds by the pace of the requests, but never above `most`; None while too few are done."""
        if self._finished < max(1, SHARE * self._requests):
            return None
        pace = self._marks[-1][0] / self._finished * (self._requests - self._finished)
        return pace if self.most is None else min(pace, self.most)

    def words(self) -> str:
        """`12 s left`; `up to 3 min left` while only the bound is known; "" before that."""
        if (estimate := self.estimate) is not None:
            return f"{duration(estimate)} left"
        return "" if self.most is None else f"up to {duration(self.most)} left"


def duration(seconds: float) -> str:
    """`45 s`, `24 min`, `3 h 05 min`: rounded as an estimate deserves."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
