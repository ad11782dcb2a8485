"""The one range and type check of a resolved spec: no checkpoint can mean such values, whatever its file format."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from evalengine.models.spec import ModelSpec, RopeSpec
from evalengine.models.spec_checks import spec_problems

SPEC = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, rope=RopeSpec(theta=10000.0), max_position_embeddings=512,
    tie_word_embeddings=False, attention_bias=False, attention_output_bias=False, qk_norm=False, dtype=torch.float32,
    bos_token_id=1, eos_token_ids=(2, 3),
)  # fmt: skip
LLAMA3 = RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
SIZES = [f.name for f in fields(ModelSpec) if f.type == "int"]


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, bos_token_id=None, eos_token_ids=()),
        replace(SPEC, rope=RopeSpec(1e6, "linear", 4.0), dtype=torch.bfloat16),
        replace(SPEC, rope=LLAMA3),
        replace(SPEC, rope=RopeSpec(5e5, "factors", freq_factors=(1.0,) * 7 + (32.0,))),
    ],
)
def test_what_models_have_is_accepted(spec: ModelSpec) -> None:
    assert spec_problems(spec) == []


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 10**9, 2.0, math.nan, True, None, "8", [8]])
def test_sizes_are_integers_that_can_be_meant(name: str, value: Any) -> None:
    problems = spec_problems(replace(SPEC, **{name: value}))
    assert any(p.startswith(f"{name}=") for p in problems)


def test_a_vocabulary_is_as_large_as_probabilities_add_up() -> None:
    assert spec_problems(replace(SPEC, vocab_size=2**19)) == []
    (problem,) = spec_problems(replace(SPEC, vocab_size=2**19 + 1))
    assert problem.startswith("vocab_size=524289: ") and "1 to 524288, the most probabilities that" in problem


@pytest.mark.parametrize("eps", [0.0, -1e-5, math.inf, math.nan, 2.0, 1e-40, None, "1e-5", True])
def test_an_eps_is_a_small_positive_number(eps: Any) -> None:
    (problem,) = spec_problems(replace(SPEC, rms_norm_eps=eps))
    assert problem.startswith("rms_norm_eps=")


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        (RopeSpec(math.inf), "rope.theta"),
        (RopeSpec(math.nan), "rope.theta"),
        (RopeSpec(0.0), "rope.theta"),
        (RopeSpec(-1e4), "rope.theta"),
        (RopeSpec("1e4"), "rope.theta"),  # type: ignore[arg-type]
        (RopeSpec(1e4, "linear", math.inf), "rope.factor"),
        (RopeSpec(1e4, "linear", -2.0), "rope.factor"),
        (replace(LLAMA3, factor=math.nan), "rope.factor"),
        (replace(LLAMA3, low_freq_factor=4.0), "rope.low_freq_factor"),
        (replace(LLAMA3, high_freq_factor=math.inf), "rope.high_freq_factor"),
        (replace(LLAMA3, original_max_position_embeddings=8192.5), "rope.original_max_position_embeddings"),  # type: ignore[arg-type]
        (RopeSpec(1e4, "longrope"), "rope.type"),  # type: ignore[arg-type]
        (RopeSpec(1e4, ["linear"]), "rope.type"),  # type: ignore[arg-type]
        (RopeSpec(1e4, "factors"), "rope.freq_factors"),
        (RopeSpec(1e4, "factors", freq_factors=(1.0,) * 7), "rope.freq_factors"),
        (RopeSpec(1e4, "factors", freq_factors=(1.0,) * 7 + (math.nan,)), "rope.freq_factors"),
        (RopeSpec(1e4, "factors", freq_factors=(1.0,) * 7 + (0.0,)), "rope.freq_factors"),
    ],
)
def test_rope_numbers_are_finite_and_stretch(rope: RopeSpec, field: str) -> None:
    (problem,) = spec_problems(replace(SPEC, rope=rope))
    assert problem.startswith(field)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3: num_heads=4"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"bos_token_id": 128}, "bos_token_id=128"),
        ({"bos_token_id": 1.0}, "bos_token_id=1.0"),
        ({"eos_token_ids": (2, 128)}, "eos_token_ids=128"),
        ({"eos_token_ids": (-1,)}, "eos_token_ids=-1"),
        ({"eos_token_ids": (2, True)}, "eos_token_ids=True"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
        ({"dtype": torch.float8_e4m3fn}, "dtype=float8_e4m3fn: not supported"),
        ({"dtype": torch.int8}, "dtype=int8: not supported"),
    ],
)
def test_fields_that_contradict_each_other_are_named(changes: dict[str, Any], field: str) -> None:
    (problem,) = spec_problems(replace(SPEC, **changes))
    assert problem.startswith(field)


def test_everything_is_listed_at_once_and_shortened() -> None:
    spec = replace(SPEC, hidden_size="x" * 10_000, rms_norm_eps=math.nan, rope=RopeSpec(math.nan), dtype=torch.int8)  # type: ignore[arg-type]
    problems = spec_problems(spec)
    assert len(problems) == 4 and all(len(p) < 150 for p in problems)
