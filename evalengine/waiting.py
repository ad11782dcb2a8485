"""Says what a command waits for, where that may take long and shows nothing of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SILENCE = 2.0  # seconds


@contextmanager
def said_if_long(what: str) -> Iterator[None]:
    """Prints `what` to standard error if the block takes more than `SILENCE` seconds."""
    line, stream = f"evalengine: {what}\n", sys.stderr  # as it is now: the block may redirect it
    timer = threading.Timer(SILENCE, lambda: print(line, end="", file=stream, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
