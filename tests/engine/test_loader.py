"""Reading checkpoints: shards, what does not fit, dummy weights, fingerprints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import load_model, resolve_checkpoint, weights_fingerprint
from evalengine.engine.load.shards import MAX_NAMES
from evalengine.engine.load.weights import DUMMY_STD, HASHED_AT_ONCE, ON_GPU, dummy_tensors
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from evalengine.models.decoder import DecoderForCausalLM
from tests.engine.tied_folder import WEIGHTS, load, shard, tied_qwen3
from tests.parity.paged import PagedRunner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny tied Qwen3."""
    return tied_qwen3(tmp_path / "tiny")


def logits(model: DecoderForCausalLM) -> Tensor:
    """The model's logits for six fixed tokens, in one step."""
    return PagedRunner(model).step({"s": [3, 1, 4, 1, 5, 9]})["s"]


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets values in the folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


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
    tensors["model.layers.1.extra"] = torch.zeros(1)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(EvalEngineError) as caught:
        load(folder)
    text = str(caught.value)
    assert "missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight;" in text
    assert "unexpected: model.layers.1.extra;" in text
    assert "up_proj.weight is float32 [24, 15], expected [24, 16]" in text and "down_proj.weight is I8" in text


FOREIGN = {  # a tensor of a module that the model does not have -> the module
    "model.layers.2.eh_proj.weight": "model.layers.2",
    "model.layers.2.self_attn.q_proj.weight": "model.layers.2",
    "model.mtp_emb_norm.0.weight": "model.mtp_emb_norm",
    "v_head.summary.weight": "v_head",
    "mtp.layers.0.self_attn.q_proj.weight": "mtp",
    "mtp.norm.weight": "mtp",
    "visual.blocks.0.attn.qkv.bias": "visual",
    "model.vision_tower.encoder.layers.0.norm1.weight": "model.vision_tower",
    "multi_modal_projector.mm_input_projection_weight": "multi_modal_projector",
}
OWN = (
    *("model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.sinks", "model.layers.1.mlp.norm.0.weight"),
    *("model.layers.0.self_attn.k_proj.weight_scale", "model.layers.1.mtp.fc.weight", "model.norm.bias"),
    *("model.embed_norm.weight", "lm_head.bias", "lm_head.lora_A.weight", "model.scale", "score.weight"),
)
UNKNOWN = (  # may be ops of a model that the folder's configuration does not describe
    *("model.embed_norm.gamma", "model.embed_norm.scale", "model.embed_norm.norm.weight", "final_norm.ln.weight"),
    *("model.embed_projection.0.weight", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
    *("model.layers.2.self_attn.q_proj.weight", "model.layers.00.mlp.w.weight", "model.layers.-1.mlp.w.weight"),
)


def test_tensors_of_modules_that_the_model_lacks_are_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(load(folder))
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, **{name: torch.ones(2) for name in FOREIGN}}, folder / WEIGHTS)
    assert torch.equal(logits(load(folder)), expected)
    (warning,) = caplog.messages
    counts = {module: [*FOREIGN.values()].count(module) for module in FOREIGN.values()}
    assert "skipped tensors of modules that the model does not have" in warning
    assert all(f"{module}.* ({count})" in warning for module, count in counts.items())


def test_tensors_that_may_be_of_the_model_are_not_skipped(folder: Path) -> None:
    save_file({**load_file(folder / WEIGHTS), **{name: torch.ones(2) for name in OWN}}, folder / WEIGHTS)
    with pytest.raises(EvalEngineError, match="unexpected: ") as caught:
        load(folder)
    assert all(name in str(caught.value) for name in sorted(OWN)[:MAX_NAMES])
    assert f"and {len(OWN) - MAX_NAMES} more" in str(caught.value)


@pytest.mark.parametrize("name", UNKNOWN)
def test_tensors_that_may_change_the_numbers_are_not_skipped(folder: Path, name: str) -> None:
    """Also those of a layer after the last, unless it predicts further tokens: the configuration may lack a layer."""
    save_file({**load_file(folder / WEIGHTS), name: torch.ones(2)}, folder / WEIGHTS)
    with pytest.raises(EvalEngineError, match=f"unexpected: {name}"):
        load(folder)


PACKED = {"hidden_act": "gelu", "quantization_config": {"quant_method": "awq"}, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "model architecture Qwen3ForSequenceClassification is"),
        ({"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}, "model type baichuan is"),
        ({"model_type": "not-in-transformers", "auto_map": {"AutoConfig": "m.C"}}, "model type not-in-transformers is"),
        ({"model_type": "openelm", "num_attention_heads": [2, 3], "architectures": None}, "model type openelm is"),
        ({"model_type": "baichuan"}, "model type baichuan is"),  # Its class name is a known one.
    ],
)
def test_an_unknown_model_hides_nothing_else(folder: Path, changes: dict[str, Any], unknown: str) -> None:
    """An unknown architecture is refused, and so, in the same message, is all else that is not supported."""
    edit_config(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    (problem,) = caught.value.problems
    assert problem.startswith(f"model.path={folder}: {unknown} not supported; supported: ")
    assert "LlamaForCausalLM (llama)" in problem
    rope = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}
    edit_config(folder, **PACKED, mlp_bias=True, rope_parameters=rope)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    unknown_model, *other_problems = caught.value.problems
    words = ["dynamic", "quantization_config", "hidden_act='gelu'", "mlp_bias"]
    if "model_type" in changes:  # A Qwen3's layers may see a window.
        words.append("sliding window")
    assert unknown_model == problem and len(other_problems) == len(words)
    text = "\n".join(other_problems)
    assert all(word in text for word in words)
    assert text.count(f"model.path={folder}: ") == len(words)


