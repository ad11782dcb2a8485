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
from evalengine.integrations.openai_server.token_texts import GrowingText, Offsets, TokenTexts, next_part

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


EURO, SMILE = "\u20ac".encode(), "\U0001f642".encode()


@pytest.mark.parametrize(
    ("pieces", "places"),
    [
        ([b"a", b" b", b"c"], [0, 1, 3]),
        ([b"a", EURO[:1], EURO[1:2], EURO[2:], b"b"], [0, 1, 1, 1, 2]),
        ([SMILE[:2], SMILE[2:] + b"x", b"y"], [0, 0, 2]),
        ([EURO[:2], b"a", b"b"], [0, 1, 2]),  # broken off: one U+FFFD
        ([EURO[:1], EURO[:1], b"a"], [0, 1, 2]),
        ([EURO[2:], b"a"], [0, 1]),  # begins within one
        ([b"\xff", b"\xff\xff", b"a"], [0, 1, 3]),
        ([b"a" + EURO[:1], EURO[1:] + SMILE[:3], SMILE[3:]], [0, 1, 2]),
    ],
)
def test_an_offset_is_the_place_of_the_character_that_has_the_first_byte(
    pieces: list[bytes], places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = TokenTexts(TOKENIZERS["tinymath"])
    monkeypatch.setattr(texts, "of", lambda ids: [pieces[token] for token in ids])
    monkeypatch.setattr(texts, "special", frozenset())
    assert Offsets(texts, True).more(range(len(pieces)), True) == places
    text = b"".join(pieces).decode("utf-8", "replace")
    for piece, place in zip(pieces, places, strict=True):
        if (shown := piece.decode("utf-8", "replace")).isascii():
            assert text.startswith(shown, place)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=12), random=st.randoms(use_true_random=False))
def test_offsets_index_into_the_decoded_text(text: str, random: Any) -> None:
    """Of tokens that the tokenizers make of a text, and of any ids: by the decoded text alone."""
    for name, tokenizer in TOKENIZERS.items():
        texts = TokenTexts(tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids and tokenizer.decode(ids, skip_special_tokens=False) == text:
            for places in (texts.offsets_in(text, ids), Offsets(texts, False).more(ids, True)):
                for place, shown, following in zip(places, texts.texts(ids), [*places[1:], len(text)], strict=True):
                    if not shown.startswith("bytes:"):
                        assert text[place:following] == shown
        ids = [random.randrange(len(tokenizer)) for _ in range(12)] + [random.choice(ODD[name] or [200]) for _ in "abc"]
        random.shuffle(ids)
        growing, whole = Offsets(texts, True), Offsets(texts, True).more(ids, True)
        for end in range(len(ids) + 1):
            assert growing.more(ids[:end], False) == whole[: len(growing.offsets)]
        assert growing.more(ids, True) == whole == sorted(whole)
        decoded = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
        for place, token in zip(whole, ids, strict=True):
            shown = texts.texts([token])[0]
            if not shown.startswith("bytes:") and token not in texts.special and not texts.is_byte(token):
                begins = decoded.startswith(shown, place) or (place == 0 and decoded.startswith(shown[1:]))
                assert begins, (name, ids, token)


def test_tokens_without_text_are_no_end_of_a_run_of_bytes() -> None:
    """Space, <unk> and 0x80 are two U+FFFD; of the three bytes of one U+FFFD, which is a character, there is one."""
    texts = TokenTexts(TOKENIZERS["pieces"])
    assert Offsets(texts, True).more([0x20 + 1, 0, 0x80 + 1, 257], True) == [0, 1, 1, 2]
    assert Offsets(texts, True).more([257, 0xEF + 1, 9999, 0xBF + 1, 0xBD + 1, 258], True) == [0, 1, 1, 1, 1, 2]


def test_a_prompt_that_the_tokenizer_changes_has_the_nearest_places() -> None:
    texts = TokenTexts(TOKENIZERS["tinymath"])
    ids = TOKENIZERS["tinymath"].encode("An \u00e9 and a bee")
    composed, decomposed = (texts.offsets_in(f"An {accent} and a bee", ids) for accent in ("\u00e9", "e\u0301"))
    assert [a - b for a, b in zip(decomposed, composed, strict=True)][-3:] == [1, 1, 1]
    assert texts.offsets_in("no such text", [0, *ids])[0] == 0


def test_bytes_that_are_no_character_hide_no_stop_string() -> None:
    """The decoder takes back the character of the first two bytes once the third is known to begin none."""
    detokenizer = Detokenizer(TOKENIZERS["pieces"], SamplingParams(stop=("b",)))
    ids = [0xC3 + 1, 0x80 + 1, 0xC3 + 1, 257, 258]
    assert [detokenizer.stops_at(token) for token in ids] == [False, False, False, False, True]
    assert detokenizer.text(ids).endswith(" a")
