"""Where the time of a command goes: its phases, each a line of a file that the environment names.

Off unless `EVALENGINE_PHASES=FILE` is set, as `evalengine bench start` sets it. A line is JSON: the phase's name, and
its begin and end in UNIX seconds. Phases may overlap, since threads and forked processes have their own phases.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "EVALENGINE_PHASES"
_file = os.environ.get(VARIABLE)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A part of the command, written down once it ends; also a decorator of a function."""
    if _file is None:
        yield
        return
    begin = time.time()
    try:
        yield
    finally:
        note(name, begin, time.time())


def note(name: str, begin: float, end: float) -> None:
    """Writes a phase down; nothing where no file is named."""
    if _file is not None:
        line = json.dumps({"phase": name, "begin": begin, "end": end}) + "\n"
        with open(_file, "a", encoding="utf-8") as file:  # a line is one write, which appending keeps whole
            file.write(line)


def note_compilations() -> None:
    """Has every kernel that Triton compiles, or finds in its cache, written down as a phase, if phases are."""
    if _file is None:
        return
    import triton

    def listen(*, times: object, cache_hit: bool, **_: object) -> None:
        end, seconds = time.time(), getattr(times, "total", 0) * 1e-6
        note("kernels read" if cache_hit else "kernels compiled", end - seconds, end)

    triton.knobs.compilation.listener = listen
