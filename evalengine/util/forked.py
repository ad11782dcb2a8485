"""Work in forked processes, on other cores: parts of a large run's prompts, files and page.

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
import traceback
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import accumulate, chain, pairwise
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from evalengine.errors import EvalEngineError
from evalengine.util.limits import SECONDS, OutOfTime, apply_limits

Result = TypeVar("Result")
Part = TypeVar("Part")
_helps = False  # whether this process was forked to work next to another one, which has the other cores
_DIES_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG
MOST = 8  # processes: beyond, the copying of their results takes longer than they save


class Elsewhere(Exception):
    """The traceback of another process, as the cause of the error that it ended in."""


class ForkedTask(Generic[Result]):
    """A call that runs in a forked process from now on; as a context manager, the process ends with the block.

    The call must be one that can be made again: where no process can be forked (no memory, a limit of processes), or it
    is killed, `result` makes the call here, unless it is a limited one.
    """

    def __init__(self, work: Callable[[], Result], worthwhile: bool = True, limited: bool = False) -> None:
        """worthwhile: whether the call earns a process, which takes some 20 ms to start. Otherwise, and where there is
        one core, `result` makes the call. limited: whether the call must have a process with the limits of
        `util.limits`, on Linux; elsewhere it has no limits. Raises EvalEngineError if that process cannot start."""
        self._work, self._process, self._limited = work, 0, limited and sys.platform == "linux"
        if not self._limited and (not worthwhile or cores() < 2):
            return
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        parent = os.getpid()

        with warnings.catch_warnings(), sender:
            # Python 3.12 warns of locks that other threads hold while this one forks. The child takes none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._process = os.fork()
            except OSError as error:
                self._receiver.close()
                if self._limited:
                    raise EvalEngineError(f"cannot start a process for templates and patterns: {error}") from error
                return
            if self._process == 0:
                try:
                    _send(work, sender, parent, self._limited)
                finally:
                    os._exit(0)  # without the exit handlers of the parent

    def result(self) -> Result:
        """Wait for the call and return its result, or raise its error. To be called once."""
        if self._process == 0:
            return self._work()
        try:
            answer = self._receiver.recv_bytes()
        except (EOFError, OSError) as killed:  # it was killed before its answer, or in the middle of it
            if self._limited:
                raise EvalEngineError("the process that runs templates and patterns was killed; rerun the command if "
                                      "that was not their doing") from killed  # fmt: skip
            return self._work()
        error, value = pickle.loads(answer)
        if error is not None:
            raise error from (Elsewhere(value) if value else None)
        return value

    def __enter__(self) -> ForkedTask[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process == 0:
            return
        self._receiver.close()
        with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored, it is gone already
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


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
        helpers = [started.enter_context(ForkedTask(partial(work, share))) for share in others]
        return [*work(own), *chain.from_iterable(helper.result() for helper in helpers)]


def shares(parts: Sequence[Part], least: int, sizes: Sequence[int] | None = None) -> list[Sequence[Part]]:
    """The parts in order, in at least one share and at most one for each core, with about as much work in each."""
    sizes = sizes or [1] * len(parts)
    total = sum(sizes)
    count = max(1, min(cores(), MOST, total // least))
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    ends = [total * number / count for number in range(1, count)]
    edges = [0, *(bisect_left(middles, end) for end in ends), len(parts)]
    return [parts[start:end] for start, end in pairwise(edges) if start < end] or [parts]


def cores() -> int:
    """The cores that this process may use for forked processes; 1 where processes cannot be forked safely, and in a
    forked process without limits. A limited one may have all work of a kind, and uses all cores."""
    daemon = multiprocessing.current_process().daemon  # which may have no children
    # Ray's threads print, and the lock of an output that one of them holds would stay locked in a forked process.
    if sys.platform != "linux" or daemon or _helps or "ray" in sys.modules:
        return 1
    return len(os.sched_getaffinity(0))


def _send(work: Callable[[], Any], sender: Connection, parent: int, limited: bool) -> None:
    """Sends the result of the work from this process, which was forked for it."""
    global _helps
    _helps = not limited
    gc.freeze()  # Collections then pass over what was inherited, whose memory they would copy by touching it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler would raise here
    # If the parent is killed, the same command may resume its folder at once: no one else may be writing there.
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # The other cores have their own processes; and a tokenizer that had used threads before the fork would warn.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if limited:
        apply_limits()
    try:
        answer = pickle.dumps((None, work()), protocol=pickle.HIGHEST_PROTOCOL)
    except OutOfTime:  # between two settings, which would have named themselves
        answer = _answer_of(EvalEngineError(f"templates and patterns of a document are not finished after {SECONDS} s"))
    except BaseException as error:
        answer = _answer_of(error)
    with suppress(BrokenPipeError), sender:
        sender.send_bytes(answer)


def _answer_of(error: BaseException) -> bytes:
    """An error as `result` raises it: with this process's traceback, if it is a bug of ours."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        sendable = pickle.loads(pickle.dumps(error))
    except Exception:  # an error with its own arguments, which pickle cannot make again
        sendable = RuntimeError(str(error))
    return pickle.dumps((sendable, None if isinstance(sendable, EvalEngineError) else trace))
