"""Progress of a run on standard error: a live bar on a terminal, occasional lines elsewhere (CI logs).

The time left follows from the rate at which requests finish, once some have; until then the tokens computed so far are
shown.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from evalengine.plain_text import warn

if TYPE_CHECKING:
    from typing_extensions import Self

LINE_SECONDS = 10.0  # seconds between lines where there is no terminal
WINDOW = 300.0  # seconds over which the rate of requests is taken
SHOWN_SECONDS = 0.3  # between updates, which take 0.1 ms; rich takes the rate from the last 1,000, which are `WINDOW`


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


class RunProgress:
    """Shows how many requests are done, tokens per second and time left, with a line for each replica: as a bar on a
    terminal while the context is open, and as occasional lines elsewhere."""

    def __init__(self, label: str, total: int, done: int = 0, enabled: bool = True, what: str = "requests") -> None:
        """what: the things that are counted."""
        console = Console(stderr=True)
        self._label, self._total, self._done, self._what = label, total, done, what
        self._started = self._last_line = time.monotonic()
        self._next = 0.0  # when a step is shown again
        self._lines = enabled and not console.is_terminal
        self._bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]} "),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not (enabled and console.is_terminal),
            speed_estimate_period=WINDOW,
        )
        self._task = self._bar.add_task(label, total=total, completed=done, what=what, left="")

    def finished(self) -> None:
        """Counts one more, which the next step shows."""
        self._done += 1

    def step(self, stats: TokenCounts | None = None) -> None:
        """Shows the state after a step of the engine, unless it was shown less than `SHOWN_SECONDS` ago.

        stats: the engine's counters; None where tokens are not counted.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SHOWN_SECONDS
        self._bar.update(self._task, completed=self._done)
        what, seconds = self._what, self._bar.tasks[0].time_remaining
        left = "estimating" if seconds is None else f"{duration(seconds)} left"
        if stats is not None:
            what += f", {stats.num_computed_tokens / max(now - self._started, 1e-9):,.0f} tokens/s"
            generated = stats.num_generated_tokens
            read = stats.num_computed_tokens + stats.num_cached_tokens - generated
            if seconds is None and (generated or read):
                left += f", {generated or read:,} tokens {'generated' if generated else 'read'}"
        self._bar.lines = getattr(stats, "lines", ())
        self._bar.update(self._task, what=what, left=left)
        if self._lines and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            warn(f"{self._label}: {self._done}/{self._total} {what}, {left}", "")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def duration(seconds: float) -> str:
    """`45 s`, `24 min`, `3 h 05 min`: rounded as an estimate deserves."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
