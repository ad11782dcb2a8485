"""Encodes text with lm-eval's rules for special tokens and for splitting a context from its continuation.

One rule: a special token's string inside a text, as "<|endoftext|>" in a dataset's row, becomes the token itself, as
it does for lm-eval's hf backend. `special_tokens` finds such texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from evalengine.errors import ConfigError


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids, with the special tokens that the tokenizer adds by default, unless the text begins with BOS itself (a
    chat template writes it)."""
    bos = tokenizer.bos_token
    add_special_tokens = not (bos and text.startswith(bos))
    return encode_as(tokenizer, text, add_special_tokens)


def encode_as(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids with or without the special tokens that the tokenizer adds. A text may have any length: `verbose=False`
    spares the tokenizer's warning about it.

    Raises: ConfigError for a text that the tokenizer cannot encode (one that knows words only, and has no token for
    other words).
    """
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"the tokenizer cannot encode {text[:40]!r} ({error}); set model.tokenizer") from error
    return ids


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and its continuation (lm-eval's `_encode_pair` for causal models).

    Both are encoded together and split by the length of the context's own encoding; whitespace at the end of the
    context goes to the continuation. An empty context becomes the prefix token.
    """
    if not context:
        prefix = prefix_token_id(tokenizer)
        ids = encode_as(tokenizer, continuation, add_special_tokens=False)
        return ([prefix], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    context_ids = encode(tokenizer, stripped)  # encoded first, so that a `PieceTokenizer` knows how the whole begins
    whole = encode(tokenizer, stripped + continuation)
    return context_ids, whole[len(context_ids) :]


def special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """A pattern that finds the string of any special token; None for a tokenizer without special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return any_of(token.content for token in added if token.special)


def any_of(strings: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of the strings, the longest first; None if all are empty."""
    longest_first = sorted({string for string in strings if string}, key=lambda string: (-len(string), string))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def prefix_token_id(tokenizer: Any) -> int:
    """The token before a text without context: BOS, else EOS (lm-eval's `prefix_token_id`).

    Raises ConfigError for a tokenizer with neither, which can only score what follows a context.
    """
    token_id = find_prefix_token_id(tokenizer)
    if token_id is None:
        raise ConfigError(
            "the model's tokenizer has neither a BOS nor an EOS token, and a text without context needs one before it; "
            "name one of them in its tokenizer_config.json, or set model.tokenizer to another"
        )
    return token_id


def find_prefix_token_id(tokenizer: Any) -> int | None:
    """`prefix_token_id`; None for a tokenizer with neither BOS nor EOS."""
    return next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), None)


def stop_strings(tokenizer: Any, until: tuple[str, ...]) -> tuple[str, ...]:
    """A task's stop strings and, last, the text of the tokenizer's EOS token: lm-eval's hf backend ends every
    generation there (its `handle_stop_sequences`), whichever ids the model's own configuration ends at."""
    if tokenizer.eos_token_id is None:
        return until
    end: str = tokenizer.decode(tokenizer.eos_token_id, skip_special_tokens=False)
    return until if not end or end in until else (*until, end)
