"""A stream's parts give the whole text, whatever the tokens are; a part is never taken back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.engine.request import SamplingParams
from evalengine.engine.text.detokenizer import Detokenizer
from evalengine.serve.token_texts import GrowingText, TokenTexts, next_part

STOPS = st.lists(st.text("ab \n=4", min_size=1, max_size=4), max_size=3)


def byte_fallback() -> Any:
    """A tokenizer of SentencePiece's kind, whose runs of bytes are decoded together, and which cleans spaces up."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("\u2581a", "b", "\u2581", ".", "\u2581.", "\u2581'", "s", "\u2581n't", "é"):
        vocab[piece] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=True, unk_token="<unk>")


TOKENIZERS = {"tinymath": resolve_checkpoint(ModelConfig(path="asset:tinymath")).tokenizer, "pieces": byte_fallback()}
ODD = {"tinymath": [], "pieces": [0xC3 + 1, 0xA9 + 1, 0xE2 + 1, 0x82 + 1, 0xAC + 1, *range(257, 266)]}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), stop=STOPS)
def test_the_parts_are_the_whole(name: str, data: st.DataObject, stop: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    ids_of = st.integers(0, len(tokenizer) - 1)
    ids = data.draw(st.lists(st.sampled_from(ODD[name]) | ids_of if ODD[name] else ids_of, min_size=1, max_size=24))
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=tuple(stop)))
    ended = next((i + 1 for i, token in enumerate(ids) if detokenizer.stops_at(token)), len(ids))
    ids = ids[:ended]
    growing, parts = GrowingText(tokenizer, stop), []
    for end in range(1, len(ids)):
        parts.append(growing.more(ids[:end]))
    parts.append(growing.rest(detokenizer.text(ids)))
    assert "".join(parts) == detokenizer.text(ids)


def test_a_stop_string_behind_bytes_that_are_no_character_is_not_given() -> None:
    """The detokenizer begins anew behind such bytes and misses a space there; the whole is cut at it all the same."""
    tokenizer, ids = TOKENIZERS["pieces"], [1, 196, 261, 196, 196, 258, 196]
    growing = GrowingText(tokenizer, [" "])
    parts = [growing.more(ids[:end]) for end in range(1, len(ids))]
    whole = Detokenizer(tokenizer, SamplingParams(stop=(" ",))).text(ids)
    assert "".join([*parts, growing.rest(whole)]) == whole


def test_most_of_a_text_is_given_before_its_end() -> None:
    tokenizer = TOKENIZERS["tinymath"]
    ids = tokenizer.encode("Malik has 45 - 32 = 13 flowers.")
    growing = GrowingText(tokenizer, ["\n\n"])
    assert [growing.more(ids[: end + 1]) for end in range(len(ids))] == [tokenizer.decode([one]) for one in ids]


def test_the_parts_of_a_long_answer_are_longer() -> None:
    count, parts = 0, 0
    while count < 32_768:
        count, parts = next_part(count), parts + 1
    assert next_part(255) == 256 and next_part(512) == 514 and parts < 2000


def test_a_token_that_is_no_character_is_written_by_its_bytes() -> None:
    texts = TokenTexts(TOKENIZERS["pieces"])
    assert texts.texts([0xE2 + 1, 257, 5000]) == ["bytes:\\xe2", " a", ""]


def test_bytes_that_are_no_character_hide_no_stop_string() -> None:
    """The decoder takes back the character of the first two bytes once the third is known to begin none."""
    detokenizer = Detokenizer(TOKENIZERS["pieces"], SamplingParams(stop=("b",)))
    ids = [0xC3 + 1, 0x80 + 1, 0xC3 + 1, 257, 258]
    assert [detokenizer.stops_at(token) for token in ids] == [False, False, False, False, True]
    assert detokenizer.text(ids).endswith(" a")
