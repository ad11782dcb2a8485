"""Weight files that contradict each other are read as transformers reads them, or refused."""

from __future__ import annotations

import gc
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from evalengine.config.schema import ModelConfig
from evalengine.engine.load import shards
from evalengine.engine.load.loader import load_model, resolve_checkpoint, weights_fingerprint
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from tests.engine.hf_folders import IDS, edit, engine_logits, tiny_llama

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PYTORCH = "pytorch_model.bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny Llama."""
    return tiny_llama(tmp_path / "tiny")


def transformers_logits(folder: Path) -> Tensor:
    """The logits that transformers computes for IDS with the folder's model."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def save_shards(folder: Path, shards: dict[str, list[str]], weight_map: dict[str, str] | None = None) -> None:
    """Saves the folder's tensors into these files. Without a `weight_map`, the index gives each tensor to the first
    file that has it."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    places: dict[str, str] = {}
    for file, names in shards.items():
        save_file({name: tensors[name] + len(places) for name in names}, folder / file)
        places = {**dict.fromkeys(names, file), **places}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map or places}))


def halves(folder: Path) -> tuple[list[str], list[str]]:
    """The names of the folder's tensors, as two lists of every other name."""
    names = sorted(load_file(folder / SINGLE))
    return names[::2], names[1::2]


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    first, second = halves(folder)
    save_shards(folder, {"a.safetensors": first, "b.safetensors": [*second, first[0]]})
    with pytest.raises(EvalEngineError, match=f"{first[0]} is in a.safetensors and in b.safetensors"):
        engine_logits(folder)


def test_a_tensor_in_two_files_without_an_index_is_refused(folder: Path) -> None:
    first, second = halves(folder)
    save_shards(folder, {"a.safetensors": first, "b.safetensors": [*second, first[0]]})
    (folder / INDEX).unlink()
    with pytest.raises(EvalEngineError, match=f"{first[0]} is in a.safetensors and in b.safetensors"):
        engine_logits(folder)


def test_a_whole_copy_under_another_name_is_refused(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "b.safetensors")
    with pytest.raises(EvalEngineError, match=r"is in a.safetensors and in b.safetensors.* and 13 more"):
        engine_logits(folder)


def test_an_index_that_its_shards_do_not_bear_out_is_refused(folder: Path) -> None:
    first, second = halves(folder)
    shards = {"a.safetensors": first, "b.safetensors": second}
    right = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(second, "b.safetensors")}
    save_shards(folder, shards, right)
    engine_logits(folder)

    def message(weight_map: dict[str, Any]) -> str:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(EvalEngineError) as caught:
            engine_logits(folder)
        return str(caught.value)

    wrong = message({**right, first[0]: "b.safetensors"})
    assert f"{first[0]} is in a.safetensors, and {INDEX} gives it to b.safetensors" in wrong
    assert f"{first[0]} is not in b.safetensors, where {INDEX} has it" in wrong
    assert "extra.weight is not in a.safetensors" in message({**right, "extra.weight": "a.safetensors"})
    unnamed = message({name: file for name, file in right.items() if name != first[0]})
    assert f"{first[0]} is in a.safetensors, and {INDEX} does not name it" in unnamed


