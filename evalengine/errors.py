"""The errors that a user can cure. The command line prints their text and exits with their `exit_code`.

Each message names the setting or file at fault and what to do about it. Broken invariants of the package are `assert`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class EvalEngineError(Exception):
    """A run that failed for a reason outside the program: a damaged file, a full disk, a lost device."""

    exit_code = 1


class ConfigError(EvalEngineError, ValueError):
    """Settings or arguments that cannot be honoured; takes one message or all of them, listed at once."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        single = len(self.problems) == 1
        super().__init__(self.problems[0] if single else "\n".join(f"  - {p}" for p in self.problems))


def first_of(lines: Sequence[str], most: int, what: str = "more") -> list[str]:
    """The first `most` of the lines of a message, and the number of the others: `... and 3 more`."""
    return [*lines[:most], *([f"... and {len(lines) - most} {what}"] if len(lines) > most else [])]


def listed(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first `most` names in a sentence, and the number of the others: `a, b and 3 more`."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class DoubtedAnswersError(EvalEngineError):
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
