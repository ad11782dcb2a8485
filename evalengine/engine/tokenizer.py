"""Tokenizers: from a checkpoint's folder, or built from the metadata inside a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from evalengine.errors import ConfigError

CONTROL, USER_DEFINED = 3, 4  # GGUF's token types: special, and added but not special
CURE = "set model.tokenizer to a folder or Hub id with the model's tokenizer.json"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-level BPE, named by GGUF's `tokenizer.ggml.pre`."""

    pattern: str | None = None  # None: GPT-2's own, which the library's ByteLevel has built in
    digits_apart: bool = False
    nfc: bool = False  # Unicode normalisation form C comes first
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # when the file does not say


_LLAMA3 = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignore_merges=True,
    add_bos=True,
)
_QWEN2 = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    nfc=True,
)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits_apart=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def load_tokenizer(folder: Path, setting: str) -> PreTrainedTokenizerBase:
    """The fast tokenizer in a folder. `setting` names the folder's origin in errors (e.g. "model.path=...").

    Raises `ConfigError` if there is none or it cannot be read.
    """
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        raise ConfigError(f"{setting}: no tokenizer.json in {folder}; {CURE}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a malformed file
        raise ConfigError(f"{setting}: the tokenizer in {folder} cannot be read ({error}); {CURE}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{setting}: the tokenizer in {folder} has no tokenizer.json; {CURE}")
    return tokenizer


def gguf_tokenizer(field: Callable[[str], Any], setting: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE from GGUF metadata; `field(key)` is the value of `tokenizer.<key>`, or None.

    Raises `ConfigError` for another tokenizer model or an unknown pre-tokenizer: a guess would silently change prompts.
    """
    if field("ggml.model") != "gpt2":
        raise ConfigError(
            f"{setting}: its tokenizer model is {field('ggml.model')}, only byte-level BPE (gpt2) is supported; {CURE}"
        )
    kind = PRE_TOKENIZERS.get(field("ggml.pre"))
    if kind is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ConfigError(f"{setting}: its pre-tokenizer {field('ggml.pre')} is not one of {known}; {CURE}")
    tokens: list[str] = field("ggml.tokens")
    tokenizer = _byte_level_bpe(tokens, field("ggml.merges"), kind)
    types = field("ggml.token_type") or []
    tokenizer.add_special_tokens([_added(tokens[i], True) for i, kind_ in enumerate(types) if kind_ == CONTROL])
    tokenizer.add_tokens([_added(tokens[i], False) for i, kind_ in enumerate(types) if kind_ == USER_DEFINED])
    bos_id = field("ggml.bos_token_id")
    add_bos = kind.add_bos if field("ggml.add_bos_token") is None else field("ggml.add_bos_token")
    if add_bos and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
        )
    ids = {"bos": bos_id, "eos": field("ggml.eos_token_id"), "pad": field("ggml.padding_token_id")}
    names = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    result.chat_template = field("chat_template")
    return result


def _byte_level_bpe(tokens: list[str], merges: list[str], kind: PreTokenizer) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=kind.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind.digits_apart else []
    if kind.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(kind.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)
