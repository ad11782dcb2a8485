"""Texts encoded piece by piece get the ids of the whole text; a tokenizer of which that is not known is never cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from evalengine.engine.text import pieces as module
from evalengine.engine.text.encode import encode, encode_pair
from evalengine.engine.text.pieces import PATTERNS, PieceTokenizer, cuts_at_lines, pieces

LINES = [
    *("Question: what's 12345 + 6?\n", "A. it's 7\r\n\n", "B. nothing.\n"),
    *(" C.\t x\n\n\n", "D) café naïve\n", "\n \nAnswer:"),
]
CHARACTERS = "aB9 .,:'s\n\r\t(é\u0301\u212b中🙂\u2028\u00a0"
TEXTS = st.lists(st.one_of(st.sampled_from(LINES), st.text(CHARACTERS, max_size=30)), max_size=30).map("".join)


def byte_level(add_prefix_space: bool = False, use_regex: bool = True) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


LLAMA3, QWEN2 = sorted(PATTERNS, key=lambda pattern: "{1,3}" not in pattern)
# Normaliser and pre-tokenizer of tokenizers whose texts are cut into pieces.
CUT = {
    "gpt2": (None, byte_level()),
    "smollm2": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])),
    "llama3": (None, pre_tokenizers.Sequence([split(LLAMA3), byte_level(use_regex=False)])),
    "qwen2": (normalizers.NFC(), pre_tokenizers.Sequence([split(QWEN2), byte_level(use_regex=False)])),
}
# Normaliser and pre-tokenizer of tokenizers whose texts must stay whole.
WHOLE = {
    "a space before the text": (None, byte_level(add_prefix_space=True)),
    "no pattern": (None, byte_level(use_regex=False)),
    "a pattern nobody looked at": (None, pre_tokenizers.Sequence([split(r"\S+\s*"), byte_level(use_regex=False)])),
    "another normaliser": (normalizers.Lowercase(), byte_level()),
    "metaspace": (None, pre_tokenizers.Metaspace()),
    "nothing": (None, None),
}


def trained(normalizer: Any, pre_tokenizer: Any, **special: str) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of 600 tokens, trained on LINES."""
    backend = Tokenizer(models.BPE())
    backend.normalizer, backend.decoder = normalizer, decoders.ByteLevel()
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(LINES * 20, trainer)
    backend.add_special_tokens(["<s>", "</s>", "é\n"])
    if special:
        pair = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
        backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=pair)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


TOKENIZERS = {name: trained(*parts, bos_token="<s>", eos_token="</s>") for name, parts in CUT.items()}


