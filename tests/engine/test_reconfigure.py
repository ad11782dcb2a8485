"""Another schedule for an engine that has its model already: its weights stay, all else starts anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evalengine.engine.llm import LLM
from evalengine.engine.request import SamplingParams, ScoreRequest
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.kernels.shapes import Shapes
from evalengine.layers.exact import ExactOps

SHORT = SamplingParams(max_tokens=4)  # by default an answer has up to 256 tokens


def test_reconfigure_keeps_the_weights_and_starts_afresh(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=4)
    assert llm.runner is not None
    model, answer = llm.runner.model, llm.generate([[1, 2, 3]], SHORT)[0]
    llm.reconfigure(block_size=8, num_kv_blocks=99, max_num_seqs=2)
    assert llm.runner.model is model and (llm.num_kv_blocks, llm.settings.block_size) == (99, 8)
    assert llm.scheduler.max_num_seqs == 2 and llm.stats.num_steps == 0 and not llm.block_manager.indexes[0].by_hash
    assert llm.generate([[1, 2, 3]], SHORT)[0].logprobs.tobytes() == answer.logprobs.tobytes()
    for refused_settings in ({"dtype": "float32"}, {"max_model_len": 9}, {"device": "cpu"}, {"max_num_seqs": 0}):
        with pytest.raises(ConfigError):
            llm.reconfigure(**refused_settings)
    assert llm.config.max_num_seqs == 2, "a refused setting leaves the engine as it was"
    llm.close()
    with pytest.raises(EvalEngineError, match="closed"):
        llm.reconfigure(max_num_seqs=1)


def test_a_refused_pool_leaves_the_engine_as_it_was(make_llm: Callable[..., LLM]) -> None:
    threads = torch.get_num_threads()
    llm = make_llm(num_kv_blocks=50, num_threads=threads + 1)
    before, answer = (llm.config, llm.settings), llm.generate([[1, 2, 3]], SHORT)[0]
    with pytest.raises(ConfigError, match="num_kv_blocks=1000000000"):
        llm.reconfigure(num_kv_blocks=10**9, block_size=8, num_threads=threads + 2)
    assert (llm.config, llm.settings) == before and llm.num_kv_blocks == 50
    assert llm.generate([[1, 2, 3]], SHORT)[0].logprobs.tobytes() == answer.logprobs.tobytes()
    assert torch.get_num_threads() == threads + 1
    llm.close()
    assert torch.get_num_threads() == threads


def test_threads_come_back_even_from_an_engine_that_cannot_be_rebuilt(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    llm = make_llm(num_threads=threads + 1)

    def build(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(LLM, "_build", build)
    with pytest.raises(MemoryError):
        llm.reconfigure(max_num_seqs=3)
    llm.close()
    assert torch.get_num_threads() == threads


def test_kernels_are_verified_for_every_page_size(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    verified_sizes: list[int] = []

    def verify_kernels(self: ExactOps, shapes: Shapes, *, block_size: int) -> dict[str, Any]:
        verified_sizes.append(block_size)
        if block_size == 32:
            raise EvalEngineError("no promise for 32")
        return {"block_size": block_size}

    monkeypatch.setattr(ExactOps, "verify_kernels", verify_kernels)
    llm = make_llm(block_size=16)
    llm.reconfigure(max_num_seqs=3)
    assert verified_sizes == [16], "nothing else asks for it"
    llm.reconfigure(block_size=8)
    assert verified_sizes == [16, 8] and llm.kernels_verdict == {"block_size": 8}
    with pytest.raises(EvalEngineError, match="no promise for 32"):
        llm.reconfigure(block_size=32)
    assert llm.settings.block_size == 8 and llm.generate([[1, 2, 3]], SHORT)
    llm.reconfigure(block_size=16)
    assert verified_sizes == [16, 8, 32] and llm.kernels_verdict == {"block_size": 16}


def test_an_emptied_prefix_cache_is_that_of_a_new_engine(make_llm: Callable[..., LLM]) -> None:
    """Emptied, the cache has no hits, and the model and the pool are the same ones."""
    llm = make_llm()
    assert llm.runner is not None
    model_and_pool = llm.runner.model, llm.runner.kv_pool, llm.num_kv_blocks
    prompt = list(range(1, 101))

    def computed() -> tuple[int, bytes]:
        cached_before = llm.stats.num_cached_tokens
        logprobs = llm.generate([prompt], SHORT)[0].logprobs.tobytes()
        return llm.stats.num_cached_tokens - cached_before, logprobs

    cold, warm = computed(), computed()
    assert cold[0] == 0 and warm[0] > 0
    llm.reset_prefix_cache()
    assert computed() == cold and (llm.runner.model, llm.runner.kv_pool, llm.num_kv_blocks) == model_and_pool
    assert llm.scheduler.block_manager is llm.block_manager


def test_the_prefix_cache_is_not_emptied_under_running_requests(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    running = llm.run([ScoreRequest(i, [1, 2, i + 3], [4]) for i in range(2)])
    next(running)
    with pytest.raises(EvalEngineError, match="cannot empty its prefix cache now"):
        llm.reset_prefix_cache()
    del running  # closes the iterator
    llm.reset_prefix_cache()
    llm.close()
    with pytest.raises(EvalEngineError, match="closed"):
        llm.reset_prefix_cache()
