"""Ctrl-C (SIGINT) and SIGTERM end a command with a shell's exit codes, 130 and 143, whatever it does at that moment.

A handler of signals can only raise, and an exception that is raised amid an import is often lost: Python ignores it in
the import system's own callbacks, and a library takes its missing part for one that is not installed and goes on. And
it runs in the main thread, between two steps of Python: not while that thread waits in native code, for another rank,
a device or a download. So a thread listens as well.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN = "rerun the command to resume"
SECONDS_TO_HEAR = 1.0  # how long the main thread may take to hear a signal
SECONDS_TO_COME_BACK = 3.0  # and to come back from native code, once others know that it is `stuck` there
stuck = threading.Event()  # a second signal came, which the main thread does not hear: what it waits for is to end
_heard = 0  # signals that the main thread has heard
_taken = 0  # the signal that was taken, until the command has ended
_forking = threading.local()  # a thread's mask of signals while it forks


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which batch systems and containers end a process."""


def raise_for(number: int) -> NoReturn:
    """Raises what a signal raises."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def watch_signals() -> None:
    """Has the two signals raise; amid an import, or at their second time, they end this process at once. That leaves no
    more behind than SIGKILL does, which every folder and every child process of ours stands."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reading,), name="evalengine signals", daemon=True).start()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup`, and what a script's shell starts with `&`
            signal.signal(number, _take)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # `hold_back`
    os.register_at_fork(before=_before_fork, after_in_parent=_restore_mask, after_in_child=_leave_to_the_system)


def _before_fork() -> None:
    """Holds the signals back until the child has its own handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _leave_to_the_system() -> None:
    """Has the signals end a forked child as they end any process. With this process's pipe, each that came to a child
    would count as one that came here: a library that ends its pool would end the command four seconds later."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is _take:
            signal.signal(number, signal.SIG_DFL)
    _restore_mask()


def hold_back() -> None:
    """Holds the signals back from this process until it watches them: for a command of ours that another starts (as
    `preexec_fn`). Ctrl-C reaches all processes of the terminal, and while Python starts it would print a traceback."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def hear() -> None:
    """Counts a signal that the main thread has heard. Every handler calls it first."""
    global _heard
    _heard += 1


def ended(code: int) -> int:
    """The exit code of a command that returned `code`. A signal that a library swallowed counts; one that comes from
    now on changes nothing."""
    for number in SIGNALS:
        if signal.getsignal(number) is _take:
            signal.signal(number, signal.SIG_IGN)  # Python's end leaves this alone, and would restore the default
    return 128 + _taken if _taken else code


def raise_what_was_taken() -> None:
    """Raises the signal that ends the command, if one does: for where an error was caught. A library's clean-up that
    the signal came amid may fail with a different error than the signal's."""
    if _taken:
        raise_for(_taken)


def say(interrupt: KeyboardInterrupt) -> int:
    """Says on standard error what ended the command, and what can be resumed; returns the exit code."""
    number = signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT
    from evalengine.plain_text import warn  # the signals are watched before anything else is imported

    warn(_text(number, *map(str, interrupt.args)), "")
    return 128 + number


def _text(number: int, *folders: str) -> str:
    state = f"finished requests are in {folders[0]}; the same command resumes" if folders else AGAIN
    return f"{'Terminated' if number == signal.SIGTERM else 'Interrupted'}: {state}."


def _take(number: int, frame: FrameType | None) -> None:
    """The signal handler."""
    global _taken
    hear()
    if _taken or _importing(frame):
        _end(number)
    _taken = number
    raise_for(number)


def _end(number: int) -> NoReturn:
    """Ends the process at once, as the signal does."""
    os.write(2, f"{_text(number)}\n".encode())  # the stream's own lock may be held by what was interrupted
    os._exit(128 + number)


def _listen(reading: int) -> None:
    """Ends the process at the second signal if the main thread does not hear it; at the first, says that this helps."""
    came = 0
    while True:
        numbers = [number for number in os.read(reading, 64) if number in SIGNALS]
        came += len(numbers)
        time.sleep(SECONDS_TO_HEAR)
        if not numbers or _heard >= came:
            continue
        if came == 1:
            os.write(2, b"evalengine: waiting for what runs now; Ctrl-C again ends at once\n")
            continue
        before = _heard
        stuck.set()
        time.sleep(SECONDS_TO_COME_BACK)
        if _heard == before:
            _end(numbers[-1])


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