@pytest.mark.parametrize("name", CUT)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_the_ids_of_the_whole_text(name: str, text: str) -> None:
    """A text that is cut gets the ids of the whole text, twice, with and without special tokens, and as a pair."""
    tokenizer = TOKENIZERS[name]
    cutter = PieceTokenizer(tokenizer)
    for _ in range(2):
        for special in (True, False):
            assert cutter.encode(text, add_special_tokens=special) == tokenizer.encode(text, add_special_tokens=special)
    assert encode(cutter, text) == encode(tokenizer, text)
    for place in {0, len(text) // 3, len(text) - 1, len(text)} - {-1}:
        pair = text[:place], text[place:]
        assert encode_pair(cutter, *pair) == encode_pair(tokenizer, *pair)


@given(text=TEXTS)
def test_pieces_make_the_text(text: str) -> None:
    parts = [*pieces(text)]
    assert "".join(parts) == text and all(parts)
    for before, after in pairwise(parts):
        ends_line = before[-1].isalnum() and before[-1].isascii() and after.startswith("\n")
        assert ends_line or module.is_boundary(before[-1], after)


@pytest.mark.parametrize("name", CUT)
def test_every_piece_is_encoded_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that were learnt are not encoded again."""
    cutter = PieceTokenizer(TOKENIZERS[name])
    text = "".join(LINES[i % 2] + f"row {i}\n" for i in range(40))
    cutter.learn([(text, "")])
    monkeypatch.setattr(cutter, "_encode_all", lambda new: pytest.fail(f"again: {new}") if new else None)
    assert cutter.encode(text, add_special_tokens=False) == TOKENIZERS[name].encode(text, add_special_tokens=False)


ENDS = st.text(alphabet="ab9A'.:!?)~_ \n\té\u0301日", max_size=12)


@pytest.mark.parametrize("name", CUT)
@given(before=ENDS, after=ENDS)
@settings(max_examples=150, deadline=None)
def test_a_continuation_is_cut_from_its_context(name: str, before: str, after: str) -> None:
    """The ids part where `is_boundary` says so, and a text that was encoded up to here before keeps its ids."""
    tokenizer, after = TOKENIZERS[name], f" {after}"
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in (before, after)]
    if module.is_boundary(before[-1:], after):
        assert tokenizer.encode(before + after, add_special_tokens=False) == parts[0] + parts[1]
    cutter, context = PieceTokenizer(tokenizer), "some row 7\n" * 40 + before
    assert cutter.encode(context) == tokenizer.encode(context)
    assert cutter.encode(context + after) == tokenizer.encode(context + after)


def test_cut_anywhere_a_continuation_would_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: where continuations are cut anywhere, ids differ."""
    tokenizer, context = TOKENIZERS["gpt2"], "some row 7\n" * 40 + "Quest"
    differing = []
    for boundary in (module.is_boundary, lambda end, continuation: True):
        monkeypatch.setattr(module, "is_boundary", boundary)
        cutter = PieceTokenizer(tokenizer)
        cutter.encode(context)
        differing.append(cutter.encode(context + "ion") != tokenizer.encode(context + "ion"))
    assert differing == [False, True]


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("end", ["row 7", "row 7.", "row 7 \n ", "row 7\n\n"])
def test_contexts_and_continuations_are_learnt_together(name: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`learn` covers what `encode_pair` encodes: the context without its last space, and the context with its
    continuation."""
    cutter = PieceTokenizer(TOKENIZERS[name])
    contexts = ["".join(LINES[i % 2] + f"row {i * k}\n\n" for i in range(40)) + end for k in (1, 2)]
    pairs = [(context, after) for context in contexts for after in (" A", "\nB 1\nC", "\n\nD")]
    cutter.learn(pairs)
    monkeypatch.setattr(cutter, "_encode_all", lambda new: pytest.fail(f"again: {new}") if new else None)
    for context, after in pairs:
        for text in (context.rstrip(), context + after):
            assert cutter.encode(text, add_special_tokens=False) == TOKENIZERS[name].encode(
                text, add_special_tokens=False
            )


def test_a_full_memory_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond MOST_PIECES the remembered pieces are forgotten, and the ids stay right."""
    monkeypatch.setattr(module, "MOST_PIECES", 8)
    monkeypatch.setattr(module, "BATCH", 3)
    tokenizer = TOKENIZERS["gpt2"]
    cutter = PieceTokenizer(tokenizer)
    texts = ["".join(f"line {i * j} of {j}\n" for i in range(1, 20)) for j in range(1, 12)]
    cutter.learn((text, "") for text in texts)
    for text in texts:
        assert cutter.encode(text) == tokenizer.encode(text)
        assert len(cutter._pieces) <= 8 + len({*pieces(text)})


@pytest.mark.parametrize("name", WHOLE)
def test_other_tokenizers_encode_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained(*WHOLE[name])
    assert not cuts_at_lines(tokenizer)
    cutter = PieceTokenizer(tokenizer)
    monkeypatch.setattr(cutter, "_encode_all", lambda new: pytest.fail("cut") if new else None)
    cutter.learn([("a\nb\nc", " d")])
    assert cutter.encode("a\nb\nc 9\n") == tokenizer.encode("a\nb\nc 9\n")


def test_cut_anyway_some_of_them_would_differ() -> None:
    """The check of tokenizers is needed: cut without it, some of them give other ids."""
    differing = 0
    for normalizer, pre_tokenizer in WHOLE.values():
        tokenizer = trained(normalizer, pre_tokenizer)
        text = "what is 7\nwhat is 8\nwhat is 9\n" * 3
        joined = [i for piece in pieces(text) for i in tokenizer.encode(piece, add_special_tokens=False)]
        differing += joined != tokenizer.encode(text, add_special_tokens=False)
    assert differing >= 2


def test_an_added_tokens_string_keeps_the_text_whole() -> None:
    tokenizer = TOKENIZERS["qwen2"]
    cutter = PieceTokenizer(tokenizer)
    for text in ("a\n<s>b\nc", "caf\u0065\u0301\nb\nc"):  # The second one holds é once it is normalised.
        assert not cutter._is_cut(text)
        assert cutter.encode(text) == tokenizer.encode(text)
    assert cutter._is_cut("cafe\nb\nc") and cutter.bos_token == "<s>" and cutter.decode([0]) == tokenizer.decode([0])
