"""Tells how long a run still takes once requests finish; until then, how many tokens it has computed.

Before a request is done, only a bound is known: that each is as long as it may be. It said 85 min of runs of minutes.

Tokens that are read and tokens that are generated have rates of their own: a generated token takes a step, in which
hundreds can be read. The caller passes the time; nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SHARE = 0.05  # share of requests to be done before an estimate: a large batch finishes its requests late
WINDOW = 10.0  # the rate of tokens is taken over so many last seconds


@dataclass(frozen=True)
class WorkAmount:
    """The amount of a run's work."""

    requests: int
    read: int | None = None  # tokens of prompts and scored texts; None: not known
    generated: int = 0  # tokens that may be generated at most


class TimeLeft:
    """Seconds left of some work."""

    def __init__(self, work: WorkAmount) -> None:
        self._work = work
        self._finished = self._spared = 0
        self._marks: deque[tuple[float, int, int]] = deque([(0.0, 0, 0)])  # (seconds, tokens read, generated) so far

    def finished(self, spare: int = 0) -> None:
        """A request is done. spare: tokens below its limit, which it will never generate."""
        self._finished += 1
        self._spared += spare

    def step(self, elapsed: float, read: int, generated: int = 0) -> None:
        """Notes how many tokens have been read and generated after `elapsed` seconds."""
        self._marks.append((elapsed, read, generated))
        while len(self._marks) > 2 and elapsed - self._marks[1][0] >= WINDOW:
            self._marks.popleft()

    @property
    def most(self) -> float | None:
        """Seconds until every request has reached its limit, if all tokens left to read and all left to generate took
        the time that they took in the last `WINDOW` seconds, one kind after the other; None before that is known."""
        (begin, *before), (now, *done) = self._marks[0], self._marks[-1]
        if self._work.read is None:
            return None
        total = 0.0
        for most, first, last in zip((self._work.read, self._work.generated - self._spared), before, done, strict=True):
            if most > last and last <= first:
                return None
            total += (most - last) * (now - begin) / (last - first) if most > last else 0.0
        return total if now > begin else None

    @property
    def estimate(self) -> float | None:
        """Seconds by the pace of the requests, but never above `most`; None while too few are done."""
        if self._finished < max(1, SHARE * self._work.requests):
            return None
        pace = self._marks[-1][0] / self._finished * (self._work.requests - self._finished)
        return pace if self.most is None else min(pace, self.most)

    def words(self) -> str:
        """`12 s left`; `estimating, 3,020 tokens generated` (or `read`) before that can be said."""
        if (estimate := self.estimate) is not None:
            return f"{duration(estimate)} left"
        _, read, generated = self._marks[-1]
        so_far = f", {generated:,} tokens generated" if generated else f", {read:,} tokens read" if read else ""
        return f"estimating{so_far}"


def duration(seconds: float) -> str:
    """`45 s`, `24 min`, `3 h 05 min`: rounded as an estimate deserves."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
