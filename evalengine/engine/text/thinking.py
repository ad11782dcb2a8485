"""Splits a generation into thinking and answer, as lm-evaluation-harness's hf model does (0.4.13).

The last end token counts. If the end is given as an id, the answer is the text of the tokens after it; if as a text,
the answer is the part of the whole text after it. White space before the answer is dropped either way, also where no
end was found. A special token never shows in a text, so a text that names one stands for its id (lm-eval would find it
nowhere).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers.decoders import DecodeStream

_special: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()  # tokenizer -> `special_ids`


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Special tokens' ids by their strings. The added tokens' own flag tells which are special: all_special_ids holds
    only those with a role (bos, eos, ...). The table is kept for each tokenizer, since transformers makes it anew at
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
