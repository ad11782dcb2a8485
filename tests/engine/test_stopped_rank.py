"""A tensor-parallel rank that a signal has stopped: the run ends soon, and says which process it was."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.errors import EvalEngineError
from evalengine.layers.parallel import TensorParallel

POOL = {"num_kv_blocks": 64, "block_size": 16}


def test_a_stopped_rank_ends_the_run_by_name(small_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection shows that a rank is stopped, and rank 0 would wait for it as for one that is slow."""
    monkeypatch.setattr("evalengine.engine.execute.parallel.ranks.SECONDS_STOPPED", 2)
    with LLM(small_checkpoint, tensor_parallel_size=2, **POOL) as llm:
        (process,) = llm._ranks._children.processes
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(
            EvalEngineError, match=rf"rank 1 of this LLM \(process {process.pid}\) was stopped .* resum"
        ):
            llm.generate([[5, 6, 7]])
        assert process.wait(20) == -signal.SIGKILL


class Group:
    """A process group whose abort waits for `may_end`, and counts its calls."""

    def __init__(self) -> None:
        self.calls, self.ended = 0, 0
        self.may_end = threading.Event()

    def abort(self) -> None:
        self.calls += 1
        self.may_end.wait()
        self.ended += 1


def test_collectives_are_closed_once_their_abort_has_ended() -> None:
    """Torch's code must not come back to Python while the interpreter shuts down: that is a SIGABRT."""
    group = Group()
    tp = TensorParallel(0, 2, group)
    tp.abort()
    threading.Timer(0.2, group.may_end.set).start()
    tp.close()
    tp.close()
    assert (group.calls, group.ended) == (1, 1)


def test_an_abort_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's takes a minute after a rank was lost."""
    monkeypatch.setattr("evalengine.layers.parallel.SECONDS_TO_ABORT", 0.05)
    group = Group()
    tp = TensorParallel(0, 2, group)
    tp.abort()
    tp.close()
    assert (group.calls, group.ended) == (1, 0)
    group.may_end.set()
