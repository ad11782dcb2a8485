"""The other ranks of a model, as rank 0 sees them: processes that receive commands and end with it.

Each is a child process with its own socket to rank 0. A process that dies closes its end: rank 0 then knows within
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

from evalengine.engine.execute.parallel.group import connect
from evalengine.errors import EvalEngineError
from evalengine.layers.parallel import SINGLE, TensorParallel
from evalengine.util.endings import stuck

T = TypeVar("T")
START = "from evalengine.engine.execute.parallel.worker import main; main()"
SECONDS_TO_END = 5.0  # how long a child may take to end without a signal
SECONDS_STOPPED = 10  # how long a child may be stopped (SIGSTOP); batch systems stop and continue rank 0, too
LOG_TAIL = 2000  # characters of a dead rank's log that an error shows


@dataclass
class _Children:
    """State that the watching thread and rank 0 share. It holds no `Ranks`, so that an unused one is collected."""

    processes: list[subprocess.Popen]
    connections: list[Connection]
    folder: Path
    replies: list[queue.SimpleQueue] = field(default_factory=list)
    reason: str = ""  # why the ranks are gone
    failed: threading.Event = field(default_factory=threading.Event)
    tp: TensorParallel | None = None

    def fail(self, reason: str) -> None:
        """Ends all children and gives up what the device waits for. Only the first reason is recorded."""
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
    """Ranks 1 ... size - 1 of one model, and this process's collectives with them (`tp`); none if the size is 1.

    Raises EvalEngineError, with the reason and the dead rank's last words, from every method once a rank is lost.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        """devices: every rank's device, rank 0's first."""
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
            self.collect()  # the answer shows that every child could import what it needs
            self.broadcast("connect", str(folder), devices)
            self.tp = connect(folder, 0, size, devices[0])
            self._children.tp = self.tp
            self.collect()
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, EvalEngineError):
                raise self.lost(error) from error
            raise

    def _start(self, rank: int, size: int, folder: Path, device: torch.device) -> None:
        own_end, child_end = socket.socketpair()
        with child_end, (folder / f"rank-{rank}.log").open("wb") as log:
            arguments = [str(child_end.fileno()), str(rank), str(size), str(folder)]
            process = subprocess.Popen(
                [sys.executable, "-c", START, *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches rank 0 alone, which decides what becomes of the others
            )
        self._children.processes.append(process)
        self._children.connections.append(Connection(own_end.detach()))
        self._children.replies.append(queue.SimpleQueue())

    def broadcast(self, command: str, *arguments: Any) -> None:
        """Sends a command to every other rank; each does its commands in order."""
        if self.size == 1:
            return
        self.check()
        data = pickle.dumps((command, arguments), protocol=pickle.HIGHEST_PROTOCOL)
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

    def on_all_ranks(self, command: str, arguments: tuple, own: Callable[[], T]) -> list[T]:
        """Sends a command that has an answer, does this rank's part of it (`own`), and returns every rank's answer,
        rank 0's first.

        Raises what a rank has raised, rank 0's error first. After an EvalEngineError all ranks are done, and in step;
        any other error may have left them waiting for rank 0 in a collective, so it ends them.
        """
        self.broadcast(command, *arguments)
        try:
            mine = own()
        except EvalEngineError:
            with suppress(EvalEngineError):
                self.collect()
            raise
        except BaseException as error:
            self.end_after(error)
            raise
        return [mine, *self.collect()]

    def check(self) -> None:
        """Raises if a rank is lost."""
        if self.size > 1 and self._children.failed.is_set():
            raise EvalEngineError(*self._children.reason.split("\n"))

    def lost(self, error: BaseException) -> EvalEngineError:
        """The error to raise after one that leaves the ranks out of step: the reason of a rank that died, if one did.
        Ends all ranks."""
        assert self.size > 1
        self._children.failed.wait(SECONDS_TO_END if isinstance(error, Exception) else 0)
        self._children.fail(f"rank 0 failed, and with it the ranks of this LLM: {type(error).__name__}: {error}")
        return EvalEngineError(*self._children.reason.split("\n"))

    def end_after(self, error: BaseException) -> None:
        """End all ranks, if there are several, after an error that leaves them out of step. Raises EvalEngineError in
        place of an Exception; an interrupt is the caller's to raise."""
        if self.size > 1:
            lost = self.lost(error)
            if isinstance(error, Exception):
                raise lost from error

    def close(self) -> None:
        """Ends the other ranks. Idempotent."""
        if self.size > 1:
            self._end()


def _watch(children: _Children) -> None:
    """Receives the ranks' answers, until a rank is gone. Once a second it looks for what no connection shows: a rank
    that is stopped, for which rank 0 waits in native code, and signals that rank 0 therefore does not hear."""
    ranks = {connection: rank for rank, connection in enumerate(children.connections, start=1)}
    stopped = dict.fromkeys(ranks.values(), 0)  # rank -> seconds
    while True:
        ready = wait(list(ranks), timeout=1.0)
        for connection in ready:
            rank = ranks[connection]  # type: ignore[index]
            try:
                kind, content = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except (OSError, EOFError):  # also raised once `_end` has shut the connection
                children.fail(_why(children, rank))
                return
            if kind == "failed":
                children.fail(f"rank {rank} of this LLM failed: {content}")
                return
            children.replies[rank - 1].put(content)
        if ready:
            continue
        if stuck.is_set():
            children.fail("the ranks of this LLM were ended by a second signal")
        for rank, process in enumerate(children.processes, start=1):
            stopped[rank] = stopped[rank] + 1 if _is_stopped(process.pid) else 0
            if stopped[rank] >= SECONDS_STOPPED:
                children.fail(
                    f"rank {rank} of this LLM (process {process.pid}) was stopped from outside (SIGSTOP) for "
                    f"{stopped[rank]} s, while the others waited for it; the same command resumes"
                )


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; False where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _why(children: _Children, rank: int) -> str:
    """Why a rank has closed its connection without a message, if known."""
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
    """Ends the children: all ranks close their collectives together; a child that does not end in time is killed."""
    closing = None if children.tp is None else threading.Thread(target=children.tp.close, daemon=True)
    children.reason = children.reason or "this LLM is closed"
    if not children.failed.is_set():
        children.failed.set()
        for connection in children.connections:
            with suppress(OSError):
                connection.send_bytes(pickle.dumps(("leave", ())))
    if closing is not None:
        closing.start()  # the collectives' threads end here, not while the interpreter shuts down
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
            end.shutdown(socket.SHUT_RDWR)  # after a close, the watching thread's descriptor could be another file's
    shutil.rmtree(children.folder, ignore_errors=True)
