"""The errors a user can cure. `__main__` prints their text and exits with their `exit_code`; nothing else is caught.

Each message names the setting or file at fault and what to do about it. Broken invariants of our own are `assert`s.
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
        one = len(self.problems) == 1
        super().__init__(self.problems[0] if one else "\n".join(f"  - {p}" for p in self.problems))


def first_of(lines: Sequence[str], most: int, what: str = "more") -> list[str]:
    """The first `most` of the lines of a message, and how many there are besides: `... and 3 more`."""
    return [*lines[:most], *([f"... and {len(lines) - most} {what}"] if len(lines) > most else [])]


def listed(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first `most` names in a sentence, and how many there are besides: `a, b and 3 more`."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class DoubtedAnswersError(EvalEngineError):
    """Two computations of one request differ that must be equal: a machine computes wrong.

    request_id: whose. doubted: the requests answered by a machine that is in doubt; nothing may be built on them.
    """

    def __init__(self, message: str, request_id: int, doubted: Sequence[int]) -> None:
        super().__init__(message)
        self.request_id, self.doubted = request_id, list(doubted)


@contextmanager
def readable(path: object) -> Iterator[None]:
    """Of what is done with a path that a user named: an OSError (a name too long, no permission) as `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name another path, or mend its permissions") from error
