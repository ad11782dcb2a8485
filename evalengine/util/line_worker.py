"""A Python process that answers lines of JSON, for code that may loop, take all memory or end its process."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any


class LineWorker:
    """A process that answers one question a line, both as JSON objects. It is killed with this object."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """arguments: those of the Python interpreter."""
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
        )
        weakref.finalize(self, _stop, self._process)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer; None if the process ended over the question."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any] | None:
        """The next line that the process writes; None if it ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def exit_code(self) -> int:
        """The exit code of a process whose output has ended; -N if signal N killed it."""
        return self._process.wait()

    def kill(self) -> None:
        """Ends the process now; the next question has no answer."""
        self._process.kill()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
