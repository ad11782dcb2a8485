"""Work that a command begins before it needs it, in threads beside its own: imports, and a GPU's start.

A process is forked only where none of it is going on: the child would inherit locks that nobody lets go.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

# How long a thread may hold Python's lock if another one waits for it. With the usual 5 ms, each answer of the file
# system may wait as long for the other thread.
TURN_S = 0.0005
USUAL_TURN_S = sys.getswitchinterval()
_threads: list[threading.Thread] = []
_counting = threading.Lock()
_going_on = 0


def begin(name: str, work: Callable[[], None]) -> None:
    """Has a thread do the work from now on. Nothing is said of what fails: who needs the work done meets it again.

    A daemon, so that a command which ends early (a setting that is wrong) does not wait for it (`__main__.leave`).
    """
    global _going_on
    with _counting:
        _going_on += 1
        sys.setswitchinterval(TURN_S)
    thread = threading.Thread(target=_do, args=(work,), name=f"evalengine {name}", daemon=True)
    _threads.append(thread)
    thread.start()


def wait() -> None:
    """Returns once all that was begun has ended."""
    while _threads:
        if _threads[-1] is threading.current_thread():
            return
        _threads[-1].join()
        _threads.pop()


def _do(work: Callable[[], None]) -> None:
    global _going_on
    try:
        work()
    finally:
        with _counting:
            _going_on -= 1
            if not _going_on:
                sys.setswitchinterval(USUAL_TURN_S)
