"""What all commands share: how words are parsed, and how a failure becomes one line and an exit code.

A command is a module with `main(argv) -> int`, named in `__main__.ENTRIES`. It raises what is wrong, and `exit_code` is
the only place that catches. Nothing heavy is imported, so that help and bad usage answer at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from evalengine.errors import ConfigError, EvalEngineError

PROGRAM = "python -m evalengine"


class Parser(argparse.ArgumentParser):
    """argparse, with bad usage as `ConfigError` and no abbreviated options.

    `command`: its words ("compare", "verify engine"), or "" for the program itself. `text`: the whole help, where
    argparse's own would not do.
    """

    def __init__(self, command: str = "", *, text: str | None = None, **options: Any) -> None:
        options.setdefault("prog", f"{PROGRAM} {command}".rstrip())  # subparsers come with theirs
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self._text = text

    def error(self, message: str) -> NoReturn:
        """Raises `ConfigError`: "<command>: <message> (see <command> --help)"."""
        command = self.prog.removeprefix(PROGRAM).strip()
        said = f"{command}: {message}" if command else message
        raise ConfigError(f"{said} (see {f'{command} --help'.lstrip()})")

    def format_help(self) -> str:
        """What --help prints."""
        return super().format_help() if self._text is None else self._text + "\n"


def exit_code(work: Callable[[], int]) -> int:
    """The code that `work` returns; a failure is said on standard error and becomes a code as well.

    Errors that a user can cure are one line; our own bugs show their traceback. `KeyboardInterrupt` and
    `BrokenPipeError` pass: they end the whole program, a sweep included.
    """
    try:
        return work()
    except SystemExit as exit:  # argparse's --help
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
    """Says what is wrong on standard error; returns the error's exit code."""
    several = isinstance(error, ConfigError) and len(error.problems) > 1
    text = f"evalengine: several problems\n{error}" if several else f"evalengine: {error}"
    print("\n".join(map(_printable, text.split("\n"))), file=sys.stderr)
    return error.exit_code


def _printable(line: str) -> str:
    """What a file or an argument has put into a message can hold a terminal's own commands: they are escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
