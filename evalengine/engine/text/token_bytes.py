"""The bytes that each token stands for, by the tokenizer's own vocabulary. Decoding token by token would lose the
spaces that SentencePiece strips and the characters that byte-level BPE cuts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte fallback


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> dict[int, bytes]:
    """token id -> bytes; ids outside the vocabulary (a model may have more rows than its tokenizer) are left out."""
    added = {token: item.content for token, item in tokenizer.added_tokens_decoder.items()}
    table = _byte_characters() if _byte_level(tokenizer) else None
    pieces = {}
    for token, name in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        if token in added:
            pieces[token] = added[token].encode("utf-8")
        elif name is not None:
            pieces[token] = _piece(name, table)
    return pieces


def _piece(name: str, table: dict[str, int] | None) -> bytes:
    """The bytes of one vocabulary entry. table: byte-level BPE's characters; None for SentencePiece's spelling."""
    if table is not None and all(char in table for char in name):
        return bytes(table[char] for char in name)
    if match := BYTE.fullmatch(name):
        return bytes.fromhex(match[1])
    return name.replace("\u2581", " ").encode("utf-8", "replace")


def _byte_characters() -> dict[str, int]:
    """Character -> the byte that byte-level BPE writes so: printable bytes as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level(tokenizer: Any) -> bool:
    # The decoder's own state is read, as the tokenizer's to_str() writes 150,000 tokens: 0.7 s.
    backend = tokenizer.backend_tokenizer.decoder
    decoder = {} if backend is None else json.loads(backend.__getstate__())
    return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))
