"""Tokenizers that are read without transformers equal AutoTokenizer's, for every listed class and model type."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from evalengine.certify.model import shapes
from evalengine.engine.text.fast_tokenizer import (
    _MISNAMED,
    BACKEND,
    REBUILT,
    ROLES,
    TYPES,
    FastTokenizer,
    read_tokenizer,
)
from evalengine.engine.text.tokenizer import class_name, load_tokenizer, plain_tokenizer
from evalengine.models.registry import MODEL_REGISTRY

ROOT = Path(__file__).parents[2]
END, IN, OUT = "<|endoftext|>", "<a>", "<new>"  # tokens of the vocabulary; `OUT` is not one
TEXTS = (
    *("", " ", "  two spaces", "trailing ", "Hello, world!", "it's 3.14 and 1234567", "\n\n\tx\r\n", "a .b ?c n't"),
    *(f"{END}{END}x", f"  {IN}  a {OUT} b{OUT}", "<s></s><unk><pad><bos><im>", "日本語 é é 🤗‍🔥", "▁x ▁▁y", "\x00\x7f"),
)
NAMED = (*REBUILT, BACKEND, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2TokenizerFast", None)


@cache
def vocabulary(byte_level: bool) -> str:
    """A small tokenizer.json of byte-level BPE, or of BPE with SentencePiece's spaces and byte fallback."""
    corpus = ["Hello world, it's 1234 and 567 hello world", "a b c the there then x y z 3.14", "日本語 é"] * 3
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    special = [END, IN, "<unk>", "<s>", "</s>"] + ([] if byte_level else byte_tokens)
    tokenizer = Tokenizer(models.BPE(byte_fallback=not byte_level, unk_token=None if byte_level else "<unk>"))
    if byte_level:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(corpus, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(content)


def written(folder: Path, case: random.Random, model_type: str, named: str | None) -> None:
    """Writes a folder with one of many settings of its tokenizer."""
    content = json.loads(vocabulary(case.random() < 0.5))
    for token in content["added_tokens"]:
        token |= {"special": case.random() < 0.8, "lstrip": case.random() < 0.2, "normalized": case.random() < 0.2}
    if case.random() < 0.3:
        single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        ids = {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}}
        content["post_processor"] = {
            "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": ids
        }  # fmt: skip
    if case.random() < 0.1:
        content["padding"] = {
            "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": END,
        }  # fmt: skip
        content["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    settings: dict[str, Any] = {} if named is None else {"tokenizer_class": named}
    of_token: list[Any] = [END, IN, OUT, "<s>", None]
    of_token.append({"__type": "AddedToken", "content": OUT, "lstrip": True, "rstrip": False, "normalized": False})
    for role in ROLES:
        if case.random() < 0.3:
            settings[role] = case.choice(of_token)
    more: dict[str, list[Any]] = {
        "add_bos_token": [True, False], "add_eos_token": [True], "add_prefix_space": [True, False, None],
        "legacy": [True, False, None], "split_special_tokens": [True], "clean_up_tokenization_spaces": [True, False],
        "extra_special_tokens": [[OUT, IN], {"image_token": "<im>"}], "additional_special_tokens": [["<x>", END]],
        "boi_token": ["<im>"], "chat_template": ["{{ bos_token }}x", [{"name": "default", "template": "y"}]],
        "model_max_length": [3], "padding_side": ["left"], "sp_model_kwargs": [{}], "errors": ["replace"],
        "model_specific_special_tokens": [{"eoi_token": "<e>"}],
    }  # fmt: skip
    settings |= {name: case.choice(values) for name, values in more.items() if case.random() < 0.2}
    fields = {"special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    if case.random() < 0.4:
        listed = [*enumerate([END, IN, "<unk>", "<s>", "</s>"])][: case.randint(1, 5)]
        settings["added_tokens_decoder"] = {
            str(index): {"content": text, **fields, "rstrip": case.random() < 0.2, "special": case.random() < 0.7}
            for index, text in (*listed, (700, "<late>"))
        }
    elif case.random() < 0.5:
        roles = {"bos_token": {"content": "<s>", **fields}, "eos_token": OUT, "additional_special_tokens": ["<y>"]}
        file = {name: value for name, value in roles.items() if case.random() < 0.5}
        (folder / "special_tokens_map.json").write_text(json.dumps(file))
        (folder / "added_tokens.json").write_text(json.dumps({"<late>": 700, OUT: 701}))
    if case.random() < 0.2:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if settings or case.random() < 0.5:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def tried(tokenizer: Any, text: str, special: bool) -> list[int]:
    """The ids of a text; no ids where the tokenizer has no token for it."""
    with suppress(Exception):
        return [*tokenizer.encode(text, add_special_tokens=special, verbose=False)]
    return []


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compares two tokenizers by everything that is used of them."""
    assert class_name(ours) == type(theirs).__name__
    for name in ("special_tokens_map", "chat_template", "added_tokens_decoder", "extra_special_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for role in ROLES:
        for name in (role, f"{role}_id"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        for special in (True, False):
            ids, of_theirs = (tried(one, text, special) for one in (ours, theirs))
            assert ids == of_theirs, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert plain_tokenizer(ours) == plain_tokenizer(theirs)  # with every stage of both


@pytest.mark.parametrize("model_type", sorted(TYPES))
def test_tokenizers_equal_transformers(tmp_path: Path, model_type: str) -> None:
    case = random.Random(model_type)
    for number, named in enumerate(case.sample(NAMED, 9)):
        (folder := tmp_path / str(number)).mkdir()
        written(folder, case, model_type, named)
        try:
            ours = read_tokenizer(folder)
        except Exception:  # transformers reads it then
            continue
        if ours is None:
            continue
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        assert_equal(ours, theirs)
        ours.add_bos_token = theirs.add_bos_token = True
        assert_equal(ours, theirs)


def test_the_table_of_model_types_is_transformers() -> None:
    """A new family is added to the table, or its tokenizer needs transformers."""
    assert {family.model_type for family in MODEL_REGISTRY.values()} <= TYPES.keys()
    for model_type, ours in TYPES.items():
        assert ours == TOKENIZER_MAPPING_NAMES.get(model_type), model_type
        named_wrongly = model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        assert named_wrongly == (model_type in _MISNAMED)


def test_each_class_is_read_here(tmp_path: Path) -> None:
    """Nothing of a plain folder is left to transformers."""
    for number, named in enumerate((*REBUILT, BACKEND)):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "tokenizer.json").write_text(vocabulary(named not in ("LlamaTokenizer", "GemmaTokenizer")))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, "eos_token": "</s>"}))
        (folder / "config.json").write_text('{"model_type": "llama"}')
        assert class_name(read_tokenizer(folder)) == named
        assert_equal(load_tokenizer(folder, "x"), AutoTokenizer.from_pretrained(str(folder), local_files_only=True))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer"}),  # another class
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "do_lower_case": True}),  # an unknown setting
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["x.X", None]}}),
        ("config.json", {"model_type": "bert"}),
        ("tekken.json", {}),
    ],
)
def test_the_rest_is_left_to_transformers(tmp_path: Path, file: str, content: Any) -> None:
    (tmp_path / "tokenizer.json").write_text(vocabulary(True))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_tokenizer(tmp_path) is not None
    (tmp_path / file).write_text(json.dumps(content))
    assert read_tokenizer(tmp_path) is None


def test_a_run_does_not_import_transformers(tmp_path: Path) -> None:
    """Nor other slow packages. Without generation_config.json, config.json is read instead."""
    program = (
        "import sys; from evalengine.__main__ import main;"
        "print(main(sys.argv[1:]), sorted({'transformers', 'scipy.special', 'gguf', 'pandas'} & sys.modules.keys()))"
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text(json.dumps({**shapes()["qwen3-0.6b"], **sizes, **heads}))
    named = [f"model.path={model}", "model.name=m", "model.load_format=dummy", "model.tokenizer=asset:tinymath"]
    settings = ["limit=1", "progress=false", "engine.device=cpu", f"output_dir={tmp_path / 'runs'}", *named]
    words = [sys.executable, "-c", program, *settings]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["0 []"], done.stdout + done.stderr


def test_callers_outside_get_transformers_methods(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(vocabulary(True))
    ours = load_tokenizer(tmp_path, "x")
    assert isinstance(ours, FastTokenizer) and ours(["a b", ""])["input_ids"] == [ours.encode("a b"), []]
    assert ours.batch_decode([ours.encode("a b")]) == ["a b"]
    ours.pad_token = END
    ours.eos_token_id = 1
    assert (ours.pad_token_id, ours.eos_token, ours.bos_token) == (0, IN, None)
    assert ours.special_tokens_map == {"pad_token": END, "eos_token": IN}
    made = ours.of_transformers()
    assert ours.of_transformers() is made and made.eos_token == IN, "it copies the vocabulary, so it is made once"
    assert ours.add_tokens([OUT]) == 1 and ours.encode(OUT) == [len(ours) - 1] == ours(OUT)["input_ids"]
    with pytest.raises(AttributeError, match="add_special_tokens"):
        ours.add_special_tokens({"pad_token": OUT})
