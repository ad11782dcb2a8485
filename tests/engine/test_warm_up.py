"""An engine that was warmed up answers as one that was not, and has forgotten that it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evalengine.config.schema import EngineConfig, ModelConfig
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.engine.request import SamplingParams, ScoreRequest
from evalengine.engine.stats import EngineStats
from evalengine.engine.warm_up import made_up, warm_up
from tests.bitwise import assert_bitwise_equal

SETTINGS: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 256}


def test_a_warm_engine_gives_the_same_bytes_and_counts_from_zero() -> None:
    own = made_up(1024, 64)[:4]  # The warm-up's own beginnings: KV of one layer must not be taken for theirs.
    pairs = [(list(request.context_ids), list(request.continuation_ids)) for request in own]
    with LLM("asset:tinymath", **SETTINGS) as cold:
        expected = cold.score(pairs)
    with LLM("asset:tinymath", **SETTINGS) as warm:
        warm_up(warm)
        assert warm.runner is not None and len(warm.runner.kv_caches) == warm.spec.num_layers
        assert warm.stats == EngineStats() and warm.block_manager.num_free_blocks == warm.num_kv_blocks
        found = warm.score(pairs)
        assert warm.stats.num_cached_tokens == cold.stats.num_cached_tokens
    for output, other in zip(found, expected, strict=True):
        assert_bitwise_equal(output.logprobs, other.logprobs)


def test_the_inverse_the_layers_that_were_left_out_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an emptied prefix cache, what one layer wrote would be read as all layers' KV."""
    pairs = [(list(r.context_ids), list(r.continuation_ids)) for r in made_up(1024, 256)[-4:]]
    with LLM("asset:tinymath", **SETTINGS) as llm:
        expected = llm.score(pairs)
        llm.reset_prefix_cache()
        with monkeypatch.context() as patched:
            patched.setattr(LLM, "reset_prefix_cache", lambda self: None)
            warm_up(llm)
        found = llm.score(pairs)
    assert any((a.logprobs != b.logprobs).any() for a, b in zip(found, expected, strict=True))


def test_only_the_first_layer_is_computed_and_requests_fit_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (2, 3, 64, 4096):
        for request in made_up(300, length):
            assert isinstance(request, ScoreRequest)
            assert 2 <= len(request.context_ids) + len(request.continuation_ids) <= length
            assert max(*request.context_ids, *request.continuation_ids) < 300
    with LLM("asset:tinymath", **SETTINGS) as llm:
        assert llm.runner is not None
        computed: list[str] = []
        for name, module in llm.runner.model.named_modules():
            if name.endswith("self_attn"):
                module.register_forward_hook(lambda *_, name=name: computed.append(name))
        warm_up(llm)
    assert len(set(computed)) == 1


def test_a_model_of_unlike_layers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("asset:tinymath", **SETTINGS) as llm:
        assert llm.runner is not None
        monkeypatch.setattr(llm.runner.model, "layers_alike", False)
        monkeypatch.setattr(llm, "run", lambda *_: 1 / 0)
        warm_up(llm)


def test_a_run_warms_up_where_it_loads_beside_its_prompts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[LLM] = []
    monkeypatch.setattr("evalengine.engine.llm.warm_up", warmed.append)
    checkpoint = resolve_checkpoint(ModelConfig(name="tinymath", path="asset:tinymath"))
    engine = EngineConfig(device="cpu", max_model_len=64)
    with LLM(checkpoint, engine=engine, load=False) as llm:
        llm.load()
        assert not warmed  # a CPU has nothing to warm up
    load = LLM._load

    def onto_a_gpu(self: LLM) -> None:
        load(self)
        object.__setattr__(self.settings, "device", torch.device("cuda"))

    monkeypatch.setattr(LLM, "_load", onto_a_gpu)
    with LLM(checkpoint, engine=engine, load=False) as llm:
        llm.load()
        llm.load()
        assert len(warmed) == 1


def test_a_greedy_answer_is_what_it_was() -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM("asset:tinymath", **SETTINGS) as llm:
        (expected,) = llm.generate([[5, 8, 11]], params)
        warm_up(llm)
        (found,) = llm.generate([[5, 8, 11]], params)
    assert found.token_ids == expected.token_ids
    assert_bitwise_equal(found.logprobs, expected.logprobs)
