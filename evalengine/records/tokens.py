"""`tokens.json`: the bytes behind each token id of a run's outputs, so that a report needs no tokenizer.

`{"12": " the", "345": {"hex": "e280"}}`: UTF-8 text, or hex where a token holds part of a character only. Special
tokens are there by their names.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError
from evalengine.util.plain_files import read_json


def tokens_json(pieces: Mapping[int, bytes]) -> dict[str, Any]:
    """The file's content for token id -> bytes."""
    return {str(token): _plain(piece) for token, piece in sorted(pieces.items())}


def read_tokens(path: Path) -> dict[int, bytes]:
    """token id -> bytes; empty if there is no such file. Raises `ConfigError` if it is damaged."""
    if not path.is_file():
        return {}
    try:
        content = read_json(path)
        texts = {int(token): piece for token, piece in content.items()}
        return {token: piece.encode() if isinstance(piece, str) else bytes.fromhex(piece["hex"])
                for token, piece in texts.items()}  # fmt: skip
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{path}: damaged ({error}); delete it: reports then show token ids") from error


def token_texts(ids: Sequence[int], pieces: Mapping[int, bytes]) -> list[str]:
    """The text that each token completes: [len(ids)]. Joined, it is the whole text.

    A character that is cut between tokens belongs to the one that ends it; bytes that are no UTF-8 become U+FFFD, and
    an unknown id its number in brackets.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(pieces.get(token, f"[{token}]".encode())) for token in ids]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def _plain(piece: bytes) -> str | dict[str, str]:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return {"hex": piece.hex()}
