"""The bytes of a token, by each kind of vocabulary: joined, they are the tokenizer's own text."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evalengine.harness.pieces import token_bytes
from evalengine.records.tokens import token_texts

TEXTS = (" There are 9 * 20 = 180 seats.\n#### 117", "naïve 中文 👩‍👩‍👧 \t end", "")


def test_byte_level_pieces() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(str(files("evalengine.assets") / "tinymath"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(token_bytes(tokenizer, ids)[token] for token in ids).decode() == text
        assert "".join(token_texts(ids, token_bytes(tokenizer, ids))) == text
    special = tokenizer.eos_token_id
    assert token_bytes(tokenizer, [special]) == {special: tokenizer.eos_token.encode()}
    assert token_bytes(tokenizer, [10**6]) == {}, "a row of the embedding that no token has"


def test_sentencepiece_keeps_its_spaces_and_bytes() -> None:
    """The tokenizer's own decode of one token drops the space, and makes U+FFFD of a part of a character."""
    vocabulary = {"<unk>": 0, "\u2581the": 1, "cat": 2, "<0xC3>": 3, "<0xAF>": 4, "\u2581": 5}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [1, 5, 2, 3, 4]
    pieces = token_bytes(tokenizer, ids)
    assert [pieces[token] for token in ids] == [b" the", b" ", b"cat", b"\xc3", b"\xaf"]
    assert token_texts(ids, pieces) == [" the", " ", "cat", "", "ï"]
    assert tokenizer.decode(ids) == "".join(token_texts(ids, pieces))[1:]
    assert tokenizer.decode([1]) == "the" and tokenizer.decode([3]) == "\ufffd"
