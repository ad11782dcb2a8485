"""Encodes texts that share most of their words, each word only once, and many words in one call.

A few-shot prompt of MMLU has 3,000 characters, of which 500 are its own, and is encoded eight times: with and without
each of four choices. 14,042 documents took 220 s of a core, and 15 s with the lines' ids cached. Without exemplars,
texts of some 500 characters, they took 8 s in calls of one text each, 2.5 s with each line encoded once, in calls of
thousands, and 1.4 s with each word: of 1.1 million words 90,000 differ.

Byte-level BPE first cuts a text into words and then works word by word. The known patterns for the words (`PATTERNS`)
all cut between an ASCII letter or digit and a line break, whatever is before and after: no alternative that matches
a letter or a digit goes on over a line break, and none looks back. They also cut before a single space that is followed
by an ASCII letter or digit and preceded by an ASCII character that is no space (`is_boundary`). So a text's ids are
those of its pieces between such places, one after another (and those of a context and of a continuation that begins
with a space and a letter), if

* no added token's string occurs in the text (those are found before, and some swallow the space around them),
* the normaliser leaves such places alone (none, or NFC: a line break and a space compose with nothing).

Any other tokenizer, and any text with an added token's string, is encoded whole.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from evalengine.engine.text.encode import any_of
from evalengine.engine.text.tokenizer import added_around

MOST_PIECES = 1 << 18  # cached pieces, some 60 MB of prose; all are dropped when there are more
MOST_BLOCKS = 1 << 12  # cached blocks, likewise; few-shot prompts of one task have a handful in common
BATCH = 1 << 13  # pieces encoded together
# The space between two words, as `is_boundary` has it. The pattern begins with the space, which Python finds quickest.
BETWEEN_WORDS = re.compile(r" (?=[0-9A-Za-z])(?<=[!-~] )")
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# The patterns of Llama 3 (numbers of up to three digits) and Qwen2 (single digits).
PATTERNS = frozenset(
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + number + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for number in (r"\p{N}{1,3}", r"\p{N}")
)


class PieceTokenizer:
    """The tokenizer, with an `encode` that encodes every piece of a text once. Everything else is the tokenizer's."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bos_token = tokenizer.bos_token  # used with every text, and transformers takes 2 us to find it
        self._pieces: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}
        self._last: tuple[str, list[int]] = "", []  # the last text that was cut, and its ids
        self._cuts = cuts_at_lines(tokenizer)
        if self._cuts:
            added = [token.content for token in tokenizer.added_tokens_decoder.values()]
            self._added, self._longest_added = any_of(added), max(map(len, added), default=1) or 1
            self._before, self._after = added_around(tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """The same token ids as the tokenizer's own `encode` gives."""
        if text != self._last[0] or not text:  # a context is encoded before each of its choices
            if (tail := self._tail(text)) is not None:
                whole = [*self._last[1], *self._of_pieces(tail)]
                return [*self._before, *whole, *self._after] if add_special_tokens else whole
            if not self._is_cut(text):
                ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=verbose)
                return ids
            self._last = text, self._joined(text)
        ids = self._last[1]
        return [*self._before, *ids, *self._after] if add_special_tokens else [*ids]

    def learn(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Encodes the pieces of contexts and their continuations that are to come, together: the tokenizer then uses
        every core. A document's choices share one context, and one task's prompts most of their blocks."""
        new: dict[str, None] = {}
        met: set[str] = set()  # blocks whose pieces are in `new` or encoded
        last, end, is_cut = None, "", False
        for context, continuation in pairs:
            if context != last:
                last, stripped = context, context.rstrip()
                is_cut = self._is_cut(stripped or continuation)
                context_blocks = [*blocks(stripped)] if is_cut else []
                end = context_blocks[-1] + context[len(stripped) :] if context_blocks else ""
                self._note(context_blocks, met, new)
            if is_cut:
                split = is_boundary(context[-1:], continuation)
                self._note([continuation] if split else blocks(end + continuation), met, new)
            if len(self._pieces) + len(new) > MOST_PIECES:
                break
            if len(new) >= BATCH:
                self._encode_all(new)
                new.clear()
        self._encode_all(new)

    def _note(self, some_blocks: Iterable[str], met: set[str], new: dict[str, None]) -> None:
        """Adds blocks to `met`, and to `new` the pieces of the blocks just added."""
        for block in some_blocks:
            if block not in met:
                met.add(block)
                new.update(dict.fromkeys(pieces(block)))

    def _encode_all(self, some_pieces: Iterable[str]) -> None:
        """Encodes the pieces that are not encoded yet, as the tokenizer's own call without special tokens does, but
        computes no offsets."""
        if new := [piece for piece in some_pieces if piece not in self._pieces]:
            encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(new, add_special_tokens=False)
            self._pieces.update((piece, encoding.ids) for piece, encoding in zip(new, encodings, strict=True))

    def _tail(self, text: str) -> str | None:
        """The rest of a text that begins with the last one, if the tokenizer always cuts in between; else None."""
        last = self._last[0]
        if not last or not text.startswith(last):
            return None
        tail = text[len(last) :]
        around = last[-self._longest_added :] + tail
        return tail if is_boundary(last[-1], tail) and not self._has_added(around) else None

    def _joined(self, text: str) -> list[int]:
        ids: list[int] = []
        for block in blocks(text):
            if block not in self._blocks:
                if len(self._blocks) >= MOST_BLOCKS:
                    self._blocks.clear()
                self._blocks[block] = self._of_pieces(block)
            ids += self._blocks[block]
        return ids

    def _of_pieces(self, text: str) -> list[int]:
        if "\n" not in text and text in self._pieces:  # a choice, such as " A"
            return self._pieces[text]
        own = pieces(text)
        try:
            return self._known(own)
        except KeyError:
            if len(self._pieces) + len(own) > MOST_PIECES:
                self._pieces.clear()
            self._encode_all(dict.fromkeys(own))
        return self._known(own)

    def _known(self, own: list[str]) -> list[int]:
        """The ids of pieces one after another. Raises KeyError for one that is not encoded yet."""
        return [*chain.from_iterable(map(self._pieces.__getitem__, own))]

    def _is_cut(self, text: str) -> bool:
        return self._cuts and not self._has_added(text)

    def _has_added(self, text: str) -> bool:
        """Whether an added token's string occurs in the text as it is or as normalised."""
        if self._added is None:
            return False
        normal = text if text.isascii() else unicodedata.normalize("NFC", text)
        return self._added.search(text) is not None or self._added.search(normal) is not None


def pieces(text: str) -> list[str]:
    """The text, cut before each line break that follows an ASCII letter or digit, and between words."""
    cut: list[str] = []
    for line in _cut(text, "\n"):
        first, *words = BETWEEN_WORDS.split(line)
        cut.append(first)
        cut.extend(map(" ".__add__, words))
    return cut


def blocks(text: str) -> Iterator[str]:
    """The text, cut before each blank line that follows an ASCII letter or digit: whole pieces, several in one."""
    return _cut(text, "\n\n")


def _cut(text: str, between: str) -> Iterator[str]:
    first, *parts = text.split(between)
    current = first
    for part in parts:
        if current and current[-1].isascii() and current[-1].isalnum():
            yield current
            current = between + part
        else:
            current += between + part
    if current:
        yield current


def is_boundary(end: str, continuation: str) -> bool:
    """Whether the known patterns cut between a text with this end and its continuation: before a single space between
    an ASCII character that is no space and an ASCII letter or digit. All patterns let a space begin a word, and none
    matches across a space from anything else."""
    if not "!" <= end <= "~" or continuation[:1] != " ":
        return False
    after = continuation[1:2]
    return after.isascii() and after.isalnum()


def cuts_at_lines(tokenizer: Any) -> bool:
    """Whether the tokenizer's ids of a text are those of its `pieces`; true for the byte-level BPEs known here."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE" or backend.model.dropout:
        return False
    normalizer, pre_tokenizer = (_state(part) for part in (backend.normalizer, backend.pre_tokenizer))
    if normalizer is not None and normalizer != {"type": "NFC"}:
        return False
    if pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    return all(_is_known(step) for step in steps) and any(_cuts(step) for step in steps)


def _is_known(step: dict[str, Any]) -> bool:
    """Whether a step of pre-tokenization treats each side of such a place as if the other were not there."""
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    return step["type"] == "Digits" or _cuts(step)


def _cuts(step: dict[str, Any]) -> bool:
    """Whether a step of pre-tokenization cuts at each such place. ByteLevel's own pattern is GPT-2's."""
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"])
    return (
        step["type"] == "Split"
        and step["pattern"].get("Regex") in PATTERNS
        and step["behavior"] == "Isolated"
        and not step["invert"]
    )


def _state(part: Any) -> dict[str, Any] | None:
    """A normaliser or pre-tokenizer as tokenizer.json has it."""
    return None if part is None else dict(json.loads(part.__getstate__()))
