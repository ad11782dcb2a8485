"""Ctrl-C or SIGTERM while requests run: the first one lets the step that runs finish, the second ends everything."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from evalengine.plain_text import warn
from evalengine.util.endings import SIGNALS, hear, raise_for, stuck


class Interrupts:
    """Takes the two signals while the context is open; the second that comes raises KeyboardInterrupt.

    SIGTERM is taken only where a handler of Python's takes it already: the program around may mean to be ended by it.
    Outside the main thread Python delivers no signals, and none is `received`.
    """

    def __init__(self) -> None:
        self.received = 0  # the first signal's number
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGINT or callable(signal.getsignal(number)):
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Puts the former signal handlers back. Idempotent."""
        while self._before:
            signal.signal(*self._before.popitem())

    def after_a_step(self) -> None:
        """Raises KeyboardInterrupt if a signal came. Called once the step's results have been taken."""
        if self.received:
            raise_for(self.received)

    def _take(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        hear()
        if self.received or stuck.is_set():
            self.restore()
            raise_for(number)
        self.received = number
        warn("finishing the step that runs; Ctrl-C again ends at once")
