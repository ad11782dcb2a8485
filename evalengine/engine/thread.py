"""`EngineThread`: an engine in its own thread, whose requests come one by one and join the batch that runs."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count

from evalengine.engine.engine import Engine
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.schedule.sequence import Generating, Top
from evalengine.engine.stats import EngineStats

logger = logging.getLogger(__name__)

# Seconds that a busy thread may keep the interpreter from the engine's, which gives it up in each of a step's many
# operations and requests it again. With a thread that never rests, a batch took 7.3 s with Python's 5 ms, 5.1 s with
# this, and 3.2 s alone; shorter ones gave no more.
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class NewTokens:
    """Tokens that a generation has got since the last time; its output comes later."""

    request_id: int
    token_ids: list[int]
    logprobs: list[float]
    top: list[Top]  # each token's alternatives, best first; empty ones where none are wanted


@dataclass(frozen=True)
class EngineFailure:
    """The step that a request was part of failed, or the engine's thread ended before its answer."""

    request_id: int
    error: BaseException


Event = RequestOutput | NewTokens | EngineFailure
Listener = Callable[[Event], None]  # called in the engine's thread, or in that of a `submit` that comes too late


class EngineEnded(Exception):
    """The engine's thread has ended: no request is answered any more."""


class _Halted(Exception):
    """Ends a run of the engine from its own thread."""


class EngineThread:
    """Runs requests of any number of callers on one engine, to which it needs exclusive access.

    `submit`, `drop` and `stop` may be called from any thread. A request must be one that `check_requests` passes: one
    that can never run would fail the others in its batch.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._listeners: dict[int, Listener] = {}  # of the requests without an output yet
        self._reported: dict[int, int] = {}  # request whose tokens are streamed -> how many have been
        self._dropped: set[int] = set()
        self._stopping = self._halting = False
        self._ended: BaseException | None = None  # why the thread has ended
        self._failing = False  # a run has failed, and none has given an output since
        self._ids = count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread. Threads of the whole process take turns more often from here on (`SWITCH_SECONDS`)."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread takes requests."""
        return self._thread.is_alive() and self._ended is None

    @property
    def healthy(self) -> bool:
        """Whether requests are answered: the last run of the engine has not failed."""
        return self.alive and not self._failing

    @property
    def num_open(self) -> int:
        """Requests that have no output yet."""
        return len(self._listeners)

    def new_ids(self, number: int) -> list[int]:
        """Ids for so many requests that no others have."""
        return [next(self._ids) for _ in range(number)]

    def submit(self, requests: Sequence[Request], listen: Listener, tokens: bool = False) -> None:
        """Adds requests, whose ids are those of `new_ids`. Each gives one output or failure, unless it is dropped: a
        failure at once where the thread has ended.

        tokens: whether the tokens of generations are streamed, too.
        """
        with self._changed:
            ended = self._ended
            if ended is None:
                self._queue.extend(requests)
                self._listeners.update((request.request_id, listen) for request in requests)
                if tokens:
                    self._reported.update((request.request_id, 0) for request in requests)
                self._changed.notify_all()
        for request in requests if ended is not None else ():
            _notify(listen, EngineFailure(request.request_id, ended or EngineEnded()))

    def drop(self, request_ids: Collection[int]) -> None:
        """Forgets requests: no more events follow, and running ones free their pages after the step."""
        with self._changed:
            known = self._listeners.keys() & set(request_ids)
            for request_id in known:
                self._forget(request_id)
            self._dropped |= known

    def stop(self, halt: bool = False) -> None:
        """Ends the thread once all requests are answered; halt: after the step that runs, without their answers."""
        with self._changed:
            self._stopping, self._halting = True, halt
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Answer until stopped. However it ends, every current and later caller gets its error."""
        ended: BaseException = EngineEnded("the engine was stopped")
        try:
            self._answer()
        except BaseException as error:
            logger.critical("the engine's thread has ended; no request is answered any more", exc_info=True)
            ended = error
        finally:
            with self._changed:
                self._ended = ended
                self._queue.clear()
            self._fail(ended)

    def _answer(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if self._halting or not self._queue:
                    return
            try:
                for output in self.engine.run(self._arrived(), self._report_step, self._arrived):
                    self._failing = False
                    if listen := self._finished(output.request_id):
                        _notify(listen, output)
            except _Halted:
                return
            except Exception as error:
                logger.exception("the engine failed; the requests that ran with it are lost")
                self._failing = True
                self._fail(error)

    def _arrived(self) -> list[Request]:
        """The requests since the last step; those that were dropped leave the engine here, between two steps."""
        with self._changed:
            if self._halting:
                raise _Halted
            dropped, self._dropped = self._dropped, set()
            arrived = [request for request in self._queue if request.request_id not in dropped]
            self._queue.clear()
        if dropped:
            self.engine.scheduler.drop(dropped)
        return arrived

    def _report_step(self, _: EngineStats) -> None:
        """Tells of the tokens that the last step has added."""
        if not self._reported:
            return
        for seq in self.engine.scheduler.sequences:
            if isinstance(seq, Generating) and seq.request.request_id in self._reported:
                self._report_tokens(seq, seq.request.request_id)

    def _report_tokens(self, seq: Generating, request_id: int) -> None:
        with self._changed:
            listen, reported = self._listeners.get(request_id), self._reported.get(request_id)
            if listen is None or reported is None or reported == len(seq.logprobs):
                return
            self._reported[request_id] = len(seq.logprobs)
        _notify(listen, NewTokens(request_id, seq.output_ids[reported:], seq.logprobs[reported:], seq.top[reported:]))

    def _finished(self, request_id: int) -> Listener | None:
        with self._changed:
            return self._forget(request_id)

    def _forget(self, request_id: int) -> Listener | None:
        self._reported.pop(request_id, None)
        return self._listeners.pop(request_id, None)

    def _fail(self, error: BaseException) -> None:
        """Tells of the failure who waits for more than what is queued."""
        with self._changed:
            lost = {*self._listeners} - {request.request_id for request in self._queue}
            listeners = [(request_id, self._forget(request_id)) for request_id in lost]
        for request_id, listen in listeners:
            if listen is not None:
                _notify(listen, EngineFailure(request_id, error))


def _notify(listen: Listener, event: Event) -> None:
    """Calls a listener. If it raises, only its event is lost."""
    try:
        listen(event)
    except Exception:
        logger.exception("a listener of the engine failed")
