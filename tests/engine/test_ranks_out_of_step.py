"""An error of rank 0 that leaves the other ranks in a collective ends them: none waits, and none answers later."""

from __future__ import annotations

import time

import pytest

from evalengine import LLM, EvalEngineError, SamplingParams
from evalengine.engine.kv_layout import kv_layout
from evalengine.engine.load.loader import Checkpoint
from tests.engine.test_tensor_parallel import POOL, SECONDS_TO_NOTICE, children, is_alive, until

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt()], ids=repr)
def test_an_error_within_a_command_that_all_ranks_answer(error: BaseException, small_checkpoint: Checkpoint) -> None:
    """Rank 1 computes the model by plain ops, for which it waits for rank 0's part of the embedding."""
    with LLM(small_checkpoint, tensor_parallel_size=2, **POOL) as llm:
        pids, started = children(llm), time.monotonic()

        def own() -> None:
            raise error

        arguments = (0, 1), kv_layout(llm.spec, llm.settings), llm.settings.block_size, [1, 2, 3]
        with pytest.raises(EvalEngineError if isinstance(error, Exception) else KeyboardInterrupt):
            llm._ranks.on_all_ranks("errors", arguments, own)
        until(lambda: not any(map(is_alive, pids)), "the other rank's end")
        assert time.monotonic() - started < SECONDS_TO_NOTICE
        with pytest.raises(EvalEngineError, match="rank 0 failed, and with it the ranks of this LLM"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=2))


def test_a_capture_that_fails_ends_the_ranks(small_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no CUDA graphs on a CPU: the runner is given one size to capture, and fails before rank 1 does."""
    with LLM(small_checkpoint, tensor_parallel_size=2, **POOL) as llm:
        assert llm.runner is not None
        monkeypatch.setattr(llm.runner, "graphs", type("Graphs", (), {"usual_keys": lambda _: [(1, 64)]})())

        def capture(*_: int) -> bool:
            raise RuntimeError("planted")

        monkeypatch.setattr(llm.runner, "capture", capture)
        pids = children(llm)
        with pytest.raises(EvalEngineError, match="rank"):
            llm.capture_graphs()
        until(lambda: not any(map(is_alive, pids)), "the other rank's end")
