"""The tokenizer inside a GGUF file: byte-level BPE built from its metadata, as the model's own folder has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from evalengine.engine.load.gguf_names import listing
from evalengine.engine.text.fast_tokenizer import FastTokenizer
from evalengine.engine.text.tokenizer import FIX
from evalengine.errors import ConfigError
from evalengine.util.gguf_header import GGUFFields, shown

CONTROL, USER_DEFINED = 3, 4  # token types: special, and added but not special
LAST_TYPE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-level BPE, named by `tokenizer.ggml.pre`, and what else the family has in common."""

    pattern: str | None = None  # None: GPT-2's own, which the library's ByteLevel has built in
    digits_apart: bool = False  # each digit is a separate piece
    nfc: bool = False  # text is brought to Unicode normalisation form C first
    ignore_merges: bool = False  # a piece that is a token is taken whole, without merges
    add_bos: bool = False  # whether BOS is added when the file does not say
    # Whether the family's tokenizers have a BOS only if they add it. A file's `bos_token_id` comes from config.json,
    # where Qwen2 has one that its tokenizer does not know; with it, lm-eval's prefix token would not be the folder's.
    bos_only_if_added: bool = False


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
    bos_only_if_added=True,
)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits_apart=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def gguf_tokenizer(fields: GGUFFields, setting: str) -> FastTokenizer:
    """Byte-level BPE from the metadata below `tokenizer`. `setting` names the file's origin in errors.

    Raises `ConfigError` for another tokenizer model or an unknown pre-tokenizer (a guess would silently change
    prompts) and for a vocabulary that makes no tokenizer, `EvalEngineError` for a value of a wrong type.
    """
    kind = _kind(fields, setting)
    tokens = fields.strings("ggml.tokens")
    problems = [*_vocabulary_problems(tokens), *_setting_problems(fields)]
    merges = fields.strings("ggml.merges", None)
    if merges is None:
        problems.append("it has no merges (tokenizer.ggml.merges), which byte-level BPE needs")
    elif odd := [merge for merge in merges if len(merge.split(" ")) != 2]:
        problems.append(f"its merge {shown(repr(odd[0]))} is not two tokens")
    bos_id, eos_id, pad_id = (fields.token_id(f"ggml.{x}_token_id", len(tokens)) for x in ("bos", "eos", "padding"))
    add_bos = fields.boolean("ggml.add_bos_token", kind.add_bos)
    if add_bos and bos_id is None:
        problems.append("it adds a BOS token (tokenizer.ggml.add_bos_token) and has none (tokenizer.ggml.bos_token_id)")
    if problems:
        raise ConfigError([f"{setting}: {problem}; {FIX}" for problem in problems])
    ids = {"bos": bos_id if add_bos or not kind.bos_only_if_added else None, "eos": eos_id, "pad": pad_id}
    names = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    types = fields.integers("ggml.token_type", [], length=len(tokens), largest=LAST_TYPE)
    template = fields.string("chat_template", None)
    try:
        tokenizer = _byte_level_bpe(tokens, merges or [], kind)
        tokenizer.add_special_tokens([_added(tokens[i], True) for i, type_ in enumerate(types) if type_ == CONTROL])
        tokenizer.add_tokens([_added(tokens[i], False) for i, type_ in enumerate(types) if type_ == USER_DEFINED])
        if add_bos and bos_id is not None:
            bos = tokens[bos_id]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
            )
        return FastTokenizer(tokenizer, names, chat_template=template)
    except Exception as error:  # the tokenizers library raises plain Exception, e.g. for a merge of unknown tokens
        raise ConfigError(f"{setting}: its vocabulary makes no tokenizer ({shown(error)}); {FIX}") from error


def _kind(fields: GGUFFields, setting: str) -> PreTokenizer:
    if (model := fields.string("ggml.model", None)) != "gpt2":
        raise ConfigError(
            f"{setting}: its tokenizer model is {shown(model)}, only byte-level BPE (gpt2) is supported; {FIX}"
        )
    pre = fields.string("ggml.pre", None)
    if pre is None or pre not in PRE_TOKENIZERS:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise ConfigError(f"{setting}: its pre-tokenizer {shown(pre)} is not one of {supported}; {FIX}")
    return PRE_TOKENIZERS[pre]


def _vocabulary_problems(tokens: list[str]) -> list[str]:
    problems = []
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = [token for token in tokens if token in seen or seen.add(token)]  # type: ignore[func-returns-value]
        problems.append(f"{len(twice)} of its tokens occur twice: {listing([repr(token) for token in twice])}")
    if "" in tokens:
        problems.append(f"its token {tokens.index('')} is empty")
    return problems


def _setting_problems(fields: GGUFFields) -> list[str]:
    """A sentence for each step that llama.cpp's or the model's own tokenizer takes and this one does not."""
    keys = ("add_eos_token", "add_sep_token", "normalizer.lowercase", "normalizer.strip_accents")
    return [f"tokenizer.ggml.{key}=true is not supported" for key in keys if fields.boolean(f"ggml.{key}", False)]


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