@pytest.mark.parametrize(
    "name",
    [
        *("../tiny2/a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", ".", "a.bin", "a\0.safetensors"),
        *("\ud800.safetensors", "x" * 5000 + ".safetensors", 3, None, ["a.safetensors"], {"a": 1}),
    ],
)
def test_a_shard_is_a_plain_file_name(folder: Path, name: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    (folder / SINGLE).unlink()
    with pytest.raises(EvalEngineError, match=r"weight_map gives model.norm.weight to .*not the plain name") as caught:
        engine_logits(folder)
    str(caught.value).encode()  # The message can be printed: it is text in UTF-8.


def test_model_safetensors_comes_before_an_index(folder: Path) -> None:
    """As in transformers, an index is not looked at beside model.safetensors: it may be stale, from before a merge."""
    expected = engine_logits(folder)
    tensors = load_file(folder / SINGLE)
    stale = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(stale, folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")})
    )
    assert torch.equal(engine_logits(folder), expected)
    assert torch.allclose(transformers_logits(folder), expected, atol=1e-5)
    fingerprint = weights_fingerprint(resolve_checkpoint(ModelConfig(name="t", path=str(folder))))
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00001.safetensors").unlink()
    assert weights_fingerprint(resolve_checkpoint(ModelConfig(name="t", path=str(folder)))) == fingerprint


def test_a_checkpoint_spread_over_ranks_is_refused(folder: Path) -> None:
    """Files of a checkpoint spread over ranks, which transformers would read instead of model.safetensors, are
    refused."""
    (folder / "shard-00000-model-00001-of-00001.safetensors").write_bytes((folder / SINGLE).read_bytes())
    with pytest.raises(ConfigError, match="spread over ranks"):
        engine_logits(folder)


def test_a_name_twice_in_one_header_is_refused(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + size].rstrip()
    assert header.endswith(b"}")
    shadowed = b'{"model.norm.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' + header[1:]
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(shadowed)) + shadowed + content[8 + size :])
    with pytest.raises(EvalEngineError, match=r"model\.norm\.weight: twice in its header"):
        engine_logits(folder)


@pytest.mark.parametrize("file", [SINGLE, INDEX, "config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_pipe_is_refused_not_waited_for(folder: Path, file: str) -> None:
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(EvalEngineError, match=f"{file}: not a regular file"):
        engine_logits(folder)


@pytest.mark.parametrize("case", ["both", "equal", "head only", "embedding only", "nearly equal", "NaN"])
def test_a_tied_head_beside_another_is_what_transformers_makes_of_it(folder: Path, case: str) -> None:
    tensors = load_file(folder / SINGLE)
    embedding = tensors["model.embed_tokens.weight"]
    if case in ("equal", "nearly equal", "NaN"):
        tensors["lm_head.weight"] = embedding.clone()
    if case == "nearly equal":
        tensors["lm_head.weight"][22, 3] += 1e-7
    if case == "NaN":
        tensors["lm_head.weight"][22, 3] = embedding[22, 3] = torch.nan
    if case in ("head only", "embedding only"):
        del tensors["model.embed_tokens.weight" if case == "head only" else "lm_head.weight"]
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    edit(folder, tie_word_embeddings=True)
    actual, expected = engine_logits(folder), transformers_logits(folder)
    assert torch.allclose(actual, expected, atol=1e-5, equal_nan=True)
    tied = resolve_checkpoint(ModelConfig(name="t", path=str(folder))).spec.tie_word_embeddings
    assert tied is (case in ("equal", "head only", "embedding only"))


def test_a_head_of_another_shape_does_not_fit(folder: Path) -> None:
    save_file({**load_file(folder / SINGLE), "lm_head.weight": torch.zeros(22, 16)}, folder / SINGLE)
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(EvalEngineError, match=r"lm_head.weight is float32 \[22, 16\], expected \[23, 16\]"):
        engine_logits(folder)


def test_packed_weights_do_not_fit(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / SINGLE)
    with pytest.raises(EvalEngineError, match=r"model.norm.weight is F8_E4M3 \[16\], expected"):
        engine_logits(folder)


def as_pytorch(folder: Path, **options: Any) -> dict[str, Tensor]:
    """Saves the folder's weights as one PyTorch file instead, with options of `torch.save`; returns them."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    torch.save(tensors, folder / PYTORCH, **options)
    return tensors


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pytorch_file_has_the_logits_of_safetensors(folder: Path, zipped: bool) -> None:
    expected, model = engine_logits(folder), ModelConfig(name="t", path=str(folder))
    before = weights_fingerprint(resolve_checkpoint(model))
    tensors = as_pytorch(folder, _use_new_zipfile_serialization=zipped)
    assert torch.equal(engine_logits(folder), expected)
    checkpoint = resolve_checkpoint(model)
    assert checkpoint.format == "pytorch" and weights_fingerprint(checkpoint) != before
    tensors["model.norm.weight"] += 1
    torch.save(tensors, folder / PYTORCH)
    with pytest.raises(EvalEngineError, match="have changed since the model was found"):
        load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 64)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / SINGLE)
    assert resolve_checkpoint(model).format == "safetensors", "which is read first, as in transformers"


def test_sharded_pytorch_files_and_shared_tensors_load(folder: Path) -> None:
    edit(folder, tie_word_embeddings=True)
    tensors = load_file(folder / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / SINGLE)
    expected = engine_logits(folder)
    (folder / SINGLE).unlink()
    strided = {name: tensor.t().contiguous().t() for name, tensor in tensors.items() if tensor.ndim == 2}
    strided["lm_head.weight"] = strided["model.embed_tokens.weight"]
    places = {}
    for i in range(2):
        file = f"pytorch_model-0000{i + 1}-of-00002.bin"
        part = [name for name in tensors if ("embed" in name or "lm_head" in name) == bool(i)]
        torch.save({name: torch.nn.Parameter(strided.get(name, tensors[name])) for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / f"{PYTORCH}.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(engine_logits(folder), expected)
    (folder / f"{PYTORCH}.index.json").write_text(json.dumps({"weight_map": {**places, "x": "../x.bin"}}))
    with pytest.raises(EvalEngineError, match=r"not the plain name of a \.bin file"):
        engine_logits(folder)


def test_pytorch_files_are_unpickled_once_in_each_step_and_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of an adapter with several tensors, and a legacy file, which is read whole."""
    edit(folder, tie_word_embeddings=True)
    tensors = load_file(folder / SINGLE)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / SINGLE)
    as_pytorch(folder, _use_new_zipfile_serialization=False)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.model.layers"
    lora = {f"{prefix}.{i}.self_attn.o_proj.lora_{m}.weight": torch.ones(2, 16) for i in range(2) for m in "AB"}
    lora = {name: tensor.t().contiguous() if "lora_B" in name else tensor for name, tensor in lora.items()}
    torch.save(lora, adapter / "adapter_model.bin")
    opened, real = [], torch.load

    def counted(file: Path, **options: Any) -> Any:
        opened.append(file.name)
        return real(file, **options)

    def files_in_memory() -> int:
        gc.collect()
        return sum(isinstance(item, shards._PyTorchFile) for item in gc.get_objects())

    monkeypatch.setattr(torch, "load", counted)
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder), adapter=str(adapter)))
    assert sorted(opened) == ["adapter_model.bin", PYTORCH] and not files_in_memory()
    assert load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 64)
    assert sorted(opened[2:]) == ["adapter_model.bin", PYTORCH] and not files_in_memory()


