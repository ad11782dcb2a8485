"""Python's garbage collector runs seldom in a run, which makes millions of objects that live to its end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 3_000_000  # new objects, those that are gone not counted, after which the collector looks for cycles


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Lets the collector run seldom. A run's lists of token ids are in no cycles; at its defaults the collector walks
    over all of them again and again, for a sixth of a large run's time on the host. With 200,000 new objects in place
    of `YOUNG` it took 1.0 s of a run of 14,042 documents out of the cache, and 20 MB less memory of 1,030. The default
    run with `limit=4` spent 0.42 s of 5.3 s of CPU time in 569 collections, and with this 0.15 s of 4.7 s in one."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
