"""Decodes token ids to text as they come, finds stop strings in it, and splits it into thinking and answer.

Text grows by whole characters (a character cut between tokens waits for its rest). A stop string that is a special
token of the tokenizer stops by id, since special tokens never show in the text.

Where the end of a thinking is named, stop strings hold only behind that end: a thinking is full of "\\n\\n", which
would end an answer. In front of the end the tokenizer's EOS token alone ends a generation.

The split into thinking and answer is that of lm-evaluation-harness's hf model (0.4.13). The last end token counts. If
the end is given as an id, the answer is the text of the tokens after it; if as a text, the answer is the part of the
whole text after it. White space before the answer is dropped either way, also where no end was found. A special token
never shows in a text, so a text that names one stands for its id (lm-eval would find it nowhere).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers.decoders import DecodeStream

from evalengine.engine.request import SamplingParams

_special: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()  # tokenizer -> `special_ids`


class Detokenizer:
    """One generating sequence's text."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stop = params.stop
        self._longest = max((len(s) for s in params.stop), default=0)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tail = ""
        special = special_ids(tokenizer) if params.stop else {}
        self._stop_ids = frozenset(special[s] for s in params.stop if s in special)
        self._end = end_of_thinking(tokenizer, params.think_end_token)
        self._thinks = self._end is not None
        self._at_start = False  # True between a thinking and its answer: white space there is not the answer's

    def stops_at(self, token_id: int) -> bool:
        """Takes the next token; True if it completes a stop string."""
        if self._thinks:
            return self._thought(token_id)
        if token_id in self._stop_ids:
            return True
        if not self._stop:
            return False
        new = self._step(token_id)
        return self._completes(new) if new else False

    def _thought(self, token_id: int) -> bool:
        """Takes the next token of a thinking, which may reach into the answer; True if it ends the generation."""
        if token_id in self._stop_ids and token_id == self._tokenizer.eos_token_id:
            return True
        if isinstance(self._end, int):
            if token_id == self._end:
                self._thinks, self._at_start = False, True
                self._stream = DecodeStream(skip_special_tokens=True)  # the answer is decoded separately
            return False
        assert self._end is not None
        self._tail += self._step(token_id)
        before, end, after = self._tail.partition(self._end)
        if not end:
            self._tail = before[max(0, len(before) - len(self._end) + 1) :]
            return False
        self._thinks, self._at_start, self._tail = False, True, ""
        return self._completes(after)

    def _step(self, token_id: int) -> str:
        """The text that the token adds. Where bytes that are no character follow on bytes that are one, a SentencePiece
        decoder takes back what it gave, and the stream refuses to go on: it begins anew with this token, since no stop
        string holds such bytes."""
        try:
            return self._stream.step(self._tokenizer.backend_tokenizer, token_id) or ""
        except Exception:  # tokenizers raises a plain one
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer.backend_tokenizer, token_id) or ""

    def _completes(self, new: str) -> bool:
        """Whether a stop string is complete with this text."""
        if self._at_start:
            new = new.lstrip()
            self._at_start = not new
        self._tail += new
        stopped = any(s in self._tail for s in self._stop)
        # A stop string that is not complete yet begins within the last characters.
        self._tail = self._tail[-(self._longest - 1) :] if self._longest > 1 else ""
        return stopped

    def text(self, output_ids: list[int]) -> str:
        """The whole text without its thinking, cut before the first occurrence of each stop string in turn (as lm-eval
        cuts it)."""
        if self._end is None:
            text = self._tokenizer.decode(output_ids, skip_special_tokens=True)
        else:
            text = part(self._tokenizer, output_ids, self._end).answer
        for stop in self._stop:
            text = text.split(stop)[0]
        return text


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Special tokens' ids by their strings. The added tokens' own flag tells which are special: all_special_ids holds
    only those with a role (bos, eos, ...). The table is cached per tokenizer, since transformers makes it anew at
    16 us a token (4 ms for Llama 3's 256)."""
    if tokenizer not in _special:
        _special[tokenizer] = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return _special[tokenizer]


@dataclass(frozen=True)
class Parts:
    """A generation's two parts. Without an end of thinking, all of it is the answer."""

    thinking: str  # the thinking, with the text of its end token
    answer: str  # the answer, not yet cut at stop strings
    num_tokens: int  # tokens of the thinking, its end token included
    ended: bool  # whether an end token was found


def end_of_thinking(tokenizer: Any, named: str | int | None) -> str | int | None:
    """The end to look for: an id among the tokens, or a text in the decoded text."""
    return special_ids(tokenizer).get(named, named) if isinstance(named, str) else named


def part(tokenizer: Any, output_ids: list[int], end: str | int) -> Parts:
    """The parts of generated tokens; end: what `end_of_thinking` gave."""
    if isinstance(end, str):
        return _by_text(tokenizer, output_ids, end)
    place = max((i for i, token in enumerate(output_ids) if token == end), default=-1) + 1
    thinking, answer = (tokenizer.decode(ids, skip_special_tokens=True) for ids in
                        (output_ids[:place], output_ids[place:]))  # fmt: skip
    return Parts(thinking, answer.lstrip(), place, place > 0)


def _by_text(tokenizer: Any, output_ids: list[int], end: str) -> Parts:
    text = tokenizer.decode(output_ids, skip_special_tokens=True)
    before, separator, answer = text.rpartition(end)
    thinking = before + separator
    return Parts(thinking, answer.lstrip(), _tokens_of(tokenizer, output_ids, len(thinking)), bool(separator))


def _tokens_of(tokenizer: Any, output_ids: list[int], characters: int) -> int:
    """How many of the tokens it takes to write so many characters."""
    stream, written = DecodeStream(skip_special_tokens=True), 0
    for number, token in enumerate(output_ids):
        if written >= characters:
            return number
        written += len(stream.step(tokenizer.backend_tokenizer, token) or "")
    return len(output_ids)
