"""Loads the tokenizer of a checkpoint's folder."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

from evalengine.engine.load.hf_folder import refuse_pipes
from evalengine.engine.text.fast_tokenizer import FastTokenizer, read_tokenizer
from evalengine.errors import ConfigError
from evalengine.models.file_values import is_integer, is_number, one_line, shown
from evalengine.util.plain_files import read_json

FIX = "set model.tokenizer to a folder or Hub id with the model's tokenizer.json"


def load_tokenizer(folder: Path, setting: str) -> Any:
    """Return the fast tokenizer in a folder: a `FastTokenizer`, or transformers' where only it reads the files.

    setting: names the folder's origin in errors (e.g. "model.path=...").

    Raises `ConfigError` if there is none, if it cannot be read or cannot be meant, `EvalEngineError` for a file that is
    not a regular one.
    """
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        raise ConfigError(f"{setting}: no tokenizer.json in {folder}; {FIX}")
    refuse_pipes(folder)
    try:
        _refuse_endless(folder / "config.json")
        tokenizer = _read(folder)
        if tokenizer.is_fast:
            _check_special_tokens(tokenizer)
            tokenizer.chat_template = _one_template(tokenizer.chat_template)
    except BaseException as error:  # tokenizers raises Exception for a malformed file, and BaseException in a panic
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ConfigError(f"{setting}: the tokenizer in {folder} cannot be read ({one_line(error)}); {FIX}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{setting}: the tokenizer in {folder} has no tokenizer.json; {FIX}")
    if appended := _appended(tokenizer):
        raise ConfigError(
            f"{setting}: the tokenizer in {folder} ends every text with {shown(tokenizer.decode(appended))} "
            "(add_eos_token, or the post-processor of tokenizer.json), so that a prompt could not go on: set "
            f"add_eos_token=false, or {FIX}"
        )
    return tokenizer


def _read(folder: Path) -> Any:
    try:
        tokenizer = read_tokenizer(folder)
    except Exception:  # transformers may read it, or says what is wrong
        tokenizer = None
    if tokenizer is not None:
        return tokenizer
    from transformers import AutoTokenizer  # its import takes seconds

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def plain_tokenizer(tokenizer: Any) -> dict[str, Any] | None:
    """Everything by which a fast tokenizer encodes and decodes. `sha256` is over the vocabulary with all its stages
    (normaliser, pre-tokeniser, post-processor, decoder, added tokens); transformers adds the other fields."""
    if tokenizer is None:
        return None
    return {
        "sha256": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "class": class_name(tokenizer),
        "special_tokens": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        "clean_up_tokenization_spaces": bool(tokenizer.clean_up_tokenization_spaces),
        "split_special_tokens": bool(tokenizer.split_special_tokens),
    }


def class_name(tokenizer: Any) -> str:
    """The name of the tokenizer's class in transformers."""
    return tokenizer.class_name if isinstance(tokenizer, FastTokenizer) else type(tokenizer).__name__


def added_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after every text."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    begins = range(len(whole) - len(bare) + 1)
    place = next((i for i in begins if whole[i : i + len(bare)] == bare), len(whole) - len(bare))
    return whole[:place], whole[place + len(bare) :]


def _appended(tokenizer: Any) -> list[int]:
    try:
        return added_around(tokenizer)[1]
    except Exception:  # a tokenizer of words that knows no other words cannot encode the probe
        return []


def _refuse_endless(config: Path) -> None:
    """Raises ValueError for numbers of layers or labels in config.json that cannot be meant. transformers reads the
    file for the model type, and on the way makes a list of the layers and a dictionary of the labels, of any length."""
    content = read_json(config) if config.exists() else {}
    for name, value in content.items() if isinstance(content, dict) else ():
        if re.fullmatch(r"num_labels|n_layers?|num_(\w+_)?layers", name) and is_number(value, 1e6, math.inf):
            raise ValueError(f"config.json: {name}={shown(value)} cannot be meant")


def _check_special_tokens(tokenizer: Any) -> None:
    """Raises ValueError for a role that is given to something else than a token, which would fail in mid-run."""
    for role in ("bos_token", "eos_token", "pad_token"):
        token, token_id = getattr(tokenizer, role), getattr(tokenizer, f"{role}_id")
        if token is None and token_id is None:
            continue
        if not isinstance(token, str) or not is_integer(token_id, 0, len(tokenizer) + (1 << 22)):
            raise ValueError(f"its {role} is {shown(token)}, token id {shown(token_id)}: it must be one of its tokens")


def _one_template(template: Any) -> str | None:
    """The chat template; of several named ones, the one that transformers takes for a conversation without tools."""
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"its chat_template is {shown(template)}: it must be a text")
    return template
