"""Calls code of lm-eval without its progress bars and notes, and with the random numbers that it starts with."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import numpy as np

SEEDS = (0, 1234)  # lm-eval's default seeds of `random` and of NumPy
State = tuple[Any, Any]


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps lm-eval and `datasets` from writing to the terminal; errors are raised all the same."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


class RandomNumbers:
    """The generators that all code of a process shares, as lm-eval seeds them at its start.

    Some tasks shuffle their choices with these generators. Each task is therefore given its own states, which depend
    neither on the other tasks nor on what ran before.
    """

    def __init__(self, state: State | None = None) -> None:
        """state: the `state` of another object, from which the generators go on; None: lm-eval's seeds."""
        self.state = state or (random.Random(SEEDS[0]).getstate(), np.random.RandomState(SEEDS[1]).get_state())

    @contextmanager
    def used(self) -> Iterator[None]:
        """Sets the process's generators to these states; afterwards keeps the new states and restores the old ones."""
        outer = random.getstate(), np.random.get_state()
        _set(self.state)
        try:
            yield
        finally:
            self.state = random.getstate(), np.random.get_state()
            _set(outer)


def _set(state: State) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
