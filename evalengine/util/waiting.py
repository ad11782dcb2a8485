"""Says what a command waits for, where that may take long and shows nothing of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from evalengine.plain_text import printable

SILENCE = 2.0  # seconds


@contextmanager
def said_if_long(what: str) -> Iterator[None]:
    """Prints `what` to standard error if the block takes more than `SILENCE` seconds."""
    stream = sys.stderr  # as it is now: the block may redirect it
    timer = threading.Timer(SILENCE, lambda: _say(what, stream))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str, stream: TextIO) -> None:
    stream.write(printable(f"evalengine: {what}") + "\n")
    stream.flush()
