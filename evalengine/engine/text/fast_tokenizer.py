"""Tokenizers that a `tokenizer.json` describes, read without transformers, whose import takes seconds.

`read_tokenizer` gives the token ids, special tokens, texts and chat template that AutoTokenizer gives, for the classes
`BACKEND` and `REBUILT` and the model types `TYPES`; tests compare them. It follows transformers 5.24:
`AutoTokenizer.from_pretrained` chooses a class, `PreTrainedTokenizerBase._from_pretrained` reads the files, and
`TokenizersBackend` adds tokens. Everything else is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from evalengine.util.plain_files import read_json

BACKEND = "TokenizersBackend"  # the class that takes tokenizer.json as it is; formerly PreTrainedTokenizerFast
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Token = str | AddedToken


class FastTokenizer:
    """A tokenizer of the tokenizers library, and the roles of its tokens: what is used here of `TokenizersBackend`."""

    is_fast = True

    def __init__(
        self,
        backend: Tokenizer,
        roles: Mapping[str, Token | None],
        *,
        extra: Iterable[Token] = (),
        added: Mapping[int, AddedToken] | None = None,
        class_name: str = BACKEND,
        chat_template: Any = None,
        clean_up_tokenization_spaces: bool = False,
        split_special_tokens: bool = False,
    ) -> None:
        """roles: the token of each role. extra: special tokens without one. added: by their ids in the files.

        All of them are added to the backend unless it has them. class_name: transformers' class. With
        `split_special_tokens`, special tokens in a text are encoded as text.
        """
        self.backend_tokenizer, self.class_name, self.chat_template = backend, class_name, chat_template
        self.clean_up_tokenization_spaces = clean_up_tokenization_spaces  # BPE never does
        self.split_special_tokens = split_special_tokens
        self._add_bos_token = False
        named = {role: token for role, token in roles.items() if token is not None}
        self.special_tokens_map = {role: str(token) for role, token in named.items()}
        self.extra_special_tokens = [str(token) for token in extra]
        backend.no_truncation()
        backend.no_padding()
        tokens: list[Token] = [token for _, token in sorted((added or {}).items())]
        known = {token.content for token in [*backend.get_added_tokens_decoder().values(), *(added or {}).values()]}
        for token in (*named.values(), *extra):
            if str(token) not in known and token not in tokens:
                tokens.append(token)
        backend.add_tokens([_special(token, self.special_tokens_map.values()) for token in tokens])
        if backend.post_processor is None:
            self.add_bos_token = False

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        """The token of a role, and its id; None for a role without one. Anything else is transformers' answer."""
        role = name.removesuffix("_id")
        if name.startswith(("_", "add_", "set_")):  # what transformers' object changes would not change this one
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        if role not in ROLES:
            return getattr(self.of_transformers(), name)
        token = self.special_tokens_map.get(role)
        return token if name == role or token is None else self.convert_tokens_to_ids(token)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; the token of a role also by its id."""
        role = name.removesuffix("_id")
        self.__dict__.pop("_of_transformers", None)
        if role not in ROLES:
            object.__setattr__(self, name, value)
            return
        self.special_tokens_map.pop(role, None)
        if value is not None:
            self.special_tokens_map[role] = str(value if name == role else self.convert_ids_to_tokens(value))

    def add_tokens(self, tokens: list[Token]) -> int:
        """Adds tokens that the vocabulary does not have; returns their number."""
        self.__dict__.pop("_of_transformers", None)
        return int(self.backend_tokenizer.add_tokens(tokens))

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Encodes as transformers' tokenizers do."""
        return self.of_transformers()(*texts, **options)

    def of_transformers(self) -> Any:
        """The same tokenizer as an object of transformers, for callers outside; its import takes seconds.

        It copies the vocabulary, so it is made once, and again after a change by this class's attributes and methods.
        """
        if "_of_transformers" in self.__dict__:
            return self.__dict__["_of_transformers"]
        from transformers import PreTrainedTokenizerFast

        made = self.__dict__["_of_transformers"] = PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            extra_special_tokens=self.extra_special_tokens,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=self.clean_up_tokenization_spaces,
            split_special_tokens=self.split_special_tokens,
            **self.special_tokens_map,
        )
        return made

    @property
    def add_bos_token(self) -> bool:
        """Whether BOS is added before every text; setting it replaces the post-processor of tokenizer.json."""
        return self._add_bos_token

    @add_bos_token.setter
    def add_bos_token(self, value: bool) -> None:
        bos = self.bos_token
        self._add_bos_token = bool(value) and bos is not None
        before, again = (f"{bos}:0 ", f" {bos}:1") if self._add_bos_token else ("", "")
        self.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A:0",
            pair=f"{before}$A:0{again} $B:1",
            special_tokens=[(bos, self.bos_token_id)] if self._add_bos_token else [],
        )

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by their ids."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens with a role and the extra ones, each once."""
        return [*dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens])]

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, with the added tokens."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def get_chat_template(self) -> str:
        """The chat template. Raises ValueError if there is none, or no one of several."""
        template = self.chat_template.get("default") if isinstance(self.chat_template, dict) else self.chat_template
        if template is None:
            raise ValueError("the tokenizer has no chat template, or none called default")
        return str(template)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The token's id; the unknown token's, if it has none."""
        found = self.backend_tokenizer.token_to_id(token)
        unknown = self.special_tokens_map.get("unk_token")
        return found if found is not None or unknown in (None, token) else self.convert_tokens_to_ids(str(unknown))

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """The vocabulary's entry of an id, or a list of those of several; None for an id outside it."""
        entry = self.backend_tokenizer.id_to_token
        return entry(ids) if isinstance(ids, int) else [*map(entry, ids)]

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """The token ids of a text. verbose: has no effect."""
        if self.backend_tokenizer.encode_special_tokens != self.split_special_tokens:  # a copy has lost it
            self.backend_tokenizer.encode_special_tokens = self.split_special_tokens
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        listed = [ids] if isinstance(ids, int) else [*ids]
        return str(self.backend_tokenizer.decode(listed, skip_special_tokens=skip_special_tokens))


