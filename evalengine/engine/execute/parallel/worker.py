"""The process of a rank: does rank 0's commands in order, and ends when rank 0 is gone."""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from evalengine.config.schema import EngineConfig
from evalengine.engine.execute.batch import Batch
from evalengine.engine.execute.memory import plan_num_kv_blocks
from evalengine.engine.execute.model_runner import explain
from evalengine.engine.execute.parallel.group import connect, share_memory
from evalengine.engine.execute.rank_runner import RankRunner, errors
from evalengine.engine.kv_layout import KVLayout
from evalengine.engine.load.loader import Checkpoint, load_model
from evalengine.engine.settings import Settings
from evalengine.errors import EvalEngineError
from evalengine.layers import create_ops
from evalengine.layers.parallel import SINGLE

# Commands that are answered: rank 0 raises an error in one of them, and this rank goes on. After any other error the
# ranks are not in step, and this one ends.
ANSWERED = frozenset({"connect", "load", "verify", "plan", "build", "explain", "errors"})


class Worker:
    """One rank's state, with a method for each command."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.tp = rank, size, SINGLE
        self.runner: RankRunner | None = None

    def connect(self, folder: str, devices: list[torch.device]) -> None:
        self.device = devices[self.rank]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.tp = connect(Path(folder), self.rank, self.size, self.device)

    def load(self, checkpoint: Checkpoint, settings: Settings, slot_bytes: int) -> None:
        """Loads the rank's part of the weights."""
        torch.set_num_threads(settings.num_threads)
        self.checkpoint, self.spec = checkpoint, checkpoint.spec
        self.ops = create_ops(settings.numerics, settings.dtype, self.device, settings.attention_backend, self.tp)
        share_memory(self.ops, slot_bytes)
        self.model = load_model(checkpoint, self.ops, settings.max_model_len)

    def verify(self, block_size: int) -> None:
        for shapes in self.spec.every_shapes:
            self.ops.verify_kernels(shapes, block_size=block_size)

    def drop(self) -> None:
        """Drops the pool, so that another fits."""
        self.runner = None

    def plan(self, config: EngineConfig, settings: Settings) -> int:
        """The number of pages that fit this rank's memory."""
        torch.set_num_threads(settings.num_threads)
        return plan_num_kv_blocks(config, self.spec, replace(settings, device=self.device))

    def build(self, layers: tuple[int, ...] | None, *pool: Any) -> None:
        model = self.model if layers is None else self.model.of_layers(layers)
        self.runner = RankRunner(model, model.spec, self.ops, *pool)

    def errors(self, layers: tuple[int, ...], layout: KVLayout, block_size: int, ids: list[int]) -> Any:
        return errors(self.model.of_layers(layers), self.ops, layout, block_size, ids)

    def compute(self, *step: Any) -> None:
        self._built.compute(*step)

    def replay(self, *step: Any) -> None:
        self._built.replay(*step)

    def copy_states(self, copies: list[tuple[int, int]]) -> None:
        self._built.copy_states(copies)

    def capture(self, size: int, kv_len: int) -> None:
        self._built.capture(size, kv_len)

    def explain(self, batch: Batch, rows: list[int]) -> Any:
        return explain(self._built, batch, rows)

    def fill(self, value: float) -> None:
        """Fills the pool with one number, so that a slot which is read before it is written shows."""
        self._built.fill_pools(value)

    def leave(self) -> NoReturn:
        """Closes the collectives, together with rank 0, and ends this process."""
        self.runner = None
        self.tp.close()
        os._exit(0)

    @property
    def _built(self) -> RankRunner:
        assert self.runner is not None, "rank 0 builds before it computes"
        return self.runner


def main() -> NoReturn:
    """Does rank 0's commands until it is gone.

    Command line: the socket's descriptor, this rank, the number of ranks, the ranks' folder.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # they are rank 0's, with which this process ends
        signal.signal(number, signal.SIG_IGN)
    descriptor, rank, size, folder = (int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    connection = Connection(descriptor)
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands, folder), daemon=True).start()
    worker = Worker(rank, size)
    try:
        _send(connection, "answer", None)
        with torch.inference_mode():
            while True:
                _dispatch(worker, connection, *pickle.loads(commands.get()))
    except BaseException as error:
        traceback.print_exc()
        _send(connection, "failed", f"{type(error).__name__}: {error}")
        os._exit(1)


def _dispatch(worker: Worker, connection: Connection, command: str, arguments: tuple) -> None:
    if command not in ANSWERED:
        getattr(worker, command)(*arguments)
        return
    try:
        answer = getattr(worker, command)(*arguments)
    except EvalEngineError as error:
        answer = error
    _send(connection, "answer", answer)


def _send(connection: Connection, kind: str, content: Any) -> None:
    connection.send_bytes(pickle.dumps((kind, content)))


def _read(connection: Connection, commands: queue.SimpleQueue[bytes], folder: str) -> None:
    """Receives commands, in its own thread: even while the main thread waits for another rank or the device, the
    process must end when rank 0 is gone."""
    try:
        while True:
            commands.put(connection.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
