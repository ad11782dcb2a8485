"""The key of a cached answer: everything that the answer depends on, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evalengine.cache.engine import Keys
from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.models.processors import LogitsProcessors
from evalengine.models.spec import ModelSpec

NATIVE = {"numerics": "native", "gpu_architecture": "sm_90"}
IDENTITY: dict[str, Any] = {
    "contract_version": 2,
    "weights": "ab" * 32,
    "model_spec": {"rope": 1},
    "numerics": "exact",
    "dtype": "bfloat16",
    "tokenizer": {"sha256": "cd"},
    "seed": 0,
    "prompts": "x",
    "chat_template": None,
}
VERSIONS = {"torch": "2", "cuda": "12", "triton": "3", "tokenizers": "1", "transformers": "5"}
SCORE = ScoreRequest(0, [1, 2, 3], [4, 5])
GREEDY = GenerateRequest(0, [1, 2, 3], SamplingParams(max_tokens=8))
DRAWN = GenerateRequest(0, [1, 2, 3], SamplingParams(max_tokens=8, temperature=0.5, noise_key="t/0"))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return resolve_checkpoint(ModelConfig(path="asset:tinymath")).spec


def key(spec: ModelSpec, request: Request, identity: dict[str, Any] = IDENTITY, versions: Any = VERSIONS,
        max_model_len: int = 100, name: str = "m") -> bytes:  # fmt: skip
    return Keys(name, identity, versions, spec, max_model_len).of(request)


@pytest.mark.parametrize("request_", [SCORE, GREEDY], ids=["score", "generate"])
@pytest.mark.parametrize(
    "other",
    [{"contract_version": 3}, {"weights": "00" * 32}, {"model_spec": {"rope": 2}}, {"dtype": "float32"}, NATIVE],
)
def test_who_computes_is_in_the_key(spec: ModelSpec, request_: Request, other: dict[str, Any]) -> None:
    assert key(spec, request_) != key(spec, request_, {**IDENTITY, **other})


@pytest.mark.parametrize("other", [{"seed": 1}, {"prompts": "y"}, {"chat_template": "z"}, {"limit": 4}])
def test_settings_that_no_answer_depends_on_are_not_in_the_key(spec: ModelSpec, other: dict[str, Any]) -> None:
    for request in (SCORE, GREEDY, DRAWN):
        assert key(spec, request) == key(spec, request, {**IDENTITY, **other}, name="other")


def test_the_tokenizer_matters_to_text_alone(spec: ModelSpec) -> None:
    other = {**IDENTITY, "tokenizer": {"sha256": "ef"}}
    assert key(spec, SCORE) == key(spec, SCORE, other) and key(spec, GREEDY) != key(spec, GREEDY, other)
    versions = {**VERSIONS, "tokenizers": "2"}
    assert key(spec, SCORE) == key(spec, SCORE, versions=versions)
    assert key(spec, GREEDY) != key(spec, GREEDY, versions=versions)


@pytest.mark.parametrize("library", ["torch", "cuda", "triton"])
def test_compilers_matter_to_native_alone(spec: ModelSpec, library: str) -> None:
    versions, native = {**VERSIONS, library: "9"}, {**IDENTITY, **NATIVE}
    assert key(spec, SCORE) == key(spec, SCORE, versions=versions)
    assert key(spec, SCORE, native) != key(spec, SCORE, native, versions)
    assert key(spec, SCORE, native) != key(spec, SCORE, {**native, "gpu_architecture": "sm_100"})


def test_fast_has_no_key(spec: ModelSpec) -> None:
    with pytest.raises(AssertionError, match="depend on the batch"):
        key(spec, SCORE, {**IDENTITY, "numerics": "fast"})


def test_what_is_scored_is_in_the_key(spec: ModelSpec) -> None:
    others = [
        ScoreRequest(0, [1, 2], [3, 4, 5]),
        ScoreRequest(0, [1, 2, 3, 4], [5]),
        ScoreRequest(0, [1, 2, 3], [4, 6]),
        ScoreRequest(0, [1, 2, 4], [4, 5]),
        replace(SCORE, logprobs=2),
    ]
    assert len({key(spec, request) for request in [SCORE, *others]}) == 6
    assert key(spec, SCORE) == key(spec, replace(SCORE, request_id=9), max_model_len=50)


def drawn(**changes: Any) -> GenerateRequest:
    """DRAWN with other parameters."""
    return replace(DRAWN, params=replace(DRAWN.params, **changes))


def greedy(**changes: Any) -> GenerateRequest:
    """GREEDY with other parameters."""
    return replace(GREEDY, params=replace(GREEDY.params, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        *({"max_tokens": 9}, {"stop": ("x",)}, {"stop_token_ids": (7,)}, {"ignore_eos": True}, {"logprobs": 1}),
        *({"think_end_token": 5}, {"processors": LogitsProcessors(repetition_penalty=1.5)}, {"temperature": 0.7}),
    ],
)
def test_what_is_generated_is_in_the_key(spec: ModelSpec, changes: dict[str, Any]) -> None:
    assert key(spec, GREEDY) != key(spec, greedy(**changes))
    assert key(spec, DRAWN) != key(spec, drawn(**changes))


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.5}, {"seed": 1}, {"noise_key": "t/1"}])
def test_how_tokens_are_drawn_matters_where_they_are_drawn(spec: ModelSpec, changes: dict[str, Any]) -> None:
    assert key(spec, GREEDY) == key(spec, greedy(**changes))
    assert key(spec, DRAWN) != key(spec, drawn(**changes))
    assert key(spec, DRAWN) != key(spec, replace(DRAWN, sample=1))


def test_settings_are_those_in_force(spec: ModelSpec) -> None:
    """A default that is written out is the same request as null; so is a length that `max_model_len` cuts."""
    written_out = greedy(stop_token_ids=spec.eos_token_ids, processors=spec.processors)
    assert key(spec, GREEDY) == key(spec, written_out)
    assert key(spec, GREEDY, max_model_len=11) == key(spec, GREEDY, max_model_len=100)
    assert key(spec, GREEDY, max_model_len=10) == key(spec, greedy(max_tokens=7)) != key(spec, GREEDY)
    assert key(spec, GREEDY) != key(replace(spec, eos_token_ids=(9,)), GREEDY)
    assert key(spec, GREEDY) != key(replace(spec, processors=LogitsProcessors(min_new_tokens=2)), GREEDY)