class _Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": _Hostile()}, "Python objects other than tensors, which are not loaded.*convert the checkpoint"),
        ({"state_dict": {"a": torch.ones(1)}}, "state_dict is dict, not a tensor"),
        ([torch.ones(1)], "has a list, not tensors by their names"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a is not a dense tensor"),
        ({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "a is not a dense tensor"),
        ({"a": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}, "a is not a dense tensor"),
        ({1: torch.ones(1)}, "has the key 1 of type int, not a tensor's name"),
        ({}, "has no tensors"),
        (torch.jit.script(torch.nn.Identity()), "Python objects other than tensors"),
        (None, "damaged or truncated PyTorch file"),
        (b"PK\x03\x04 garbage", "damaged"),
        (b"\x80\x02}q\x00(X\x01\x00\x00\x00aK\x01u.", "damaged"),
        (b"", r"pytorch_model.bin: empty file; download"),
    ],
)
def test_a_pytorch_file_of_anything_else_is_refused_and_runs_no_code(
    folder: Path, content: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    as_pytorch(folder)
    if content is None:
        whole = (folder / PYTORCH).read_bytes()
        (folder / PYTORCH).write_bytes(whole[: len(whole) // 2])
    elif isinstance(content, torch.jit.ScriptModule):
        content.save(folder / PYTORCH)
    elif isinstance(content, bytes):
        (folder / PYTORCH).write_bytes(content)
    else:
        torch.save(content, folder / PYTORCH)
    with pytest.raises(EvalEngineError, match=words) as caught:
        engine_logits(folder)
    assert not (folder / "ran").exists()
    assert "weights_only" not in str(caught.value), "torch's advice to run the file's code"
