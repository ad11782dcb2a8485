"""Every field of transformers' GenerationConfig is applied, refused or known to change nothing; none is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from evalengine.engine.load.generation_config import APPLIED, NEUTRAL, REFUSED, from_fields, read_processors
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.models.processors import LogitsProcessors

VOCAB = 1000
QWEN25_CODER = {  # Qwen2.5-Coder-7B-Instruct's file
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.44.0",
}


def test_every_field_stands_in_one_group() -> None:
    fields = set(vars(GenerationConfig()))
    groups = (set(APPLIED), set(REFUSED), set(NEUTRAL))
    assert fields - set.union(*groups) == set(), "fields that would be ignored"
    assert sum(len(group) for group in groups) == len(set.union(*groups)), "a field is in two groups"


def test_transformers_own_defaults_ask_for_nothing() -> None:
    assert from_fields(GenerationConfig().to_dict(), VOCAB) == LogitsProcessors()
    assert from_fields(GenerationConfig._get_default_generation_params(), VOCAB) == LogitsProcessors()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("guidance_scale", 1.5),
        ("sequence_bias", [[[3], -1.0]]),
        ("encoder_repetition_penalty", 1.2),
        ("encoder_no_repeat_ngram_size", 3),
        ("forced_bos_token_id", 0),
        ("forced_eos_token_id", 2),
        ("exponential_decay_length_penalty", [5, 1.1]),
        ("watermarking_config", {"bias": 2.5}),
        ("constraints", ["x"]),
        ("force_words_ids", [[1]]),
        ("prompt_lookup_num_tokens", 3),
        ("assistant_early_exit", 2),
        ("token_healing", True),
        ("stop_strings", ["\n"]),
        ("max_time", 1.5),
        ("cache_implementation", "quantized"),
    ],
)
def test_what_is_not_built_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.*would change what is generated"):
        from_fields({name: value}, VOCAB)
    assert from_fields({name: None}, VOCAB) == LogitsProcessors()


def test_a_field_of_a_newer_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older = GenerationConfig.to_dict
    assert from_fields({"anti_repetition": 3}, VOCAB) == LogitsProcessors(), "a name that nobody reads"
    monkeypatch.setattr(GenerationConfig, "to_dict", lambda config: {**older(config), "anti_repetition": None})
    with pytest.raises(ConfigError, match="anti_repetition=3: a setting of a newer transformers"):
        from_fields({"anti_repetition": 3}, VOCAB)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be a positive number"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty='1.1'"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan"),
        ({"repetition_penalty": 10**400}, "repetition_penalty=1000"),
        ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size=2.5"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1"),
        ({"min_new_tokens": True}, "min_new_tokens=True"),
        ({"suppress_tokens": 5}, "suppress_tokens=5"),
        ({"suppress_tokens": [VOCAB]}, "outside the vocabulary, 0 ... 999"),
        ({"begin_suppress_tokens": [-1]}, "outside the vocabulary"),
        ({"bad_words_ids": [5]}, "bad_words_ids="),
        ({"bad_words_ids": [[]]}, "bad_words_ids="),
        ({"bad_words_ids": [[5, None]]}, "bad_words_ids="),
        ({"bad_words_ids": {"5": 6}}, "bad_words_ids="),
    ],
)
def test_values_that_cannot_be_meant_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_fields(fields, VOCAB)
    assert words in str(caught.value)


def test_a_folders_file_is_read_and_everything_wrong_with_it_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"

    def read(choice: str = "auto") -> LogitsProcessors:
        return read_processors(tmp_path, choice, VOCAB, "model.path=x")

    (tmp_path / "config.json").write_text("{}")
    assert read() == LogitsProcessors(), "no such file, and none of its fields in config.json"
    (tmp_path / "config.json").write_text('{"repetition_penalty": 1.2, "vocab_size": 1000}')
    assert read() == LogitsProcessors(repetition_penalty=1.2), "an old checkpoint's place for it"
    (tmp_path / "config.json").write_text('{"num_beams": 4, "vocab_size": 1000}')
    with pytest.raises(ConfigError, match=r"^model\.path=x: config\.json: num_beams=4"):
        read()
    file.write_text(json.dumps(QWEN25_CODER))
    assert read().in_force() == {"repetition_penalty": 1.1}
    assert read("none") == LogitsProcessors()
    file.write_text('{"num_beams": 4, "guidance_scale": 2, "min_length": "x"}')
    with pytest.raises(ConfigError) as caught:
        read()
    assert len(caught.value.problems) == 3
    for problem, name in zip(caught.value.problems, ("num_beams=4", "guidance_scale=2", "min_length=x"), strict=True):
        assert problem.startswith(f"model.path=x: generation_config.json: {name}")
        assert "model.generation_config=none" in problem
    assert read("none") == LogitsProcessors()
    for text in ("[]", "{", "[" * 100_000, '"\ud800"'):
        file.write_text(text, errors="surrogatepass")
        with pytest.raises(EvalEngineError, match=r"generation_config\.json"):
            read()
