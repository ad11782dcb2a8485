"""Ctrl-C while requests run: the first one lets the step that runs finish, the second one ends everything."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from evalengine.plain_text import warn


class Interrupts:
    """Counts Ctrl-C while the context is open; the second raises KeyboardInterrupt. Outside the main thread Python
    delivers no signals, and `asked` stays False."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        self._watching = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before, self._watching = signal.signal(signal.SIGINT, self._take), True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Puts the former signal handler back. Idempotent."""
        if self._watching:
            self._watching = False
            signal.signal(signal.SIGINT, self._before)

    def after_a_step(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed. Called once the step's results have been taken."""
        if self.asked:
            raise KeyboardInterrupt

    def _take(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.asked:
            self.restore()
            raise KeyboardInterrupt
        self.asked = True
        warn("finishing the step that runs; Ctrl-C again ends at once")