def test_a_known_model_lists_all_that_it_lacks(folder: Path) -> None:
    edit_config(folder, **PACKED, num_key_value_heads=3)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert len(caught.value.problems) == 3 and "num_key_value_heads=3" in str(caught.value)
    assert all(p.startswith(f"model.path={folder}: Qwen3ForCausalLM: ") for p in caught.value.problems)


def test_dummy_weights_are_seeded_by_name_and_need_neither_weights_nor_tokenizer(folder: Path) -> None:
    bare = folder / "config.json"
    for file in folder.iterdir():
        if file != bare:
            file.unlink()
    first, second = load(folder, load_format="dummy"), load(bare, load_format="dummy")
    assert torch.equal(logits(first), logits(second))
    table = first.model.embed_tokens.weight
    # Dummy weights are hashes in integer arithmetic, scaled, so that every machine has these values.
    assert [x.hex() for x in table[0, :2].tolist()] == ["0x1.bc54860000000p-6", "0x1.89cae60000000p-8"]
    assert abs(float(table.std()) - 0.02) < 0.003 and not torch.equal(
        table[:16], first.model.norm.weight.expand(16, 16)
    )
    assert (first.model.norm.weight == 1).all()
    checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(folder), load_format="dummy"))
    assert checkpoint.tokenizer is None and checkpoint.format == "dummy"
    shallower = dataclasses.replace(checkpoint, spec=dataclasses.replace(checkpoint.spec, num_layers=1))
    assert weights_fingerprint(checkpoint) != weights_fingerprint(shallower)


def test_dummy_weights_look_random_across_the_parts_they_are_made_in() -> None:
    shape = (2 * HASHED_AT_ONCE + 5,)
    tensors = dict(dummy_tensors({"a.weight": shape, "b.weight": shape}, torch.device("cpu")))
    a, b = tensors["a.weight"] / DUMMY_STD, tensors["b.weight"] / DUMMY_STD
    assert abs(float(a.mean())) < 0.01 and abs(float(a.std()) - 1) < 0.01
    assert abs(float((a * b).mean())) < 0.01, "tensors are unlike each other"
    norms = dict(dummy_tensors({"norm.weight": (3,), "q_norm.11.weight": (3,)}, torch.device("cpu")))
    assert all(torch.equal(weight, torch.ones(3)) for weight in norms.values())
    for shift in (1, 2, 4096, HASHED_AT_ONCE):
        assert abs(float((a[shift:] * a[:-shift]).mean())) < 0.01, f"a repeats itself at {shift}"


@pytest.mark.gpu
def test_dummy_weights_are_the_same_on_the_gpu() -> None:
    shapes = {"a.weight": (2 * ON_GPU * HASHED_AT_ONCE + 5,), "norm.weight": (7,)}
    on_cpu, on_cuda = (dict(dummy_tensors(shapes, torch.device(device))) for device in ("cpu", "cuda"))
    assert all(torch.equal(on_cpu[name], on_cuda[name].cpu()) for name in shapes)


def test_fingerprint_sees_contents_and_names_of_weight_files_only(folder: Path) -> None:
    def fingerprint() -> str:
        return weights_fingerprint(resolve_checkpoint(ModelConfig(name="t", path=str(folder))))

    fingerprints = [fingerprint()]
    (folder / "README.md").write_text("not a weight")
    assert fingerprint() == fingerprints[0] and len(fingerprints[0]) == 64
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, folder / WEIGHTS)
    fingerprints.append(fingerprint())
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    fingerprints.append(fingerprint())
    assert len(set(fingerprints)) == 3


def test_files_that_changed_are_neither_loaded_nor_hashed_as_the_ones_that_were_found(folder: Path) -> None:
    """A training saves its next step into the folder: no run may name those weights, or load them under this name."""
    model = ModelConfig(name="t", path=str(folder))
    before, hashed = resolve_checkpoint(model), resolve_checkpoint(model)
    known = weights_fingerprint(hashed)
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][3] += 1.0
    save_file(tensors, folder / "next")
    (folder / "next").replace(folder / WEIGHTS)
    with pytest.raises(EvalEngineError, match="have changed since the model was found"):
        weights_fingerprint(before)
    assert weights_fingerprint(hashed) == known, "the hash of what is in memory, if it was loaded meanwhile"
    with pytest.raises(EvalEngineError, match="have changed since the model was found"):
        load_model(hashed, create_ops("exact", torch.float32, torch.device("cpu")), 64)
    assert weights_fingerprint(resolve_checkpoint(model)) != known
    (folder / WEIGHTS).rename(folder / "gone")
    with pytest.raises(EvalEngineError, match="have changed"):
        weights_fingerprint(before)
