"""Decodes token ids to text as they come, and finds stop strings in the text.

Text grows by whole characters (a character cut between tokens waits for its rest). A stop string that is a special
token of the tokenizer stops by id, since special tokens never show in the text.

Where the end of a thinking is named, stop strings hold only behind that end: a thinking is full of "\\n\\n", which
would end an answer. In front of the end the tokenizer's EOS token alone ends a generation.
"""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

from evalengine.engine.request import SamplingParams
from evalengine.engine.text.thinking import end_of_thinking, part, special_ids


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
                self._stream = DecodeStream(skip_special_tokens=True)  # the answer is decoded by itself
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
