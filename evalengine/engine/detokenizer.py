"""Token ids to text as they come, and stop strings found in it.

Text grows by whole characters (a character cut between tokens waits for its rest). A stop string that is a special
token of the tokenizer stops by id, since special tokens never show in the text.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from tokenizers.decoders import DecodeStream

from evalengine.engine.request import SamplingParams

_special: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()  # by tokenizer


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """Special tokens' ids by their strings, by the added tokens' own flag: all_special_ids holds only those with a role
    (bos, eos, ...). Asked once a tokenizer: transformers makes its table anew each time, at 16 us a token (4 ms for
    Llama 3's 256)."""
    if tokenizer not in _special:
        _special[tokenizer] = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return _special[tokenizer]


class Detokenizer:
    """One generating sequence's text."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stop = params.stop
        self._longest = max((len(s) for s in params.stop), default=0)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tail = ""
        special = _special_ids(tokenizer) if params.stop else {}
        self._stop_ids = frozenset(special[s] for s in params.stop if s in special)

    def stops_at(self, token_id: int) -> bool:
        """Takes the next token; True if it completes a stop string."""
        if token_id in self._stop_ids:
            return True
        if not self._stop:
            return False
        new = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        if not new:
            return False
        self._tail += new
        found = any(s in self._tail for s in self._stop)
        # a stop string that is not complete yet begins within the last characters
        self._tail = self._tail[-(self._longest - 1) :] if self._longest > 1 else ""
        return found

    def text(self, output_ids: list[int]) -> str:
        """The whole text, cut before the first occurrence of each stop string in turn (as lm-eval cuts it)."""
        text = self._tokenizer.decode(output_ids, skip_special_tokens=True)
        for stop in self._stop:
            text = text.split(stop)[0]
        return text
