"""Text to token ids, with lm-eval's rules for special tokens and for splitting a context from its continuation."""

from __future__ import annotations

from typing import Any


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids, with the special tokens that the tokenizer adds by default, unless the text begins with BOS itself (a
    chat template writes it). Of any length: `verbose=False` spares a warning about prompts that are cut afterwards."""
    bos = tokenizer.bos_token
    add_special_tokens = not (bos and text.startswith(bos))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
    return ids


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and its continuation (lm-eval's `_encode_pair` for causal models).

    Both are encoded together and split by the length of the context's own encoding; whitespace at the end of the
    context goes to the continuation. An empty context becomes the prefix token.
    """
    if not context:
        prefix = prefix_token_id(tokenizer)
        ids = tokenizer.encode(continuation, add_special_tokens=False, verbose=False)
        return ([prefix], ids[1:]) if ids[:1] == [prefix] else ([prefix], ids)
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    whole = encode(tokenizer, stripped + continuation)
    context_ids = encode(tokenizer, stripped)
    return context_ids, whole[len(context_ids) :]


def prefix_token_id(tokenizer: Any) -> int:
    """What stands before a text without context: BOS, else EOS."""
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    found = next((i for i in ids if i is not None), None)
    assert found is not None, "a tokenizer has a BOS or an EOS token (the loader refuses one without)"
    return found
