"""Tokenisation rules, windows and stop strings, on the bundled tokenizer."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evalengine.engine.request import SamplingParams
from evalengine.engine.text.detokenizer import Detokenizer
from evalengine.engine.text.encode import encode, encode_pair, prefix_token_id, special_tokens
from evalengine.engine.text.rolling import rolling_windows
from evalengine.engine.text.tokenizer import load_tokenizer
from evalengine.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The bundled model's tokenizer."""
    return AutoTokenizer.from_pretrained(str(files("evalengine.assets") / "tinymath"))


def test_whitespace_at_the_end_of_a_context_goes_to_the_continuation(tokenizer: Any) -> None:
    assert encode_pair(tokenizer, "Answer: ", "7 apples") == encode_pair(tokenizer, "Answer:", " 7 apples")


def test_an_empty_context_is_the_prefix_token(tokenizer: Any) -> None:
    context, continuation = encode_pair(tokenizer, "", "7 apples")
    assert context == [prefix_token_id(tokenizer)] and continuation == encode(tokenizer, "7 apples")
    with_prefix_token = encode_pair(tokenizer, "", tokenizer.eos_token + "7 apples")
    assert with_prefix_token == (context, continuation)  # The text's own prefix token is the context.


def test_special_tokens_are_found_where_the_tokenizer_reads_them_as_tokens(tokenizer: Any) -> None:
    pattern = special_tokens(tokenizer)
    assert pattern is not None
    for text in ("a<|endoftext|>", "<|im_start|>user", "x<|im_end|> y", "<|endoftext>", "im_start", "<|IM_END|>", ""):
        ids = set(encode(tokenizer, text)) & set(tokenizer.all_special_ids)
        assert bool(pattern.search(text)) == bool(ids), text


def test_a_text_that_begins_with_bos_gets_no_second_one(tokenizer: Any) -> None:
    class WithBos:
        bos_token, bos_token_id = "<|im_start|>", 1

        def encode(self, text: str, add_special_tokens: bool, verbose: bool) -> list[int]:
            return [1] * add_special_tokens + tokenizer.encode(text, add_special_tokens=False)

    assert encode(WithBos(), "hello")[0] == 1
    assert encode(WithBos(), "<|im_start|>hello") == [1, *tokenizer.encode("hello")]


@given(length=st.integers(0, 90), window=st.integers(2, 20))
def test_windows_score_every_token_once_with_as_much_context_as_fits(length: int, window: int) -> None:
    text = list(range(1000, 1000 + length))
    windows = rolling_windows(text, 0, window)
    assert [t for _, continuation in windows for t in continuation] == text
    tokens_before: list[int] = [0]
    for number, (context, continuation) in enumerate(windows):
        assert context == tokens_before[-len(context) :]  # The context stands right before.
        num_fed = len(context) + len(continuation) - 1
        assert num_fed <= window
        assert number == 0 or num_fed == window  # The last window, too, keeps a full-size context.
        tokens_before += continuation


def stopped_at(tokenizer: Any, ids: list[int], *stop: str) -> int | None:
    """How many tokens a generation has taken when a stop string is complete; None if none is."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop))
    return next((i + 1 for i, token in enumerate(ids) if detokenizer.stops_at(token)), None)


def test_a_stop_string_over_several_tokens_is_found_when_it_is_complete(tokenizer: Any) -> None:
    ids = tokenizer.encode("3 apples and 17 pears\n\nQuestion: next")
    for stop in ("apples and 17", "\n\n", "Question:", "s\n\nQ", "7"):
        num_taken = stopped_at(tokenizer, ids, stop)
        assert num_taken is not None
        assert stop in tokenizer.decode(ids[:num_taken]) and stop not in tokenizer.decode(ids[: num_taken - 1])
        text = Detokenizer(tokenizer, SamplingParams(stop=(stop,))).text(ids[:num_taken])
        assert text == tokenizer.decode(ids).split(stop)[0]
    assert stopped_at(tokenizer, ids, "oranges") is None


def test_a_character_cut_between_tokens_is_matched_whole(tokenizer: Any) -> None:
    ids = tokenizer.encode("a 苹果 b")
    assert len(ids) > 6  # Its tokens are single bytes.
    num_taken = stopped_at(tokenizer, ids, "果")
    assert num_taken is not None and tokenizer.decode(ids[:num_taken]).endswith("果")


def test_an_added_special_token_without_a_role_stops_too() -> None:
    """Llama 3's <|eot_id|> is such a token; an unknown word, which the tokenizer maps to its unk id, must not stop."""
    backend = Tokenizer.from_file(str(files("evalengine.assets") / "tinymath" / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<|eot|>", special=True)])
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, unk_token=end)
    ids = tokenizer.encode("58 flowers<|eot|> and")
    assert stopped_at(tokenizer, ids, "<|eot|>") == ids.index(backend.token_to_id("<|eot|>")) + 1
    assert stopped_at(tokenizer, [tokenizer.eos_token_id], "Question:") is None


def test_a_special_token_stops_by_id_and_does_not_show(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("58 flowers"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert stopped_at(tokenizer, ids, "<|im_end|>") == len(ids)
    assert Detokenizer(tokenizer, SamplingParams(stop=("<|im_end|>",))).text(ids) == "58 flowers"


@pytest.mark.parametrize(("template", "refused"), [("$A <|endoftext|>", True), ("<|endoftext|> $A", False)])
def test_a_tokenizer_that_ends_every_text_is_refused(tmp_path: Path, template: str, refused: bool) -> None:
    """`add_eos_token=true` would end every prompt, and shift every choice's first token into its context."""
    own = AutoTokenizer.from_pretrained(str(files("evalengine.assets") / "tinymath"))
    end = own.eos_token
    own.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[(end, own.eos_token_id)])
    own.save_pretrained(tmp_path)
    if refused:
        with pytest.raises(ConfigError, match=r"ends every text with .*endoftext.*add_eos_token=false"):
            load_tokenizer(tmp_path, "model.path=x")
    else:
        assert load_tokenizer(tmp_path, "model.path=x").encode("a")[0] == own.eos_token_id
