"""Greedy generation with every logits processor: the same tokens as transformers' own `generate(do_sample=False)`.

Every processor has a case, and random combinations are tested, too. The models are random; a processor that changed
nothing would prove nothing, so most cases must also differ from plain greedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel, Qwen2Config

from evalengine import LLM, SamplingParams
from evalengine.engine.load.generation_config import from_fields
from evalengine.models.processors import LogitsProcessors
from tests.fuzz.cases import cases
from tests.parity.random_models import without_tokenizer

VOCAB, EOS, NEW = 61, 3, 24
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": EOS,
    "bos_token_id": 1,
}
PROMPTS = [[5, 6, 7, 5, 6], [8], [9, 9, 9, 9, 2, 9, 9], list(range(10, 40))]
CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "repetition_reward": {"repetition_penalty": 0.8},
    "no_repeat_ngram_size=1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size=2": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size=5": {"no_repeat_ngram_size": 5},
    "min_new_tokens": {"min_new_tokens": 20},
    "min_length": {"min_length": 25},
    "min_new_tokens before min_length": {"min_new_tokens": 0, "min_length": 40},
    "all at once": {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 7,
        "suppress_tokens": [11, 12, 13],
        "begin_suppress_tokens": [14, 15],
        "bad_words_ids": [[16], [5, 6], [EOS], [20, 21, 22]],
    },
}


@pytest.fixture(scope="module", params=[LlamaConfig, Qwen2Config])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    """transformers' model and ours with the same random float32 weights; ours runs `fast`, whose scores are nearest."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(request.param(**SHAPE), attn_implementation="eager").eval()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    with LLM(
        without_tokenizer(folder), batch_invariant=False, dtype="float32", num_kv_blocks=256, block_size=16
    ) as llm:
        yield model, llm


def hf_tokens(model: PreTrainedModel, prompt: list[int], fields: dict[str, Any]) -> list[int]:
    """Returns the new tokens of transformers' greedy `generate` with these generation settings."""
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=EOS, pad_token_id=0, **fields)
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()


def our_tokens(llm: LLM, fields: dict[str, Any]) -> list[list[int]]:
    """Returns our greedy new tokens for every prompt, with the processors that these settings name."""
    params = SamplingParams(max_tokens=NEW, stop_token_ids=(EOS,), processors=from_fields(fields, VOCAB))
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", CASES)
def test_each_gives_the_tokens_of_transformers(pair: tuple[Any, LLM], name: str) -> None:
    model, llm = pair
    assert our_tokens(llm, CASES[name]) == [hf_tokens(model, prompt, CASES[name]) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "bad_words_ids of two"])
def test_what_greedy_would_take_is_forbidden(pair: tuple[Any, LLM], name: str) -> None:
    """Forbidding the tokens that plain greedy takes gives transformers' tokens, which are others."""
    model, llm = pair
    plain = our_tokens(llm, {})
    assert plain == [hf_tokens(model, prompt, {}) for prompt in PROMPTS]
    fields: dict[str, Any] = {
        "suppress_tokens": {"suppress_tokens": sorted({tokens[1] for tokens in plain})},
        "begin_suppress_tokens": {"begin_suppress_tokens": sorted({tokens[0] for tokens in plain})},
        "bad_words_ids": {"bad_words_ids": [[tokens[0]] for tokens in plain] + [[EOS]]},
        "bad_words_ids of two": {
            "bad_words_ids": [[*prompt[-2:], tokens[0]] for prompt, tokens in zip(PROMPTS, plain, strict=True)]
        },
    }[name]
    outputs = our_tokens(llm, fields)
    assert outputs == [hf_tokens(model, prompt, fields) for prompt in PROMPTS]
    assert outputs != plain


def test_random_combinations(pair: tuple[Any, LLM]) -> None:
    """Random combinations of processors give transformers' tokens, and at least half of them change the output."""
    model, llm = pair
    plain, changed, tried = our_tokens(llm, {}), 0, 0
    for case in cases("processors", 6):
        tokens = [case.randrange(VOCAB) for _ in range(30)]
        all_fields = {
            "repetition_penalty": case.choice([0.7, 1.05, 1.1, 1.5]),
            "no_repeat_ngram_size": case.randint(1, 4),
            "min_length": case.randint(1, 40),
            "min_new_tokens": case.randint(0, 30),
            "suppress_tokens": tokens[:5],
            "begin_suppress_tokens": tokens[5:20],
            "bad_words_ids": [tokens[20:22], tokens[22:23], [*PROMPTS[0][-1:], tokens[24]], [EOS]],
        }
        fields = {name: value for name, value in all_fields.items() if case.random() < 0.5}
        with case.named(fields):
            outputs = our_tokens(llm, fields)
            assert outputs == [hf_tokens(model, prompt, fields) for prompt in PROMPTS]
            changed, tried = changed + (outputs != plain), tried + 1
    assert tried and 2 * changed >= tried


def test_what_is_read_from_a_folder_is_what_transformers_applies(pair: tuple[Any, LLM], tmp_path: Path) -> None:
    """Processors are read from generation_config.json, and without it from config.json, as in old checkpoints."""
    model, _ = pair
    wanted = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    for place in ("generation_config.json", "config.json"):
        folder = tmp_path / place
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        file = folder / place
        file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **wanted}))
        hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        checkpoint = without_tokenizer(folder)
        assert checkpoint.spec.processors == LogitsProcessors(**wanted)
        with LLM(checkpoint, batch_invariant=False, dtype="float32") as llm:
            tokens = [o.token_ids for o in llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, stop_token_ids=(EOS,)))]
        expected = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])  # lm-eval passes only lengths and do_sample=False
            output = hf.generate(ids, attention_mask=torch.ones_like(ids), max_length=len(prompt) + NEW,
                                    do_sample=False, eos_token_id=EOS, pad_token_id=0)  # fmt: skip
            expected.append(output[0, len(prompt) :].tolist())
        assert tokens == expected
