"""Where a model's thinking ends, token by token, and which ends of thinking are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
from transformers import AutoTokenizer

from evalengine import LLM, SamplingParams
from evalengine.engine.text.detokenizer import Detokenizer, end_of_thinking, part
from evalengine.errors import ConfigError

TOKENIZER: Any = AutoTokenizer.from_pretrained(str(files("evalengine.assets") / "tinymath"))
THOUGHT = "Let me see.\n\n3 apples and 4 pears.\n\n</think>\n\nThey have 7 apples."


def num_taken(text: str, *stop: str, end: str | int | None) -> int | None:
    """How many of the text's tokens a generation takes until it stops; None if it does not stop."""
    detokenizer = Detokenizer(TOKENIZER, SamplingParams(stop=stop, think_end_token=end))
    return next((i + 1 for i, token in enumerate(TOKENIZER.encode(text)) if detokenizer.stops_at(token)), None)


def test_no_stop_string_holds_inside_a_thinking() -> None:
    assert num_taken(THOUGHT, "\n\n", end=None) is not None, "without its end named, the first empty line ends it"
    assert num_taken(THOUGHT, "\n\n", end="</think>") is None, "nor does the white space before the answer"
    ids = TOKENIZER.encode(THOUGHT)
    stopped = num_taken(THOUGHT + "\n\nQuestion:", "\n\n", end="</think>")
    assert stopped is not None and stopped > len(ids), "behind the answer it holds"
    by_id = TOKENIZER.encode(" and")[0]
    assert num_taken(THOUGHT, "apples", end=None) < num_taken(THOUGHT, "apples", end=by_id)  # type: ignore[operator]
    assert num_taken(THOUGHT, "apples", end=by_id) == len(ids) - 1, "its last tokens are ' apples' and '.'"


def test_a_thinking_that_is_all_ends_at_eos_alone() -> None:
    """A generation that never ends its thinking stops at the EOS token, and at no other stop string."""
    assert num_taken("still thinking<|im_end|> on<|endoftext|>", "<|im_end|>", "<|endoftext|>", end="</think>") == len(
        TOKENIZER.encode("still thinking<|im_end|> on<|endoftext|>")
    )
    assert num_taken("</think>answer<|im_end|>", "<|im_end|>", end="</think>") is not None


def test_the_parts_are_the_whole() -> None:
    """Thinking and answer make up the text, and the thinking has as few tokens as it takes."""
    ids = TOKENIZER.encode(THOUGHT)
    parts = part(TOKENIZER, ids, "</think>")
    assert parts.thinking + "\n\n" + parts.answer == THOUGHT and parts.thinking.endswith("</think>") and parts.ended
    thinking = TOKENIZER.decode(ids[: parts.num_tokens])
    assert thinking.startswith(parts.thinking) and "They" not in thinking
    assert "</think>" not in TOKENIZER.decode(ids[: parts.num_tokens - 1]), "as few tokens as it takes"
    assert part(TOKENIZER, ids, "</thought>").num_tokens == 0
    twice = part(TOKENIZER, TOKENIZER.encode("a</think>b</think> c"), "</think>")
    assert twice.answer == "c", "the last end counts"


def test_a_special_token_is_looked_for_by_its_id() -> None:
    assert end_of_thinking(TOKENIZER, "<|im_end|>") == TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    params = SamplingParams(think_end_token="<|im_end|>")
    assert Detokenizer(TOKENIZER, params).text(TOKENIZER.encode("one<|im_end|> two")) == "two"


@pytest.mark.parametrize("wrong", ["", -1, 2.5, True, ["x"]])
def test_what_is_no_token_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape("think_end_token=")):
        SamplingParams(think_end_token=wrong)


def test_an_id_beyond_the_vocabulary_is_refused(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match="think_end_token=4000000: token ids must be in"):
        make_llm().generate(["x"], SamplingParams(think_end_token=4_000_000))
