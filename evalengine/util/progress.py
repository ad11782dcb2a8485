"""Progress of a run on standard error: a live bar on a terminal, occasional lines elsewhere (CI logs).

The time left is known once requests finish; until then the tokens computed so far are shown, since the only bound (each
request as long as it may be) once said 85 minutes for runs of minutes. Tokens that are read and tokens that are
generated have separate rates: a generated token takes a step, in which hundreds can be read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from evalengine.plain_text import warn

if TYPE_CHECKING:
    from typing_extensions import Self

LINE_SECONDS = 10.0  # seconds between lines where there is no terminal
SHARE = 0.05  # share of requests to be done before an estimate: a large batch finishes its requests late
WINDOW = 10.0  # the rate of tokens is taken over so many last seconds


class TokenCounts(Protocol):
    """Tokens so far, of an engine's counters. Several engines together also have `lines`, one for each."""

    num_computed_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


class _Bar(Progress):
    """A bar with lines of text below it."""

    lines: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(f"  {line}", style="dim") for line in self.lines)


class _Shown:
    """A bar that is shown while the context is open; where there is no terminal, occasional lines."""

    def __init__(
        self, label: str, total: int, done: int, enabled: bool, unit: str, rest: str = "", **fields: Any
    ) -> None:
        """unit: the text after the counts. rest: the text after the time. fields: of these two texts."""
        console = Console(stderr=True)
        self._label, self._total, self._done = label, total, done
        self._last_line = time.monotonic()
        self._lines = enabled and not console.is_terminal
        self._bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TextColumn(rest),
            console=console,
            transient=True,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._bar.add_task(label, total=total, completed=done, **fields)

    def _say(self, what: str) -> None:
        """Writes a line if it is time for one."""
        now = time.monotonic()
        if self._lines and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            warn(f"{self._label}: {self._done}/{self._total} {what}", "")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class RunProgress(_Shown):
    """Shows requests done, tokens per second and time left, with a line for each replica. A context manager."""

    def __init__(
        self, label: str, total: int, done: int = 0, enabled: bool = True, work: WorkAmount | None = None
    ) -> None:
        """work: that of the remaining requests; None if it is not known."""
        unit, rest = "requests  {task.fields[rate]} tokens/s ", "{task.fields[left]}"
        super().__init__(label, total, done, enabled, unit, rest, rate="-", left="")
        self._started = self._last_line
        self._left = TimeLeft(work or WorkAmount(total - done))

    def finished(self, spare: int = 0) -> None:
        """Counts one more finished request. spare: tokens that it might have generated and did not."""
        self._done += 1
        self._left.finished(spare)
        if not self._bar.disable:
            self._bar.update(self._task, completed=self._done)

    def step(self, stats: TokenCounts) -> None:
        """Shows the state after a step of the engine."""
        elapsed = time.monotonic() - self._started
        generated = stats.num_generated_tokens
        self._left.step(elapsed, stats.num_computed_tokens + stats.num_cached_tokens - generated, generated)
        rate = f"{stats.num_computed_tokens / max(elapsed, 1e-9):,.0f}"
        left = self._left.words()
        self._bar.lines = getattr(stats, "lines", ())
        self._bar.update(self._task, rate=rate, left=left)
        self._say(f"requests, {rate} tokens/s{', ' * bool(left)}{left}")


class ProgramProgress(_Shown):
    """Shows how many programs have been run. A context manager; shows nothing if there are none."""

    def __init__(self, label: str, total: int, enabled: bool = True) -> None:
        super().__init__(label, total, 0, enabled and total > 0, "programs run ")

    def finished(self) -> None:
        """Counts one more finished program."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        self._say("programs run")


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
