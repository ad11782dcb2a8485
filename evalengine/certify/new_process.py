"""Work in a new Python process: the same requests once more, or a neighbour that keeps the device busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from evalengine.certify.run import Answers, batched
from evalengine.certify.schedules import Variant
from evalengine.certify.subject import Subject, open_subject
from evalengine.errors import EvalEngineError

NEW = get_context("spawn")  # a fresh interpreter: nothing of this process's state, CUDA context or threads
SIZE = {"cuda": 8192, "cpu": 512}  # rows and columns of a matrix, whose product takes a millisecond or two
AT_ONCE = 20  # products between two synchronisations


class NoNeighbour(EvalEngineError):
    """No second process could use the device: its compute mode is exclusive, or its memory full."""


@contextmanager
def in_a_new_process(subject: Subject) -> Iterator[Callable[[], Answers]]:
    """Start another process that answers all of the subject's cases in the background.

    Yields a function that waits for the answers. It raises `EvalEngineError` if the process fails.
    """
    with ProcessPoolExecutor(1, NEW) as pool:
        running = pool.submit(_answers, replace(subject))

        def answers() -> Answers:
            try:
                return running.result()
            except (EvalEngineError, BrokenProcessPool, OSError) as error:
                raise EvalEngineError(f"the same requests in a new process failed: {error}") from error
            finally:
                pool.shutdown()  # frees its memory on the device

        yield answers


def _answers(subject: Subject) -> Answers:
    checkpoint, tasks = open_subject(subject.config, subject.layers)
    cases = subject.cases(checkpoint, tasks)
    with subject.engine(checkpoint, cases) as llm:
        return batched(llm, Variant("a new process", cases))


class Neighbour:
    """A second process on the same device. It is idle until `busy`, so that it can be started in advance."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._connection, other_end = NEW.Pipe()
        self._process = NEW.Process(target=keep_busy, args=(device, other_end), daemon=True)
        self._process.start()
        other_end.close()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep the device busy, so that a GPU switches between two processes in the middle of kernels; then end.

        Raises `NoNeighbour`, with the reason, if the process cannot use the device.
        """
        try:
            try:
                reason = self._connection.recv()
                if not reason:
                    self._connection.send("start")
                    self._connection.recv()
            except (EOFError, OSError):
                reason = "it ended"
            if reason:
                raise NoNeighbour(f"no other process could keep {self._device} busy: {reason}")
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Kill the process. Idempotent."""
        self._process.kill()
        self._process.join()


@contextmanager
def busy_neighbour(device: str) -> Iterator[None]:
    """Keep the device busy with another process. Raises as `Neighbour.busy`."""
    with Neighbour(device).busy():
        yield


def keep_busy(device: str, connection: Connection) -> None:
    """Report "", or why the device cannot be used; wait for a message; then multiply matrices until killed."""
    try:
        size = SIZE[torch.device(device).type]
        x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        _multiply(x)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}".strip().splitlines()[-1])
        return
    connection.send("")
    with suppress(EOFError, BrokenPipeError):  # the parent has ended
        connection.recv()
        connection.send("")
        while True:
            _multiply(x)


def _multiply(x: torch.Tensor) -> None:
    for _ in range(AT_ONCE):
        x @ x
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
