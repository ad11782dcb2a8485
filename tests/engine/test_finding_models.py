"""Finding checkpoints: path forms, downloads, folders and files that are damaged, missing or unknown."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import files_of, resolve_checkpoint
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.util.hub import PROBE_SECONDS
from tests.engine.tied_folder import WEIGHTS, load, shard, tied_qwen3, tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny tied Qwen3."""
    return tied_qwen3(tmp_path / "tiny")


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
        ("config.json", '{"model_type": "mamba"}', ConfigError, "mamba is not supported .*layers of linear.*orted: "),
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
    def unreachable(*args: Any, **options: Any) -> str:
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
    """The Hub is asked once, though its client would ask six times for a pinned commit's files, with pauses of 23 s."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # The discard port refuses.
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
    def broken(*args: Any, **options: Any) -> str:
        raise TimeoutError("timed out")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(
        EvalEngineError, match=r"model.path=some/model: the download broke off \(timed out\); run it again"
    ):
        load("some/model")


def test_hub_id_is_downloaded_with_its_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options["revision"], "*.safetensors" in options["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path="some/model", revision="abc"))
    assert (checkpoint.source, checkpoint.revision, checkpoint.path) == ("some/model", "tiny", folder)
    resolve_checkpoint(ModelConfig(name="t", path="some/model", load_format="dummy"))
    assert calls == [("some/model", "abc", True), ("some/model", None, False)], "dummy weights download no weights"


def test_a_repository_without_safetensors_is_downloaded_with_its_pytorch_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")

    def snapshot(repo_id: str, **options: Any) -> str:
        for file in folder.iterdir():
            if any(file.match(pattern) for pattern in options["allow_patterns"]):
                (tmp_path / repo_id).mkdir(parents=True, exist_ok=True)
                (tmp_path / repo_id / file.name).write_bytes(file.read_bytes())
        return str(tmp_path / repo_id)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    pytorch = resolve_checkpoint(ModelConfig(name="t", path="some/one", load_format="pytorch"))
    assert pytorch.format == "pytorch" and not (pytorch.path / WEIGHTS).exists()
    both = resolve_checkpoint(ModelConfig(name="t", path="some/both"))
    assert both.format == "safetensors" and not (both.path / "pytorch_model.bin").exists()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    assert resolve_checkpoint(ModelConfig(name="t", path="some/old")).format == "pytorch"
    with pytest.raises(ConfigError, match=r"no \*\.safetensors, only PyTorch files; use auto"):
        resolve_checkpoint(ModelConfig(name="t", path="some/old", load_format="safetensors"))


@pytest.mark.parametrize(
    ("others", "load_format", "kind"),
    [
        (["model.gguf"], "auto", "pytorch"),
        (["adapter_model.safetensors"], "auto", "pytorch"),
        (["stray.safetensors"], "auto", "pytorch"),
        (["model.gguf", "adapter_model.safetensors"], "auto", "pytorch"),
        ([WEIGHTS], "auto", "safetensors"),
        ([WEIGHTS], "pytorch", "pytorch"),
        (["other.safetensors"], "safetensors", "safetensors"),
    ],
)
def test_the_weights_are_those_that_transformers_reads(
    folder: Path, others: list[str], load_format: str, kind: str
) -> None:
    """A GGUF file counts only where there are no other weights, and unnamed safetensors only without a .bin."""
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).unlink()
    for name in others:
        (folder / name).write_bytes(content if name in (WEIGHTS, "other.safetensors") else b"stray")
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder), load_format=load_format))
    assert checkpoint.format == kind and [file.suffix for file in files_of(checkpoint)] == [
        ".bin" if kind == "pytorch" else ".safetensors"
    ]
    load(folder, load_format=load_format)  # fails for strays


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
    with pytest.raises(ConfigError, match=r"model\.load_format=pickle: must be 'auto', 'safetensors', 'pytorch'"):
        load(folder, load_format="pickle")
    words = {"load_format": "pickle", "implementation": "vllm", "generation_config": "vllm"}
    with pytest.raises(ConfigError) as caught:
        resolve_checkpoint(ModelConfig(path="./absent", **words))
    assert [problem.partition(": must be ")[0] for problem in caught.value.problems] == [
        f"model.{name}={word}" for name, word in words.items()
    ]
    with pytest.raises(ConfigError, match=r"0 \.gguf files here"):
        load(folder, load_format="gguf")
    with pytest.raises(ConfigError, match="must be a folder"):
        load(folder / WEIGHTS)
