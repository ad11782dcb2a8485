"""The answer is parted from the thinking as lm-eval's hf model parts them."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from evalengine import LLM, SamplingParams
from evalengine.engine.text.detokenizer import Detokenizer
from tests.parity.lm_eval_runs import TINYMATH, hf_model

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")

TOKENIZER: Any = AutoTokenizer.from_pretrained(str(files("evalengine.assets") / "tinymath"))
END = "<|endoftext|>"
PIECES = ("</think>", " and", "\n\n", "Question:", " 12", "th", "ink>", "</", " apples", ".", " ", END)


def hf_answer(ids: list[int], end: str | int, stop: list[str]) -> str:
    """Returns lm-eval's hf model's response to generated tokens (`HFLM.generate_until`, after the generation)."""
    from lm_eval.models.utils import postprocess_generated_text

    if isinstance(end, int):
        places = [i for i, token in enumerate(ids) if token == end]
        ids = ids[places[-1] + 1 :] if places else ids
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    if isinstance(end, int):
        text = text.lstrip()
    return postprocess_generated_text(text, stop, end if isinstance(end, str) else None)


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.sampled_from(PIECES), max_size=24), by_id=st.booleans(), word=st.sampled_from(PIECES[:2]))
def test_any_tokens_are_parted_as_by_hf(texts: list[str], by_id: bool, word: str) -> None:
    ids = [token for text in texts for token in TOKENIZER.encode(text)]
    end = TOKENIZER.encode(" and")[0] if by_id else word
    params = SamplingParams(stop=("\n\n", "Question:", END), think_end_token=end)
    assert Detokenizer(TOKENIZER, params).text(ids) == hf_answer(ids, end, ["\n\n", "Question:", END])


# A token's id, which ends the thinking as its text does, is quick in test_lm_eval_model.py.
@pytest.mark.parametrize("end", [" and", pytest.param(TOKENIZER.encode(" and")[0], marks=pytest.mark.slow)])
def test_generations_are_those_of_lm_evals_hf_model(end: str | int) -> None:
    from lm_eval.api.instance import Instance

    prompts = [
        f"Question: Arlo collects {n} flowers. Diego has {n} fewer. How many do they have together?\nAnswer:"
        for n in (13, 45, 60)
    ]
    generation = {"until": [], "max_gen_toks": 30, "temperature": 0.0, "do_sample": False}
    instances = [Instance("generate_until", {}, (prompt, generation), 0) for prompt in prompts]
    expected = hf_model(TINYMATH, batch_size=1, think_end_token=end).generate_until(instances)
    params = SamplingParams(max_tokens=30, stop=(END,), think_end_token=end)
    with LLM("asset:tinymath", num_kv_blocks=64, block_size=16, dtype="float32") as llm:
        outputs = llm.generate(prompts, params)
        whole = llm.generate(prompts, SamplingParams(max_tokens=30, stop=(END,)))
    assert [output.text for output in outputs] == expected
    assert any(a.text != b.text for a, b in zip(outputs, whole, strict=True)), "some of them think"
