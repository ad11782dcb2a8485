"""Turns a failure of any command into one line and an exit code.

Only `exit_code` catches errors. Nothing heavy is imported, so that help and bad usage answer at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace as Namespace

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.plain_text import warn, warn_of_bug
from evalengine.util.endings import raise_what_was_taken

__all__ = ["PROGRAM", "Namespace", "exit_code", "fail"]

PROGRAM = "python -m evalengine"


def exit_code(work: Callable[[], int]) -> int:
    """The code that `work` returns; a failure is printed to standard error and becomes a code as well.

    Errors that a user can fix are one line; our own bugs show their traceback. `KeyboardInterrupt` and
    `BrokenPipeError` pass: they end the whole program, a sweep included.
    """
    try:
        return work()
    except SystemExit as exit:  # lm-eval's command line and typer's completion end so
        return int(exit.code or 0)
    except BrokenPipeError:
        raise
    except Exception as error:
        raise_what_was_taken()
        if isinstance(error, EvalEngineError):
            return fail(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free space and rerun the command; a run resumes"
            return fail(EvalEngineError(f"the disk is full ({error.filename or error}); {fix}"))
        if isinstance(error, FileNotFoundError) and _folder_is_gone():
            return fail(ConfigError("the working directory no longer exists: change to one that does (cd)"))
        warn_of_bug()
        return 1


def _folder_is_gone() -> bool:
    try:
        return not os.path.isdir(os.getcwd())
    except FileNotFoundError:
        return True


def fail(error: EvalEngineError) -> int:
    """Prints what is wrong to standard error; returns the error's exit code."""
    if isinstance(error, ConfigError) and len(error.problems) > 1:
        lines = ["several problems", *error.lines]
    else:
        lines = error.lines
    for number, line in enumerate(lines):
        warn(line, "" if number else "evalengine: ")
    return error.exit_code
