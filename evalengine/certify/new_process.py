"""Work in a new Python process: the same requests once more, or a neighbour that keeps the device busy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe, get_context
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


def in_a_new_process(subject: Subject) -> Answers:
    """The answers to all of the subject's cases, computed by another process. Raises `EvalEngineError` if it fails."""
    try:
        with ProcessPoolExecutor(1, NEW) as pool:
            return pool.submit(_answers, replace(subject)).result()
    except (EvalEngineError, BrokenProcessPool, OSError) as error:
        raise EvalEngineError(f"the same requests in a new process failed: {error}") from error


def _answers(subject: Subject) -> Answers:
    checkpoint, tasks = open_subject(subject.config, subject.layers)
    cases = subject.cases(checkpoint, tasks)
    with subject.engine(checkpoint, cases) as llm:
        return batched(llm, Variant("a new process", cases))


@contextmanager
def busy_neighbour(device: str) -> Iterator[None]:
    """Keeps the device busy with another process, so that a GPU switches between the two in the middle of kernels.

    Raises `NoNeighbour`, with its reason, if it cannot start.
    """
    started, other_end = Pipe(duplex=False)
    process = NEW.Process(target=keep_busy, args=(device, other_end), daemon=True)
    process.start()
    try:
        other_end.close()
        try:
            reason = started.recv()
        except EOFError:
            reason = "it ended"
        if reason:
            raise NoNeighbour(f"no other process could keep {device} busy: {reason}")
        yield
    finally:
        process.kill()
        process.join()


def keep_busy(device: str, started: Connection) -> None:
    """Multiplies matrices until it is killed. Sends "" once it does, or why it cannot."""
    try:
        size = SIZE[torch.device(device).type]
        x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    except Exception as error:
        started.send(f"{type(error).__name__}: {error}".strip().splitlines()[-1])
        return
    started.send("")
    while True:
        for _ in range(AT_ONCE):
            x @ x
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
