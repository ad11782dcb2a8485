"""Seeded cases for the fuzz tests: a short run in CI, a long one by `make fuzz`.

EVALENGINE_FUZZ multiplies the number of cases (default 0.4), EVALENGINE_FUZZ_SEED chooses others (default 0). A failure
names its case; the same two settings give the same case again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager


class Case(random.Random):
    """The random numbers of one case."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    @contextmanager
    def named(self, what: object = "") -> Iterator[None]:
        """Adds the case's name, and what was tried, to any failure inside."""
        try:
            yield
        except BaseException as error:
            note = f"fuzz case {self.name}: {what}"
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(note)
            else:
                error.args = (*error.args, note)
            raise


def cases(subject: str, count: int) -> Iterator[Case]:
    """`count` cases (times EVALENGINE_FUZZ), the same in every run with the same seed."""
    scale, seed = float(os.environ.get("EVALENGINE_FUZZ", "0.4")), os.environ.get("EVALENGINE_FUZZ_SEED", "0")
    for number in range(max(1, round(count * scale))):
        yield Case(f"{subject}/{seed}/{number}")
