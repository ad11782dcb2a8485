"""Ctrl-C (SIGINT) and SIGTERM end a command with a shell's exit codes, 130 and 143, whatever it does at that moment.

A handler of signals can only raise, and an exception that is raised amid an import is often lost: Python ignores it in
the import system's own callbacks, and a library takes its missing part for one that is not installed and goes on.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN = "give the same command again: it resumes what is kept"
_taken = 0  # the signal that was taken, until the command has ended
_code: int | None = None  # the exit code of a command that is done


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which batch systems and containers end a process."""


def raise_for(number: int) -> NoReturn:
    """Raises what a signal raises."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def watch_signals() -> None:
    """Has the two signals raise; amid an import, or at their second time, they end this process at once. That leaves no
    more behind than SIGKILL does, which every folder and every child process of ours stands."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup`, and what a script's shell starts with `&`
            signal.signal(number, _take)


def ended(code: int) -> int:
    """The exit code of a command that returned `code`. A signal that a library swallowed counts; one that comes from
    now on changes nothing."""
    global _code
    _code = 128 + _taken if _taken else code
    return _code


def say(interrupt: KeyboardInterrupt) -> int:
    """Says on standard error what ended the command, and what is kept; returns the exit code."""
    number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
    from evalengine.plain_text import warn  # the signals are watched before anything else is imported

    warn(_text(number, *map(str, interrupt.args)), "")
    return 128 + number


def _text(number: int, *folders: str) -> str:
    kept = f"finished requests are kept in {folders[0]}; the same command resumes" if folders else AGAIN
    return f"{'Terminated' if number == signal.SIGTERM else 'Interrupted'}: {kept}."


def _take(number: int, frame: FrameType | None) -> None:
    """The signal handler."""
    global _taken
    if _code is not None:
        _end(_code)
    if _taken or _importing(frame):
        os.write(2, f"{_text(number)}\n".encode())  # the stream's own lock may be held by what was interrupted
        _end(128 + number)
    _taken = number
    raise_for(number)


def _end(code: int) -> NoReturn:
    os._exit(code)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
