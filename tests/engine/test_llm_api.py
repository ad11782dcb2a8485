"""What users of other engines expect of `LLM`: samples, conversations, failures that stay alone, familiar settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import evalengine
from evalengine import LLM, GenerateRequest, RequestOutput, SamplingParams
from evalengine.config.schema import EngineConfig
from evalengine.engine.execute import memory
from evalengine.engine.settings import resolve_settings
from evalengine.errors import ConfigError
from tests.bitwise import assert_bitwise_equal

HOT = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=7)
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2 = <|endoftext|>"}]


def test_everything_that_a_caller_names_is_exported() -> None:
    assert {"LLM", "SamplingParams", "GenerateRequest", "ScoreRequest", "RequestOutput"} <= set(evalengine.__all__)
    assert all(getattr(evalengine, name) is not None for name in evalengine.__all__)


def test_equal_prompts_are_samples_of_their_own(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    outs = llm.generate([[5, 6, 7]] * 8, HOT)
    assert len({tuple(out.token_ids) for out in outs}) == 8
    (together,) = llm.generate([[5, 6, 7]], SamplingParams(**{**vars(HOT), "n": 8}))
    assert [out.token_ids for out in together.outputs] == [out.token_ids for out in outs]
    for sample, output in zip(together.outputs, outs, strict=True):
        assert_bitwise_equal(sample.logprobs, output.logprobs)
    mixed = llm.generate([[9], [5, 6, 7], [8], [5, 6, 7]], HOT)
    assert mixed[1].token_ids == outs[0].token_ids and mixed[3].token_ids == outs[1].token_ids, "others do not matter"
    (other_seed,) = llm.generate([[5, 6, 7]], SamplingParams(**{**vars(HOT), "seed": 8}))
    assert other_seed.token_ids != outs[0].token_ids


def test_a_request_is_one_sample_by_its_number(make_llm: Callable[..., LLM]) -> None:
    """A request with `sample=i` is the i-th of equal prompts' samples."""
    llm = make_llm()
    outs = llm.generate([[5, 6, 7]] * 3, HOT)
    outputs = llm.run([GenerateRequest(i, [5, 6, 7], HOT, sample=2 - i) for i in range(3)])
    assert {o.request_id: o.token_ids for o in outputs} == {2 - i: out.token_ids for i, out in enumerate(outs)}


def test_outputs_are_numbered_by_prompt(make_llm: Callable[..., LLM]) -> None:
    params = [SamplingParams(**{**vars(HOT), "n": n}) for n in (3, 1, 2)]
    outs = make_llm().generate([[5], [6], [5]], params)
    assert [out.request_id for out in outs] == [0, 1, 2] and [len(out.outputs) for out in outs] == [3, 1, 2]
    assert all(sample.request_id == out.request_id for out in outs for sample in out.outputs)
    assert len({tuple(s.token_ids) for out in (outs[0], outs[2]) for s in out.outputs}) == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda llm: SamplingParams(n=2), "n=2: at temperature=0 all samples are the same one"),
        (lambda llm: SamplingParams(n=0), "n=0: must be greater than or equal to 1"),
        (lambda llm: GenerateRequest(0, [1], SamplingParams(n=2, temperature=1)), "a request is one sample"),
        (lambda llm: GenerateRequest(0, [1], sample=-1), "sample=-1: must be greater than or equal to 0"),
        (lambda llm: llm.generate([[1]], ["x"]), "prompt 0: params=x: must be an instance of SamplingParams"),
        (lambda llm: llm.chat("hello"), "messages='hello': must be a list"),
        (lambda llm: llm.chat([[]]), "conversation 0: it has no messages"),
        (lambda llm: llm.chat([TALK, [{"role": "user"}]]), "conversation 1: {'role': 'user'}: must be"),
        (lambda llm: llm.chat([{"role": "user", "content": 1}]), "conversation 0: .*both texts"),
    ],
)
def test_what_is_refused(make_llm: Callable[..., LLM], make: Callable[[LLM], Any], message: str) -> None:
    """Parameters and messages that cannot be meant are refused with the place where they stand."""
    with pytest.raises(ConfigError, match=message):
        make(make_llm())


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_request_that_fails_leaves_the_others_their_outputs(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    good = llm.generate([[5, 6]], params)[0]
    with torch.no_grad():
        llm.runner.model.model.embed_tokens.weight[11] = float("nan")  # type: ignore[union-attr]
    failed, fine = llm.generate([[5, 11], [5, 6]], params)
    assert "embed_tokens" in (failed.error or "") and failed.token_ids == []
    assert fine.error is None and fine.token_ids == good.token_ids
    score, other = llm.score([([5, 11], [3]), ([5, 6], [3])])
    assert "embed_tokens" in (score.error or "") and math.isnan(score.sum_logprob) and other.error is None
    assert isinstance(other, RequestOutput)


# -- conversations ---------------------------------------------------------------------------------------------------


def test_chat_renders_the_models_own_template(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    template = "{{ strftime_now('%Y') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    params = SamplingParams(max_tokens=3)
    (out,) = llm.chat(TALK, params, date="2031-05-06")
    assert out.prompt_ids == llm.generate(["2031[system]Be brief.[user]2 + 2 = <|endoftext|>"], params)[0].prompt_ids
    first, _ = llm.chat([TALK, TALK[1:]], params, date="2031-05-06")
    assert first.token_ids == out.token_ids
    assert llm.chat(TALK, params)[0].prompt_ids != out.prompt_ids, "the default is a date of its own"


def test_a_template_that_refuses_says_what_to_do(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('no system') }}")
    with pytest.raises(ConfigError, match=r"conversation 0: .*no system; leave the system message out, LLM.generate"):
        llm.chat(TALK)
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match=r"LLM\.chat: the model's tokenizer has no chat template"):
        llm.chat(TALK)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_gpu_memory_utilization_is_of_the_whole_memory(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.875 of 80 GiB leaves 10 GiB, so that a pool takes 40 of the 50 free ones, less what a step takes."""
    llm, gib = make_llm(), 1 << 30
    settings = resolve_settings(EngineConfig(device="cpu"), True, "exact", llm.spec)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * gib, 80 * gib))

    def pool(**given: Any) -> int:
        return memory._pool_bytes(EngineConfig(**given), llm.spec, settings, 50 * gib)

    step = 4096 * 4 * 2 * (64 + 96) + 4096 * 1024 * (12 + 22)
    assert pool(gpu_memory_utilization=0.875) == 40 * gib - step
    assert pool(gpu_memory_utilization=0.125) == 0
    assert pool(kv_cache_memory_fraction=0.5) == 25 * gib


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory_utilization": 0.5}, "this run's device is the CPU"),
        ({"gpu_memory_utilization": 1.5}, r"must be in \(0, 1\]"),
        ({"gpu_memory_utilization": float("nan")}, r"must be in \(0, 1\]"),
        ({"gpu_memory_utilization": 0.5, "kv_cache_memory_fraction": 0.6}, "not both"),
    ],
)
def test_gpu_memory_utilization_that_cannot_be_honoured(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("asset:tinymath", device="cpu", **settings)
