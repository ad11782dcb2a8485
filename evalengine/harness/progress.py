"""Progress of a run on standard error: a live bar on a terminal, a line now and then elsewhere (CI logs)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from evalengine.engine.stats import EngineStats, FleetStats
from evalengine.harness.time_left import TimeLeft, WorkAmount
from evalengine.plain_text import warn

if TYPE_CHECKING:
    from typing_extensions import Self

LINE_SECONDS = 10.0  # seconds between lines where there is no terminal


class _Bar(Progress):
    """A bar with lines of text below it."""

    lines: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(f"  {line}", style="dim") for line in self.lines)


class _Shown:
    """A bar that is shown while the context is open."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class RunProgress(_Shown):
    """Shows requests done, tokens per second and time left, with a line for each replica. A context manager."""

    _bar: _Bar

    def __init__(
        self, label: str, total: int, done: int = 0, enabled: bool = True, work: WorkAmount | None = None
    ) -> None:
        """work: that of the remaining requests; None if it is not known."""
        self._console = Console(stderr=True)
        self._label, self._total, self._done = label, total, done
        self._started = self._last_line = time.monotonic()
        self._left = TimeLeft(work or WorkAmount(total - done))
        self._enabled = enabled
        self._bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests  {task.fields[rate]} tokens/s "),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task(label, total=total, completed=done, rate="-", left="")

    def finished(self, spare: int = 0) -> None:
        """Counts one more finished request. spare: tokens that it might have generated and did not."""
        self._done += 1
        self._left.finished(spare)
        if not self._bar.disable:
            self._bar.update(self._task, completed=self._done)

    def step(self, stats: EngineStats) -> None:
        """Shows the state after a step of the engine."""
        now = time.monotonic()
        elapsed = now - self._started
        generated = stats.num_generated_tokens
        self._left.step(elapsed, stats.num_computed_tokens + stats.num_cached_tokens - generated, generated)
        rate = f"{stats.num_computed_tokens / max(elapsed, 1e-9):,.0f}"
        left = self._left.words()
        self._bar.lines = stats.lines if isinstance(stats, FleetStats) else ()
        self._bar.update(self._task, rate=rate, left=left)
        if self._enabled and not self._console.is_terminal and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            line = f"{self._label}: {self._done}/{self._total} requests, {rate} tokens/s{', ' * bool(left)}{left}"
            warn(line, "")


class ProgramProgress(_Shown):
    """Shows how many programs have been run. A context manager; shows nothing if there are none."""

    def __init__(self, label: str, total: int, enabled: bool = True) -> None:
        self._console = Console(stderr=True)
        self._label, self._total, self._done = label, total, 0
        self._enabled = enabled and total > 0
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("programs run "),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not (self._enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task(label, total=total)

    def finished(self) -> None:
        """Counts one more finished program."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        now = time.monotonic()
        if self._enabled and not self._console.is_terminal and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            warn(f"{self._label}: {self._done}/{self._total} programs run", "")
