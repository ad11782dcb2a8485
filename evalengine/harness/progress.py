"""Progress of a run on standard error: a live bar on a terminal, a line now and then elsewhere (CI logs)."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10.0  # between lines where there is no terminal


class RunProgress:
    """Requests done, tokens per second, time left. A context manager; `advance` after every finished request."""

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

    def advance(self, num_tokens: int) -> None:
        """One request more is done; `num_tokens` is all tokens that went through the model so far."""
        self._done += 1
        now = time.monotonic()
        rate = num_tokens / max(now - self._started, 1e-9)
        self._bar.update(self._task, completed=self._done, rate=f"{rate:,.0f}")
        if self._enabled and not self._console.is_terminal and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            left = (now - self._started) / (self._done - self._first) * (self._total - self._done)
            line = f"{self._label}: {self._done}/{self._total} requests, {rate:,.0f} tokens/s, {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
