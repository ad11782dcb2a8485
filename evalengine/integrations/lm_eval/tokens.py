"""Turns text into token ids by the rules of lm-eval's hf model, `add_bos_token` among them."""

from __future__ import annotations

from typing import Any

from evalengine.engine.text.encode import encode_as, prefix_token_id
from evalengine.errors import ConfigError


def set_add_bos_token(tokenizer: Any, add_bos_token: bool | None) -> None:
    """Makes the tokenizer add BOS, or not, where it adds special tokens at all; None leaves it as it came.

    Raises: ConfigError for a tokenizer without a BOS token.
    """
    if add_bos_token is None:
        return
    if add_bos_token and tokenizer.bos_token is None:
        raise ConfigError("add_bos_token=True: the model's tokenizer has no BOS token; leave it out")
    tokenizer.add_bos_token = add_bos_token


def encode_scored(tokenizer: Any, text: str, add_special_tokens: bool | None, add_bos_token: bool | None) -> list[int]:
    """The token ids of a text to be scored. add_special_tokens None: as `add_bos_token` says, else as the tokenizer's
    default does; nothing is added to a text that begins with the prefix token itself."""
    if add_special_tokens is None:
        begun = text.startswith(tokenizer.decode([prefix_token_id(tokenizer)]))
        add_special_tokens = not begun and add_bos_token is not False
    return encode_as(tokenizer, text, add_special_tokens)


def encode_prompt(tokenizer: Any, text: str, add_bos_token: bool | None) -> list[int]:
    """The token ids of a text to be continued. Nothing is added to one that begins with BOS, as templates write it."""
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return encode_as(tokenizer, text, not begun and add_bos_token is not False)
