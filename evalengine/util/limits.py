"""Limits for templates and regular expressions from a task's file, which may loop forever or use all memory.

They apply in a process that called `apply_limits`: `ForkedTask(limited=True)` forks one, since a memory limit holds for
all threads of a process. Elsewhere nothing here has an effect.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")

# Far above what real templates and patterns take: 1 ms and 1 MiB per document.
SECONDS = 10  # processor time for one document
BYTES = 1 << 30  # memory that one document may add to the process
CHARACTERS = 1 << 24  # length of one text

_limited = False  # whether `apply_limits` was called in this process


class LimitExceeded(ValueError):
    """A template or a regular expression needs more than the limits; the message names its setting."""


class OutOfTime(BaseException):
    """The time of one document is over. Not an Exception, so that nothing handles it as one of its own."""


def apply_limits() -> None:
    """Apply the limits to all further `limited` loops of this process, which must be a forked one."""
    global _limited
    _limited = True
    signal.signal(signal.SIGPROF, _end)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end(*_: object) -> None:
    raise OutOfTime


def limited(items: Iterable[Item]) -> Iterable[Item]:
    """The items; in a limited process, the loop's body has the limits for each of them."""
    return _each(items) if _limited else items


def _each(items: Iterable[Item]) -> Iterator[Item]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    for item in items:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        most = size + BYTES if soft == resource.RLIM_INFINITY else min(size + BYTES, soft)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        # It repeats, since some code of a library may swallow the first exception.
        signal.setitimer(signal.ITIMER_PROF, SECONDS, 1)
        try:
            yield item
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def named(setting: str) -> Iterator[None]:
    """A block whose excess of a limit becomes a LimitExceeded that names the setting; without limits, no effect."""
    try:
        yield
    except OutOfTime:
        raise LimitExceeded(f"{setting}: is not finished after {SECONDS} s of processor time") from None
    except MemoryError:
        if not _limited:
            raise
        raise LimitExceeded(f"{setting}: needs more than {BYTES >> 20} MiB of memory") from None
