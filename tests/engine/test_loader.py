"""Finding and reading checkpoints: path forms, shards, damage, what does not fit, dummy weights, fingerprints."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from evalengine.config import ModelConfig
from evalengine.engine.loader import load_model, resolve_checkpoint, weights_fingerprint
from evalengine.engine.weights import DUMMY_STD, HASHED_AT_ONCE, dummy_tensors
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.hub import PROBE_SECONDS
from evalengine.layers import create_ops
from evalengine.models.decoder import DecoderForCausalLM
from tests.parity.paged import PagedRunner

WEIGHTS = "model.safetensors"


def tokenizer(vocab: int = 20) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="t1", eos_token="t2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny tied Qwen3 with a tokenizer, saved by transformers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        eos_token_id=5,
    )
    path = tmp_path / "tiny"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def load(path: Path | str, **more: Any) -> DecoderForCausalLM:
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(path), **more))
    # exact: in fast, equal weights at another address can give other bits (seen: a product's columns of one value)
    return load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 64)


def logits(model: DecoderForCausalLM) -> Tensor:
    return PagedRunner(model).step({"s": [3, 1, 4, 1, 5, 9]})["s"]


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def shard(folder: Path, files: int) -> None:
    """Rewrite the single file as several, with an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::files]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_checkpoint_is_described(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder)))
    spec = checkpoint.spec
    assert (checkpoint.format, checkpoint.source, checkpoint.revision) == ("safetensors", str(folder), None)
    assert (spec.architecture, spec.head_dim, spec.qk_norm, spec.tie_word_embeddings) == (
        "Qwen3ForCausalLM",
        8,
        True,
        True,
    )
    assert spec.eos_token_ids == (7, 5), "the generation config's alone"
    assert spec.bos_token_id == 1 and spec.dtype == torch.float32
    assert checkpoint.tokenizer is not None and checkpoint.tokenizer("t3 t4")["input_ids"] == [3, 4]


@pytest.mark.parametrize("files", [1, 2, 3])
def test_sharded_files_load_like_one(folder: Path, files: int) -> None:
    expected = logits(load(folder))
    shard(folder, files)
    assert torch.equal(logits(load(folder)), expected)


def test_untied_head_is_its_own_weight_and_a_tied_copy_is_ignored(folder: Path) -> None:
    tied = logits(load(folder))
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / WEIGHTS)
    assert torch.equal(logits(load(folder)), tied)
    save_file({**tensors, "lm_head.weight": torch.ones(23, 16)}, folder / WEIGHTS)
    edit_config(folder, tie_word_embeddings=False)
    untied = logits(load(folder))
    assert not torch.equal(untied, tied) and torch.equal(untied, untied[:, :1].expand_as(untied))


