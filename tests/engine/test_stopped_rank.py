"""A tensor-parallel rank that a signal has stopped: the run ends soon, and says which process it was."""

from __future__ import annotations

import os
import signal

import pytest

from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.errors import EvalEngineError

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
