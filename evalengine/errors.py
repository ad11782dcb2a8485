"""The errors that a user can fix. The command line prints their text and exits with their `exit_code`.

Each message names the setting or file at fault and what to do about it. Broken invariants of the package are `assert`s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from evalengine.plain_text import printable


class EvalEngineError(Exception):
    """A run that failed for a reason outside the program: a damaged file, a full disk, a lost device.

    Takes the lines of its message. Each may quote a file or another program, so what is not visible in it is escaped, a
    newline too: nothing that is quoted can look like a line of ours.
    """

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = list(map(printable, lines))

    def __str__(self) -> str:
        return "\n".join(self.lines)


class ConfigError(EvalEngineError, ValueError):
    """Settings or arguments that cannot be honoured; takes one message or all of them, listed at once.

    further: lines that belong below a single message.
    """

    exit_code = 2

    def __init__(self, problems: str | Sequence[str], *further: str) -> None:
        self.problems = [printable(p) for p in ([problems] if isinstance(problems, str) else problems)]
        listed = self.problems if len(self.problems) == 1 else [f"  - {p}" for p in self.problems]
        super().__init__(*listed, *further)
        self.args = (problems, *further)  # what pickle makes the error from again


def first_of(lines: Sequence[str], most: int, what: str = "more") -> list[str]:
    """The first `most` of the lines of a message, and the number of the others: `... and 3 more`."""
    return [*lines[:most], *([f"... and {len(lines) - most} {what}"] if len(lines) > most else [])]


def listed(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first `most` names in a sentence, and the number of the others: `a, b and 3 more`."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def near(word: object, choices: Iterable[str]) -> str:
    """The known word that was probably meant, or all known words, as a part of a sentence."""
    import difflib  # 0.8 ms, only for errors

    known = [*choices]
    matches = difflib.get_close_matches(str(word), known, 1)
    return f"did you mean {matches[0]}?" if matches else f"there are: {', '.join(known)}"


def one_line(error: BaseException, most: int = 300) -> str:
    """An exception of another's code in one line: its class, and the beginning of its message."""
    return " ".join(re.sub(r"([*=_-])\1{5,}", "", f"{type(error).__name__}: {error}").split())[:most]


class ReplicaMismatchError(EvalEngineError):
    """Two computations of one request that must be equal differ: a machine computes wrong.

    request_id: the request that was computed twice. doubted: all requests that the machines in doubt answered; none of
    these answers may be used.
    """

    def __init__(self, message: str, request_id: int, doubted: Sequence[int]) -> None:
        super().__init__(message)
        self.request_id, self.doubted = request_id, list(doubted)


@contextmanager
def readable(path: object) -> Iterator[None]:
    """Turns an OSError over a path that a user named (a name too long, no permission) into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name another path, or mend its permissions") from error
