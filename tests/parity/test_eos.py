"""A generation ends where transformers' greedy `generate` and lm-eval's hf backend end it.

The model's config, its generation config and its tokenizer each name another end-of-sequence token.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from evalengine import LLM, SamplingParams
from evalengine.engine.text.encode import find_prefix_token_id
from evalengine.harness.requests import RequestBuilder
from evalengine.tasks.instance import Generation, Instance
from tests.engine.tied_folder import sizes

VOCAB, LENGTH = 19, 24
OF_CONFIG, OF_GENERATION, OF_TOKENIZER = 5, 7, 2
WORDS = [f"w{chr(ord('a') + i)}" for i in range(VOCAB)]  # no word begins another: special ones are cut out of text
RNG = random.Random(0)
SAME_PATH = pytest.mark.slow  # a quick case beside it reads the same file, or the same kind of value
PROMPTS = [[RNG.randrange(3, VOCAB) for _ in range(2 + i % 7)] for i in range(25)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a random Llama whose weights are large enough that its greedy choices vary."""
    torch.manual_seed(5)
    config = LlamaConfig(
        **sizes(VOCAB, 32, 48, 2, 4, 2),
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=OF_CONFIG,
        initializer_range=0.4,
    )
    path = tmp_path_factory.mktemp("eos") / "tiny"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token=WORDS[1], eos_token=WORDS[OF_TOKENIZER]).save_pretrained(
        path
    )
    return path


def write_settings(path: Path, generation: dict[str, Any] | None, **config: Any) -> None:
    """Writes generation_config.json (None: no such file), and changes config.json (None: without the key)."""
    file = path / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    content = {**json.loads((path / "config.json").read_text()), "eos_token_id": OF_CONFIG, **config}
    kept = {key: value for key, value in content.items() if value is not None or key not in config}
    (path / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        pytest.param({"eos_token_id": OF_GENERATION}, {}, {OF_GENERATION}, marks=SAME_PATH),
        ({"eos_token_id": [OF_GENERATION, 9]}, {}, {OF_GENERATION, 9}),
        pytest.param({"eos_token_id": None}, {}, set(), marks=SAME_PATH),
        pytest.param({}, {}, set(), marks=SAME_PATH),
        (None, {}, {OF_CONFIG}),
        pytest.param(None, {"eos_token_id": [OF_CONFIG, 11]}, {OF_CONFIG, 11}, marks=SAME_PATH),
        (None, {"eos_token_id": None}, set()),  # LlamaConfig's default, 2, must not be taken
    ],
)
def test_greedy_outputs_end_where_those_of_transformers_do(
    model: Path, generation: dict[str, Any] | None, config: dict[str, Any], ends: set[int]
) -> None:
    write_settings(model, generation, **config)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    expected = [
        hf.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=LENGTH, pad_token_id=0)[0, len(ids) :]
        for ids in PROMPTS
    ]
    with LLM(str(model), numerics="exact", dtype="float32", device="cpu") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))
        assert set(llm.spec.eos_token_ids) == ends
    assert [o.token_ids for o in outputs] == [ids.tolist() for ids in expected]
    stopped = {o.token_ids[-1] for o in outputs if o.finish_reason == "stop"}
    assert stopped == ends, "each end is met, or the test shows nothing"


def test_the_harness_ends_where_lm_eval_does(model: Path) -> None:
    """Generations end at the generation config's id, at the tokenizer's EOS text and at the task's stop strings.

    lm-eval's hf backend needs accelerate, so its `generate_until` is put together here from its parts.
    """
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
    from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
    from lm_eval.models.utils_hf import stop_sequences_criteria

    write_settings(model, {"eos_token_id": OF_GENERATION})
    contexts = [" ".join(WORDS[i] for i in ids) for ids in PROMPTS]
    until = (f"{WORDS[12]} w", WORDS[17])
    tokenizer = AutoTokenizer.from_pretrained(model)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    stop = handle_stop_sequences(list(until), eos=tokenizer.decode(tokenizer.eos_token_id, skip_special_tokens=False))
    expected = []
    for context in contexts:
        inputs = tokenizer([context], return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        generated = hf.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_length=length + LENGTH,
            stopping_criteria=stop_sequences_criteria(tokenizer, stop, length, 1),
            pad_token_id=0,
            use_cache=True,
            do_sample=False,
        )
        text = tokenizer.decode(generated[0, length:].tolist(), skip_special_tokens=True)
        expected.append((generated[0, length:].tolist(), postprocess_generated_text(text, stop, None)))
    with LLM(str(model), numerics="exact", dtype="float32", device="cpu") as llm:
        generation = Generation(until=until, max_gen_toks=LENGTH)
        instances = [
            Instance("t", i, 0, "generate_until", context, "", generation) for i, context in enumerate(contexts)
        ]
        built = RequestBuilder(llm.tokenizer, 64).build(instances)
        outputs = sorted(llm.run([item.request for item in built]), key=lambda o: o.request_id)
        assert llm.spec.eos_token_ids == (OF_GENERATION,) and find_prefix_token_id(llm.tokenizer) == 1
    assert [(o.token_ids, o.text) for o in outputs] == expected
    last = {o.token_ids[-1] for o in outputs if o.finish_reason == "stop"}
    assert last >= {OF_GENERATION, OF_TOKENIZER, 17}, "each end is met, or the test shows nothing"
