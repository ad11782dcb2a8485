"""The other ranks of a model, as rank 0 sees them: processes that are told what to compute and die with it.

Each is a child process with a socket of its own to rank 0. Whoever dies closes his end: rank 0 then knows within
milliseconds, and a child ends itself when rank 0 is gone, however that happened.
"""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from evalengine.engine.parallel.group import connect
from evalengine.errors import EvalEngineError
from evalengine.layers.parallel import SINGLE, TensorParallel

T = TypeVar("T")
START = "from evalengine.engine.parallel.worker import main; main()"
SECONDS_TO_END = 5.0  # that a child has to leave by itself
LOG_TAIL = 2000  # characters of a dead rank's last words that are shown


@dataclass
class _Children:
    """What the watching thread and rank 0 share; it holds no `Ranks`, so that one nobody uses can be collected."""

    processes: list[subprocess.Popen]
    connections: list[Connection]
    folder: Path
    replies: list[queue.SimpleQueue] = field(default_factory=list)
    reason: str | None = None  # why the ranks are gone
    failed: threading.Event = field(default_factory=threading.Event)
    tp: TensorParallel | None = None

    def fail(self, reason: str) -> None:
        """The first reason counts. All children are ended, and what the device waits for is given up."""
        if not self.failed.is_set():
            self.reason = reason
            self.failed.set()
            for process in self.processes:
                process.kill()
            if self.tp is not None:
                self.tp.abort()
            for replies in self.replies:
                replies.put(None)


class Ranks:
    """Ranks 1 ... size - 1 of one model, and this process's collectives with them (`tp`). Of one rank: nobody.

    Raises EvalEngineError, with the reason and the dead rank's last words, from every method once a rank is lost.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        """devices: of every rank, rank 0's first."""
        self.size, self.tp = len(devices), SINGLE
        if self.size > 1:
            self._open(self.size, devices)

    def _open(self, size: int, devices: list[torch.device]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="evalengine-ranks-"))
        self._children = _Children([], [], folder)
        self._end = weakref.finalize(self, _end, self._children)
        try:
            for rank in range(1, size):
                self._start(rank, size, folder, devices[rank])
            threading.Thread(target=_watch, args=(self._children,), name="evalengine ranks", daemon=True).start()
            self.collect()  # every child has been able to import what it needs
            self.tell("connect", str(folder), devices)
            self.tp = connect(folder, 0, size, devices[0])
            self._children.tp = self.tp
            self.collect()
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, EvalEngineError):
                raise self.lost(error) from error
            raise

    def _start(self, rank: int, size: int, folder: Path, device: torch.device) -> None:
        ours, theirs = socket.socketpair()
        with theirs, (folder / f"rank-{rank}.log").open("wb") as log:
            arguments = [str(theirs.fileno()), str(rank), str(size), str(folder)]
            process = subprocess.Popen(
                [sys.executable, "-c", START, *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for rank 0, which decides what becomes of the others
            )
        self._children.processes.append(process)
        self._children.connections.append(Connection(ours.detach()))
        self._children.replies.append(queue.SimpleQueue())

    def tell(self, what: str, *told: Any) -> None:
        """A command, to every rank; they do it after those before it."""
        if self.size == 1:
            return
        self.check()
        data = pickle.dumps((what, told), protocol=pickle.HIGHEST_PROTOCOL)
        for connection in self._children.connections:
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise self.lost(error) from error

    def collect(self) -> list[Any]:
        """Every other rank's answer to a command that has one. Raises what a rank has raised."""
        if self.size == 1:
            return []
        answers = [replies.get() for replies in self._children.replies]
        self.check()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def together(self, what: str, told: tuple, own: Callable[[], T]) -> list[T]:
        """A command that has an answer, while this process does its own part of it. Every rank's answer, its own first.

        Raises what a rank has raised, this one first, when all are done: they stay in step.
        """
        self.tell(what, *told)
        try:
            mine = own()
        except Exception:
            with suppress(EvalEngineError):
                self.collect()
            raise
        return [mine, *self.collect()]

    def check(self) -> None:
        """Raises if a rank is lost."""
        if self.size > 1 and self._children.failed.is_set():
            raise EvalEngineError(self._children.reason)

    def lost(self, error: BaseException) -> EvalEngineError:
        """What to raise for an error after which the ranks are not in step any more: the reason of a rank that died, if
        one did. All are ended."""
        assert self.size > 1
        self._children.failed.wait(SECONDS_TO_END if isinstance(error, Exception) else 0)
        self._children.fail(f"rank 0 failed, and with it the ranks of this LLM: {type(error).__name__}: {error}")
        return EvalEngineError(self._children.reason)

    def close(self) -> None:
        """Ends them. Idempotent."""
        if self.size > 1:
            self._end()


def _watch(children: _Children) -> None:
    """Takes what the ranks say, until one is gone."""
    ranks = {connection: rank for rank, connection in enumerate(children.connections, start=1)}
    while True:
        for connection in wait(list(ranks)):
            rank = ranks[connection]  # type: ignore[index]
            try:
                kind, said = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except (OSError, EOFError):  # also of an end that `_end` has shut
                children.fail(_why(children, rank))
                return
            if kind == "failed":
                children.fail(f"rank {rank} of this LLM failed: {said}")
                return
            children.replies[rank - 1].put(said)


def _why(children: _Children, rank: int) -> str:
    """What is known of a rank that has closed its connection without a word."""
    process = children.processes[rank - 1]
    try:
        code = process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        code = None
    how = "has closed its connection" if code is None else f"was killed by signal {-code}" if code < 0 else "ended"
    try:
        words = (children.folder / f"rank-{rank}.log").read_text(errors="replace").strip()[-LOG_TAIL:]
    except OSError:
        words = ""
    return f"rank {rank} of this LLM {how}" + (f"; its last words:\n{words}" if words else "")


def _end(children: _Children) -> None:
    """Every rank closes its collectives while the others do; who does not leave within seconds is killed."""
    closing = None if children.tp is None else threading.Thread(target=children.tp.close, daemon=True)
    children.reason = children.reason or "this LLM is closed"
    if not children.failed.is_set():
        children.failed.set()
        for connection in children.connections:
            with suppress(OSError):
                connection.send_bytes(pickle.dumps(("leave", ())))
    if closing is not None:
        closing.start()  # its threads end here, not while the interpreter does
    for process in children.processes:
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if closing is not None:
        closing.join(SECONDS_TO_END)
    for connection in children.connections:
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # closing it would leave the watching thread with a descriptor of others
    shutil.rmtree(children.folder, ignore_errors=True)
