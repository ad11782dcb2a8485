"""Turns a failure of any command into one line and an exit code.

Only `exit_code` catches errors. Nothing heavy is imported, so that help and bad usage answer at once.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace as Namespace

from evalengine.errors import ConfigError, EvalEngineError

__all__ = ["PROGRAM", "Namespace", "exit_code", "fail", "quiet_threads"]

PROGRAM = "python -m evalengine"


def quiet_threads() -> None:
    """Makes waiting OpenMP threads sleep soon: threads that spin starve each other on a busy machine.

    20 rows of the default run on two cores that other programs use take 73 s with libgomp's own spinning and 6.6 s with
    this; 200 rows on idle cores take 12 and 16 s.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # libgomp reads it when torch is imported


def exit_code(work: Callable[[], int]) -> int:
    """The code that `work` returns; a failure is printed to standard error and becomes a code as well.

    Errors that a user can cure are one line; our own bugs show their traceback. `KeyboardInterrupt` and
    `BrokenPipeError` pass: they end the whole program, a sweep included.
    """
    try:
        return work()
    except SystemExit as exit:  # lm-eval's command line and typer's completion end so
        return int(exit.code or 0)
    except EvalEngineError as error:
        return fail(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or error
            cure = "free space and give the same command again; a run resumes"
            return fail(EvalEngineError(f"the disk is full ({where}); {cure}"))
        if isinstance(error, FileNotFoundError) and _folder_is_gone():
            return fail(ConfigError("the working directory no longer exists: change to one that does (cd)"))
        traceback.print_exc()
    except Exception:
        traceback.print_exc()
    return 1


def _folder_is_gone() -> bool:
    try:
        return not os.path.isdir(os.getcwd())
    except FileNotFoundError:
        return True


def fail(error: EvalEngineError) -> int:
    """Prints what is wrong to standard error; returns the error's exit code."""
    several = isinstance(error, ConfigError) and len(error.problems) > 1
    text = f"evalengine: several problems\n{error}" if several else f"evalengine: {error}"
    print("\n".join(map(_printable, text.split("\n"))), file=sys.stderr)
    return error.exit_code


def _printable(line: str) -> str:
    """The line with unprintable characters escaped: a file's or argument's text can hold commands of a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
