"""Work that a forked process does beside this one, on another core: parts of a large run's prompts, files and page.

The child inherits what the work reads, so only its result is copied. It must not compute with torch: of a process that
holds a GPU and threads, the child has the memory alone.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate, chain, pairwise
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from evalengine.errors import EvalEngineError

Result = TypeVar("Result")
Part = TypeVar("Part")
_DIES_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG
MOST = 8  # processes: beyond, the copying of their results takes longer than they save


class Beside(Generic[Result]):
    """A call that runs in a forked process from now on; as a context manager, the process ends with the block."""

    def __init__(self, work: Callable[[], Result], earns: bool = True) -> None:
        """earns: whether the call earns a process, which takes some 20 ms to start. Otherwise, and where there is one
        core, `result` makes the call."""
        self._work, self._process = work, None
        if not earns or cores() < 2:
            return
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        arguments = (work, sender, os.getpid())
        self._process = multiprocessing.get_context("fork").Process(target=_work, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of locks that other threads hold while this one forks. The child takes none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        sender.close()

    def result(self) -> Result:
        """What the call returns, once it has; raises what it raises. To be asked once.

        Raises: EvalEngineError if the process was killed.
        """
        if self._process is None:
            return self._work()
        try:
            raised, value = pickle.loads(self._receiver.recv_bytes())
        except (EOFError, OSError):  # it ended before its answer, or in the middle of it
            self._process.join()
            raise EvalEngineError(
                f"a process that helped to write this run's files ended with exit code {self._process.exitcode} (too "
                "little memory?); run the same command again: it resumes"
            ) from None
        if raised:
            raise value
        return value

    def __enter__(self) -> Beside[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._receiver.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def spread(
    work: Callable[[Sequence[Part]], list[Result]],
    parts: Sequence[Part],
    least: int,
    sizes: Sequence[int] | None = None,
) -> list[Result]:
    """`work(parts)`, by as many processes as there are cores, neighbours together. `work` must give a result a part.

    sizes: how much work each part is; by default all are alike. least: how much of it earns a process.
    """
    own, *others = shares(parts, least, sizes)
    with ExitStack() as started:
        helpers = [started.enter_context(Beside(partial(work, share))) for share in others]
        return [*work(own), *chain.from_iterable(helper.result() for helper in helpers)]


def shares(parts: Sequence[Part], least: int, sizes: Sequence[int] | None = None) -> list[Sequence[Part]]:
    """The parts in order, in at least one share and at most one for each core, with about as much work in each."""
    sizes = sizes or [1] * len(parts)
    total = sum(sizes)
    count = max(1, min(cores(), MOST, total // least))
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    edges = [0, *(bisect_left(middles, total * number / count) for number in range(1, count)), len(parts)]
    return [parts[start:end] for start, end in pairwise(edges) if start < end] or [parts]


def cores() -> int:
    """The cores that this process may use for forked processes; 1 where processes cannot be forked safely."""
    if sys.platform != "linux" or multiprocessing.current_process().daemon:  # a daemon may have no children
        return 1
    return len(os.sched_getaffinity(0))


def _work(work: Callable[[], Any], sender: Connection, parent: int) -> None:
    gc.freeze()  # Collections then pass over what was inherited, whose memory they would copy by touching it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    # If the parent is killed, the same command may take up its folder at once: nobody else may be writing there.
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        answer = (False, work())
    except BaseException as error:
        answer = (True, error)
    with suppress(BrokenPipeError):
        sender.send_bytes(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))
    sender.close()