def _special(token: Token, named: Iterable[str]) -> AddedToken:
    """A token as it is added: one with a role is special."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    token.special = token.special or token.content in named
    return token


# Model type -> the class that transformers takes for it; None: the class that the files name.
_FROM_FILE = (
    *("ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "granite", "granitemoe"),
    *("granitemoehybrid", "minimax_m2", "ministral3", "mistral", "mistral3", "mixtral", "olmo2", "olmo3"),
    *("olmo_hybrid", "phi3", "stablelm"),
)
_AS_NAMED = (
    *("", "apertus", "cwm", "deepseek_v2", "deepseek_v3", "exaone4", "falcon_h1", "gpt_oss", "helium", "lfm2"),
    *("hunyuan_v1_dense", "lfm2_moe", "llama", "nemotron_h", "seed_oss", "smollm3"),
)
TYPES: Mapping[str, str | None] = {
    **dict.fromkeys(_FROM_FILE, BACKEND),
    **dict.fromkeys(_AS_NAMED),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt_neox", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), "Qwen3_5Tokenizer"),
    "starcoder2": "GPT2Tokenizer",
}
# Types whose published files name a wrong class.
_MISNAMED = frozenset(
    ("ernie4_5", "ernie4_5_moe", "minimax_m2", "phi3", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
)
# Types of whose large vocabularies transformers warns.
_OF_MISTRAL = ("mistral", "mistral3", "ministral", "pixtral", "voxtral")
_BOOLEAN = ("add_bos_token", "add_eos_token")  # the post-processor of tokenizer.json decides


def _byte_level(prefix: bool, use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def _sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _bpe(**more: Any) -> dict[str, Any]:
    plain = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    return {"type": "BPE", **plain, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **more}


QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_AFFIXES = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
_NFC = {"type": "NFC"}
_SPACES_BACK = (_replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"})


def _gpt2(settings: Mapping[str, Any]) -> dict[str, Any]:
    before = _byte_level(settings.get("add_prefix_space", False))
    return {"model": _bpe(**_AFFIXES), "pre_tokenizer": before, "decoder": _byte_level(True)}


def _gpt_neox(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gpt2(settings), "normalizer": _NFC}


def _cohere(settings: Mapping[str, Any]) -> dict[str, Any]:
    level = _byte_level(settings.get("add_prefix_space", False))
    before = _sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, level)
    return {**_gpt_neox(settings), "pre_tokenizer": before}


def _qwen(settings: Mapping[str, Any], words: str = QWEN_WORDS) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    level = _byte_level(bool(settings.get("add_prefix_space")), use_regex=False)
    before = _sequence("pretokenizers", split, level)
    return {"model": _bpe(**_AFFIXES), "normalizer": _NFC, "pre_tokenizer": before, "decoder": _byte_level(True)}


def _qwen3_5(settings: Mapping[str, Any]) -> dict[str, Any]:
    return _qwen(settings, QWEN_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"))


def _llama(settings: Mapping[str, Any]) -> dict[str, Any]:
    prefix = settings.get("add_prefix_space") in (None, True)
    scheme = ("always" if settings.get("legacy") else "first") if prefix else "never"
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "model": _bpe(fuse_unk=True, byte_fallback=True),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": _sequence("decoders", *_SPACES_BACK, *strip),
    }


def _gemma(settings: Mapping[str, Any]) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return {
        "model": _bpe(unk_token=str(settings["unk_token"]), fuse_unk=True, byte_fallback=True),
        "normalizer": _replace(" ", "▁"),
        "pre_tokenizer": split,
        "decoder": _sequence("decoders", *_SPACES_BACK),
    }


_END = "<|endoftext|>"
_OF_QWEN = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
# The classes that take only the vocabulary, the merges and the post-processor from tokenizer.json: the parts that they
# have instead, for the settings of tokenizer_config.json, and the tokens of roles that the settings leave out.
REBUILT: Mapping[str, tuple[Callable[[Mapping[str, Any]], dict[str, Any]], Mapping[str, str | None]]] = {
    "CohereTokenizer": (
        _cohere,
        {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>",
         "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>"},
    ),
    "GemmaTokenizer": (
        _gemma,
        {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
         "mask_token": "<mask>"},
    ),
    "GPT2Tokenizer": (_gpt2, {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}),
    "GPTNeoXTokenizer": (
        _gpt_neox,
        {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": "<|padding|>"},
    ),
    "LlamaTokenizer": (_llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}),
    "Qwen2Tokenizer": (_qwen, _OF_QWEN),
    "Qwen3_5Tokenizer": (_qwen3_5, _OF_QWEN),
}  # fmt: skip
# Settings of tokenizer_config.json that are read here, and those that change nothing that is used here. With any other,
# the tokenizer is left to transformers.
_READ = frozenset(
    ("tokenizer_class", "add_bos_token", "add_eos_token", "chat_template", "added_tokens_decoder", "add_prefix_space",
     "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens", "init_inputs", "legacy",
     "clean_up_tokenization_spaces", "split_special_tokens")
)  # fmt: skip
_WITHOUT_EFFECT = frozenset(
    ("backend", "errors", "is_local", "local_files_only", "max_length", "model_input_names", "model_max_length",
     "name_or_path", "pad_to_multiple_of", "pad_token_type_id", "padding_side", "processor_class", "sp_model_kwargs",
     "spaces_between_special_tokens", "special_tokens_map_file", "stride", "tokenizer_file", "truncation_side",
     "truncation_strategy", "use_default_system_prompt")
)  # fmt: skip


def read_tokenizer(folder: Path) -> FastTokenizer | None:
    """Return the folder's tokenizer; None for one that is left to transformers.

    Raises any exception for files that it does not understand: transformers may read them, or reports what is wrong.
    """
    file = folder / "tokenizer.json"
    if not file.exists() or any((folder / name).exists() for name in ("additional_chat_templates", "tekken.json")):
        return None
    config, settings = (_object(folder / name) for name in ("config.json", "tokenizer_config.json"))
    text = file.read_text(encoding="utf-8")
    name = _class_of(config, settings, '"ByteLevel"' in text)
    unknown = [key for key in settings.keys() - _READ - _WITHOUT_EFFECT if not key.endswith("_token")]
    if name is None or unknown or settings.get("init_inputs"):
        return None
    if (template := folder / "chat_template.jinja").exists():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    content = json.loads(text) if name != BACKEND or "added_tokens_decoder" not in settings else {}
    roles, extra, added = _tokens(folder, settings, content)
    if name == BACKEND:
        backend = Tokenizer.from_str(text)
        padding = backend.padding
    else:
        parts, defaults = REBUILT[name]
        roles = {**defaults, **roles}
        made = parts({**settings, "unk_token": roles["unk_token"]})
        if content["model"].get("type") != "BPE" or not isinstance(content["model"]["vocab"], dict):
            return None
        made["model"] |= {key: content["model"][key] for key in ("vocab", "merges")}
        empty = dict.fromkeys(("normalizer", "truncation", "padding"))
        backend = Tokenizer.from_str(json.dumps({**content, **empty, "added_tokens": [], **made}))
        padding = content["padding"]
    if padding:
        roles.setdefault("pad_token", padding["pad_token"])
    roles = {**dict.fromkeys(ROLES), **roles}  # in this order
    cleans = bool(settings.get("clean_up_tokenization_spaces", False))
    is_bpe = type(backend.model).__name__ == "BPE"
    old_words = config.get("model_type") in _OF_MISTRAL and backend.get_vocab_size() > 100_000  # transformers warns
    if old_words or (cleans and not is_bpe):
        return None
    made_of = FastTokenizer(
        backend,
        roles,
        extra=extra,
        added=added,
        class_name=name,
        chat_template=_templates(settings.get("chat_template")),
        clean_up_tokenization_spaces=cleans,
        split_special_tokens=bool(settings.get("split_special_tokens", False)),
    )
    if name == "Qwen2Tokenizer":
        backend.add_tokens([AddedToken(token, special=True) for token in made_of.all_special_tokens])
    elif name == "CohereTokenizer":
        tokens = (*(token for token in roles.values() if token is not None), *extra)
        backend.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) if isinstance(t, str) else t for t in tokens]
        )
    elif name == "GPTNeoXTokenizer":
        made_of.add_bos_token = False
    return made_of


def _class_of(config: Mapping[str, Any], settings: Mapping[str, Any], byte_level: bool) -> str | None:
    """The name of the class that AutoTokenizer takes; None if it is not one of those here."""
    model_type = config.get("model_type", "")
    if model_type not in TYPES or "model_name" in config:
        return None
    registered = TYPES[model_type]
    named = settings.get("tokenizer_class") or config.get("tokenizer_class") or registered or BACKEND
    named = str(named).removesuffix("Fast")
    if registered == BACKEND:
        return BACKEND
    if named == "LlamaTokenizer" and byte_level and model_type not in _MISNAMED:
        return BACKEND
    if named in (BACKEND, "PreTrainedTokenizer"):
        return registered if model_type in _MISNAMED else BACKEND
    if registered is not None and model_type in _MISNAMED:
        return registered
    return named if named in REBUILT else None


def _tokens(
    folder: Path, settings: dict[str, Any], content: Mapping[str, Any]
) -> tuple[dict[str, Token | None], list[Token], dict[int, AddedToken]]:
    """The tokens of roles, the special tokens without one, and the added tokens by their ids."""
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    own = {
        name: settings.pop(name)
        for name, value in [*settings.items()]
        if name.endswith("_token") and name not in (*ROLES, *_BOOLEAN)
    }
    if isinstance(settings.get("extra_special_tokens"), dict):
        own |= settings.pop("extra_special_tokens")
    own = own or settings.get("model_specific_special_tokens") or {}
    if "added_tokens_decoder" in settings:
        added = {int(index): AddedToken(**token) for index, token in settings["added_tokens_decoder"].items()}
    else:
        added = _added_by_files(folder, settings, content)
    by_text = {str(token): token for token in added.values()}
    extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or ()
    roles = {role: _token(settings[role]) for role in ROLES if role in settings}
    roles = {role: by_text.get(str(token), token) for role, token in roles.items()}
    return {**roles, **{name: _token(value) for name, value in own.items()}}, [*map(_token, extra)], added


def _added_by_files(folder: Path, settings: dict[str, Any], content: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The added tokens of a folder whose tokenizer_config.json has none; what special_tokens_map.json says of roles
    comes into the settings."""
    for name, value in _object(folder / "special_tokens_map.json").items():
        if name not in (*ROLES, "additional_special_tokens"):
            raise ValueError(f"special_tokens_map.json: {name} is not read here")
        if isinstance(value, dict):
            value = AddedToken(**{**value, "special": True})
        settings[name] = value
    added = {}
    special = {str(settings[role]) for role in ROLES if settings.get(role)}
    special |= {str(token) for token in settings.get("extra_special_tokens") or ()}
    for text, index in _object(folder / "added_tokens.json").items():
        added[index] = AddedToken(text, normalized=text not in special, special=text in special)
    for token in content["added_tokens"]:
        added[token["id"]] = AddedToken(**{name: value for name, value in token.items() if name != "id"})
    return added


def _token(value: Any) -> Any:
    """A token as JSON has it. Raises TypeError for anything else."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{name: part for name, part in value.items() if name != "__type"})
    if value is not None and not isinstance(value, str | AddedToken):
        raise TypeError(f"{value!r} is no token")
    return value


def _templates(value: Any) -> Any:
    """The chat template, or several by their names."""
    return {one["name"]: one["template"] for one in value} if isinstance(value, list) else value


def _object(file: Path) -> dict[str, Any]:
    """A file's JSON object; empty without the file. Raises TypeError for another value."""
    content = read_json(file) if file.exists() else {}
    if not isinstance(content, dict):
        raise TypeError(f"{file.name} holds no object")
    return content