def test_dtype_comes_from_the_weights_if_the_config_names_none(folder: Path) -> None:
    save_file({name: t.to(torch.bfloat16) for name, t in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    assert resolve_checkpoint(ModelConfig(name="t", path=str(folder))).spec.dtype == torch.bfloat16


def test_everything_that_does_not_fit_is_listed_at_once(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(24, 15)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(16, 24, dtype=torch.int8)
    tensors["model.layers.7.extra"] = torch.zeros(1)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(EvalEngineError) as caught:
        load(folder)
    text = str(caught.value)
    assert "missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight;" in text
    assert "unexpected: model.layers.7.extra;" in text
    assert "up_proj.weight is float32 [24, 15], expected [24, 16]" in text and "down_proj.weight is I8" in text


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file_is_named(folder: Path, kept: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    with pytest.raises(EvalEngineError, match=r"model.safetensors: damaged or truncated.*again"):
        load(folder)


def test_damaged_index_and_missing_shards_are_named(folder: Path) -> None:
    shard(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(EvalEngineError, match=r"1 of 3 shards are missing: model-00002-of-00003\.safetensors"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(EvalEngineError, match=r"index\.json: not an index of shards"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("config.json", None, ConfigError, "no config.json there"),
        ("config.json", "{", EvalEngineError, "config.json: cannot be read as JSON"),
        ("config.json", "[]", EvalEngineError, "must hold a JSON object"),
        ("config.json", "{}", ConfigError, "has no model_type"),
        ("config.json", '{"model_type": "mamba"}', ConfigError, "mamba is not supported; supported: Llama"),
        ("config.json", '{"model_type": "llama", "vocab_size": "many"}', ConfigError, "config.json: vocab_size='many'"),
        ("config.json", '{"model_type": "llama", "use_cache": 1, "mlp_bias": 0}', ConfigError, "not a valid.*mlp_bias"),
        (WEIGHTS, None, ConfigError, "no \\*.safetensors file.*load_format=dummy"),
        ("tokenizer.json", '{"model": {}}', ConfigError, "tokenizer in .* cannot be read.*model.tokenizer"),
        ("tokenizer.json", "{", ConfigError, "tokenizer in .* cannot be read.*model.tokenizer"),
    ],
)
def test_unusable_folders_are_explained(
    folder: Path, file: str, content: str | None, error: type[Exception], message: str
) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(error, match=message):
        load(folder)


PACKED = {"hidden_act": "gelu", "quantization_config": {"quant_method": "awq"}, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "model architecture Qwen3ForSequenceClassification is"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "model type mistral is"),
        ({"model_type": "not-in-transformers", "auto_map": {"AutoConfig": "m.C"}}, "model type not-in-transformers is"),
        ({"model_type": "openelm", "num_attention_heads": [2, 3], "architectures": None}, "model type openelm is"),
        ({"model_type": "mistral"}, "model type mistral is"),  # a known class name over it
    ],
)
def test_an_unknown_model_hides_nothing_else(folder: Path, changes: dict[str, Any], unknown: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    (problem,) = caught.value.problems
    assert problem.startswith(f"model.path={folder}: {unknown} not supported; supported: LlamaForCausalLM (llama)")
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    edit_config(folder, **PACKED, mlp_bias=True, rope_parameters=rope)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    first, *others = caught.value.problems
    assert first == problem and len(others) == 5
    text = "\n".join(others)
    assert all(
        word in text for word in ("yarn", "sliding window", "quantization_config", "hidden_act='gelu'", "mlp_bias")
    )
    assert text.count(f"model.path={folder}: ") == 5


def test_a_known_model_lists_all_that_it_lacks(folder: Path) -> None:
    edit_config(folder, **PACKED, num_key_value_heads=3)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert len(caught.value.problems) == 4 and "num_key_value_heads=3" in str(caught.value)
    assert all(p.startswith(f"model.path={folder}: Qwen3ForCausalLM: ") for p in caught.value.problems)


def test_folder_without_tokenizer_asks_for_one(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in .*; set model\.tokenizer"):
        load(folder)
    tokenizer().save_pretrained(tmp_path / "other")
    assert resolve_checkpoint(ModelConfig(name="t", path=str(folder), tokenizer=str(tmp_path / "other"))).tokenizer
    with pytest.raises(ConfigError, match=r"model.tokenizer=\./nowhere: not found"):
        load(folder, tokenizer="./nowhere")
    tokenizer(vocab=24).save_pretrained(tmp_path / "large")
    with pytest.raises(ConfigError, match="the tokenizer has 24 tokens, the model's vocabulary only 23"):
        load(folder, tokenizer=str(tmp_path / "large"))


def test_missing_models_name_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **more: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ConfigError) as caught:
        load("some/model", alternatives=["./no-such-folder", "package:no_such_package/x.gguf", "asset:nothing"])
    text = str(caught.value)
    for tried in (
        "model.path=some/model",
        "some/model (no such folder; the Hub is unreachable and its cache does not hold it)",
        "./no-such-folder (no such file or folder)",
        "package no_such_package is not installed",
        "asset:nothing (bundled models:",
    ):
        assert tried in text


@pytest.mark.parametrize("revision", [None, "a" * 40])
def test_an_unreachable_hub_is_asked_once(revision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's client alone asks six times for the files of a pinned commit, with pauses of 23 s together."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: refused at once
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"some/model \(no such folder; the Hub is unreachable"):
        resolve_checkpoint(ModelConfig(name="t", path="some/model", revision=revision))
    assert time.monotonic() - start < PROBE_SECONDS + 3
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    "path",
    [
        *("x/" * 3000, "y" * 300, "~nobody-of-this-name/x", "a\0b", "", "package:", "package:__main__/x", "asset:"),
        *("package:.x/y", "package:no_such.module/x", "package:torch/" + "x" * 400, "asset:\0"),
    ],
)
def test_paths_that_no_file_can_have_are_a_sentence(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"no model found\. Tried: .* Set model\.path|no \*\.safetensors file"):
        load(path)


def test_a_download_that_breaks_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **more: Any) -> str:
        raise TimeoutError("timed out")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(
        EvalEngineError, match=r"model.path=some/model: the download broke off \(timed out\); run it again"
    ):
        load("some/model")


def test_hub_id_is_downloaded_with_its_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot(repo_id: str, **more: Any) -> str:
        calls.append((repo_id, more["revision"], "*.safetensors" in more["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path="some/model", revision="abc"))
    assert (checkpoint.source, checkpoint.revision, checkpoint.path) == ("some/model", "tiny", folder)
    resolve_checkpoint(ModelConfig(name="t", path="some/model", load_format="dummy"))
    assert calls == [("some/model", "abc", True), ("some/model", None, False)], "dummy weights download no weights"


def test_package_files_and_alternatives(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "weights_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    folder.rename(package / "tiny")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    checkpoint = resolve_checkpoint(
        ModelConfig(name="t", path="./absent", alternatives=["package:weights_package/tiny", "asset:never-reached"])
    )
    assert checkpoint.path == package / "tiny" and checkpoint.source == "package:weights_package/tiny"
    assert "weights_package" not in sys.modules
    with pytest.raises(ConfigError, match="package weights_package has no file other"):
        load("package:weights_package/other")


def test_wrong_load_formats_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.load_format=pickle: must be auto, safetensors, gguf or dummy"):
        load(folder, load_format="pickle")
    with pytest.raises(ConfigError, match=r"0 \.gguf files here"):
        load(folder, load_format="gguf")
    with pytest.raises(ConfigError, match="must be a folder"):
        load(folder / WEIGHTS)


def test_dummy_weights_are_seeded_by_name_and_need_neither_weights_nor_tokenizer(folder: Path) -> None:
    bare = folder / "config.json"
    for file in folder.iterdir():
        if file != bare:
            file.unlink()
    first, second = load(folder, load_format="dummy"), load(bare, load_format="dummy")
    assert torch.equal(logits(first), logits(second))
    table = first.model.embed_tokens.weight
    # A hash in integer arithmetic, scaled: these hold on every machine.
    assert [x.hex() for x in table[0, :2].tolist()] == ["0x1.bc54860000000p-6", "0x1.89cae60000000p-8"]
    assert abs(float(table.std()) - 0.02) < 0.003 and not torch.equal(
        table[:16], first.model.norm.weight.expand(16, 16)
    )
    assert (first.model.norm.weight == 1).all()
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder), load_format="dummy"))
    assert checkpoint.tokenizer is None and checkpoint.format == "dummy"
    other = dataclasses.replace(checkpoint, spec=dataclasses.replace(checkpoint.spec, num_layers=1))
    assert weights_fingerprint(checkpoint) != weights_fingerprint(other)


def test_dummy_weights_look_random_across_the_parts_they_are_made_in() -> None:
    shape = (2 * HASHED_AT_ONCE + 5,)
    tensors = dict(dummy_tensors({"a.weight": shape, "b.weight": shape}, torch.device("cpu")))
    a, b = tensors["a.weight"] / DUMMY_STD, tensors["b.weight"] / DUMMY_STD
    assert abs(float(a.mean())) < 0.01 and abs(float(a.std()) - 1) < 0.01
    assert abs(float((a * b).mean())) < 0.01, "tensors are unlike each other"
    for shift in (1, 2, 4096, HASHED_AT_ONCE):
        assert abs(float((a[shift:] * a[:-shift]).mean())) < 0.01, f"a repeats itself at {shift}"


@pytest.mark.gpu
def test_dummy_weights_are_the_same_on_the_gpu() -> None:
    shapes = {"a.weight": (1031, 2053), "norm.weight": (7,)}
    here, there = (dict(dummy_tensors(shapes, torch.device(device))) for device in ("cpu", "cuda"))
    assert all(torch.equal(here[name], there[name].cpu()) for name in shapes)


def test_fingerprint_sees_contents_and_names_of_weight_files_only(folder: Path) -> None:
    def fingerprint() -> str:
        return weights_fingerprint(resolve_checkpoint(ModelConfig(name="t", path=str(folder))))

    seen = [fingerprint()]
    (folder / "README.md").write_text("not a weight")
    assert fingerprint() == seen[0] and len(seen[0]) == 64
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, folder / WEIGHTS)
    seen.append(fingerprint())
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    seen.append(fingerprint())
    assert len(set(seen)) == 3
