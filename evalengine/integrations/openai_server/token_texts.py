"""How tokens are written in an answer: each alone, as OpenAI writes them, their places in the text, and the text as it
grows."""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

from evalengine.engine.text.token_bytes import BYTE, token_bytes

CLEANED = 4  # characters at the end of a text that `clean_up_tokenization_spaces` may still change
NEAR = 32  # bytes within which a token is looked for in a text that the tokenizer reads otherwise than it is
UNFINISHED = "\ufffd"  # what stands for the bytes of a character whose rest is yet to come


class TokenTexts:
    """Token ids -> their bytes and texts. A token that is no whole character is written `bytes:\\xe2\\x82`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(token for token, item in tokenizer.added_tokens_decoder.items() if item.special)
        self._bytes: dict[int, bytes] = {}

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """The tokens' bytes; none for an id that only the model's matrix has."""
        if new := [token for token in dict.fromkeys(ids) if token not in self._bytes]:
            found = token_bytes(self.tokenizer, new)
            self._bytes.update((token, found.get(token, b"")) for token in new)
        return [self._bytes[token] for token in ids]

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The tokens' texts."""
        return [shown(raw) for raw in self.of(ids)]

    def is_byte(self, token: int) -> bool:
        """Whether the token is one byte of SentencePiece's fallback, whose runs are decoded together."""
        return BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token))) is not None

    def offsets_in(self, text: str, ids: Sequence[int]) -> list[int]:
        """The offset in a text of each token that it was encoded to, as `Offsets` has them. Special tokens that the
        tokenizer added have no text."""
        content, at, places = text.encode(), 0, []
        for token, raw in zip(ids, self.of(ids), strict=True):
            if not content.startswith(raw, at):
                if token in self.special:
                    raw = b""
                elif raw[:1] == b" " and content.startswith(raw[1:], at):  # SentencePiece's, before the first word
                    raw = raw[1:]
                elif (found := content.find(raw, at, at + len(raw) + NEAR)) > 0:
                    at = found
            places.append(at)
            at = min(at + len(raw), len(content))
        begins = [*accumulate((len(char.encode()) for char in text), initial=0)]
        return [bisect_right(begins, place) - 1 for place in places]


class Offsets:
    """Where each token of a sequence begins in its text: the place of the character that has the token's first byte.

    Tokens that share a character have one offset. A token without text is where the text goes on.
    """

    def __init__(self, texts: TokenTexts, skip_special: bool) -> None:
        """skip_special: whether the text is without special tokens."""
        self._texts, self._skipped = texts, texts.special if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_empty = True  # no token so far has a text
        self._length = 0  # characters, without the one whose bytes are not all there
        self.offsets: list[int] = []

    def more(self, ids: Sequence[int], ended: bool) -> list[int]:
        """The offsets of the tokens so far, without those of a run of byte tokens that may yet go on."""
        new = list(ids[len(self.offsets) :])
        raws = [b"" if token in self._skipped else raw for token, raw in zip(new, self._texts.of(new), strict=True)]
        # Tokens without text are no end of a run: they are left out before it is decoded.
        joins = [not raw or self._texts.is_byte(token) for token, raw in zip(new, raws, strict=True)]
        while joins and joins[-1] and not ended:
            joins.pop()
        for is_run, group in groupby(range(len(joins)), key=joins.__getitem__):
            places = [*group]
            if is_run and not _is_utf8(b"".join(raws[place] for place in places)):
                for place in places:  # each byte is written as U+FFFD
                    self.offsets.append(self._length)
                    self._length += len(raws[place])
                self._is_empty = False
                continue
            for place in places:
                self._add(self._without_first_space(new[place], raws[place]))
        return self.offsets

    def _add(self, raw: bytes) -> None:
        if not raw:
            self.offsets.append(self._length)
            return
        self._length += len(self._decoder.decode(raw[:1]))
        is_unfinished = bool(self._decoder.getstate()[0])
        self.offsets.append(self._length if is_unfinished else self._length - 1)
        self._length += len(self._decoder.decode(raw[1:]))

    def _without_first_space(self, token: int, raw: bytes) -> bytes:
        """The token's bytes as they are in the text: SentencePiece leaves out one space at its beginning."""
        is_first, self._is_empty = self._is_empty and raw != b"", self._is_empty and raw == b""
        if is_first and raw[:1] == b" " and not self._texts.tokenizer.decode([token]).startswith(" "):
            return raw[1:]
        return raw


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def shown(raw: bytes) -> str:
    """A token's text."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class GrowingText:
    """The part of a generation's text that no later token can change.

    What it gives in parts is, one after another, the text of the whole: the end of what is known is held back where it
    may be the beginning of a stop string or of a character, or where the tokenizer cleans spaces up.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._cleans = bool(tokenizer.clean_up_tokenization_spaces)
        self.given = ""

    def more(self, ids: Sequence[int]) -> str:
        """Return the new part of the text of all tokens so far, none of which ends the generation."""
        if BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(ids[-1]))):
            return ""  # the tokens of a run of bytes are decoded together
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True).rstrip(UNFINISHED)
        if self._cleans:
            text = text[:-CLEANED]
        for stop in self._stop:  # one that was missed, behind bytes that are no character: the whole is cut there
            text = text.split(stop)[0]
        text = text[: len(text) - _beginning(text, self._stop)]
        return self._take(text)

    def rest(self, text: str) -> str:
        """Return the part of the text that has not been returned yet."""
        assert text.startswith(self.given), "a stream has given what the whole answer does not hold"
        return self._take(text)

    def _take(self, text: str) -> str:
        if not text.startswith(self.given):  # it is shorter for now: what was given has become the start of a stop
            return ""
        new, self.given = text[len(self.given) :], text
        return new


def _beginning(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string."""
    longest = max((len(one) for one in stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(one.startswith(text[-size:]) for one in stop):
            return size
    return 0


def next_part(count: int) -> int:
    """The number of tokens at which a stream that has given `count` of them gives the next part: each token alone,
    and more at a time in a long answer, whose text is decoded anew for each part. It depends on nothing else, so that a
    stream's parts are the same at any load."""
    return count + max(1, count // 256)
