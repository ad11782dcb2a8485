"""Progress of a run on standard error: a live bar on a terminal, a line now and then elsewhere (CI logs)."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evalengine.engine.stats import EngineStats

LINE_SECONDS = 10.0  # between lines where there is no terminal
ETA_SHARE = 0.05  # of the requests done before an estimate is shown


class RunProgress:
    """Requests done, tokens per second, time left. A context manager."""

    def __init__(self, label: str, total: int, done: int = 0, enabled: bool = True) -> None:
        self._console = Console(stderr=True)
        self._label, self._total, self._done = label, total, done
        self._started = self._last_line = time.monotonic()
        self._first = done
        self._enabled = enabled
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests  {task.fields[rate]} tokens/s "),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task(label, total=total, completed=done, rate="-")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def finished(self) -> None:
        """One request more is done."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)

    def step(self, stats: EngineStats) -> None:
        """The engine made a step."""
        now = time.monotonic()
        rate = f"{stats.num_computed_tokens / max(now - self._started, 1e-9):,.0f}"
        self._bar.update(self._task, rate=rate)
        if self._enabled and not self._console.is_terminal and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            new = self._done - self._first
            # a large batch finishes its requests late: an estimate from the first few would be wild
            known = new >= ETA_SHARE * (self._total - self._first)
            left = f", {(now - self._started) / new * (self._total - self._done):.0f} s left" if known else ""
            line = f"{self._label}: {self._done}/{self._total} requests, {rate} tokens/s{left}"
            print(line, file=sys.stderr, flush=True)
