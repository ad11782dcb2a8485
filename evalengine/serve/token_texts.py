"""How tokens are written in an answer: each alone, as OpenAI writes them, and their text as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evalengine.harness.pieces import BYTE, token_bytes

CLEANED = 4  # characters at the end of a text that `clean_up_tokenization_spaces` may still change
UNFINISHED = "\ufffd"  # what stands for the bytes of a character whose rest is yet to come


class TokenTexts:
    """Token ids -> their bytes and texts. A token that is no whole character is written `bytes:\\xe2\\x82`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """The tokens' bytes; none for an id that only the model's matrix has."""
        if new := [token for token in dict.fromkeys(ids) if token not in self._bytes]:
            found = token_bytes(self._tokenizer, new)
            self._bytes.update((token, found.get(token, b"")) for token in new)
        return [self._bytes[token] for token in ids]

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The tokens' texts."""
        return [shown(raw) for raw in self.of(ids)]


def shown(raw: bytes) -> str:
    """A token's text."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class GrowingText:
    """The text of a generation as far as no later token can change it.

    What it gives in parts is, one after another, the text of the whole: the end of what is known is held back where it
    may be the beginning of a stop string or of a character, or where the tokenizer cleans spaces up.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._cleans = bool(tokenizer.clean_up_tokenization_spaces)
        self.given = ""

    def more(self, ids: Sequence[int]) -> str:
        """What is new in the text of all tokens so far, none of which ends the generation."""
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
        """What the parts so far lack of the whole text."""
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
    """The number of tokens at which a stream that has given `count` of them gives the next part: each token by itself,
    and more at a time in a long answer, whose text is decoded anew for each part. It depends on nothing else, so that a
    stream's parts are the same at any load."""
    return count + max(1, count // 256)
