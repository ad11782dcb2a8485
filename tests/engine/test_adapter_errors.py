"""LoRA adapters that are rejected, each with a message that names what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.adapter import CONFIG, Parameters, resolve_adapter, with_adapter
from evalengine.engine.load.shards import stored_tensors
from evalengine.errors import ConfigError, EvalEngineError
from tests.engine.hf_folders import tiny_llama
from tests.engine.test_adapter import (
    EMBEDDING,
    HEAD,
    OF_Q,
    ON_Q,
    PLAIN,
    PREFIX,
    Q_PROJ,
    WEIGHTS,
    found,
    logits,
    written,
)  # fmt: skip
from tests.engine.tied_folder import tied_qwen3


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Llama whose head is its own."""
    tiny_llama(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3': only LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS': only CAUSAL_LM"),
        *(({name: True}, f"{name}=True: not supported") for name in ("use_dora", "lora_bias", "use_qalora")),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"trainable_token_indices": [3]}, "trainable_token_indices="),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters="),
        ({"megatron_config": {"a": 1}}, "megatron_config="),
        ({"ensure_weight_tying": True}, "ensure_weight_tying=True"),
        ({"some_new_method": {"x": 1}}, "some_new_method="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': PEFT changes the base weights"),
        ({"bias": "some"}, "bias='some': must be none, all or lora_only"),
        ({"r": 0, "use_rslora": "no"}, "use_rslora='no': must be .*r=0: must be an integer"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern: q_proj=1.5: must be an integer"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern: '\\(' is no regular expression"),
        ({"lora_alpha": math.nan}, "lora_alpha=nan: must be a number"),
        ({"target_modules": 3}, "target_modules=3: must be a list of names or a pattern"),
        ({"target_modules": "["}, "target_modules: '\\[' is no regular expression"),
        ({"modules_to_save": "lm_head"}, "modules_to_save='lm_head': must be a list of names"),
        ({"layers_to_transform": "1"}, "layers_to_transform='1': must be a number"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, r"rank_pattern: '\(\?i\)q_proj' is no regular expression"),
        ({"alpha_pattern": {"(?i)q_proj": 4}}, r"alpha_pattern: '\(\?i\)q_proj' is no regular expression"),
        ({"layers_pattern": "(?i)layers"}, r"layers_pattern: '\(\?i\)layers' is no regular expression"),
        ({"layers_pattern": ["(?P<index>layers)"]}, r"layers_pattern: .*index.* is no regular expression"),
    ],
)
def test_a_configuration_that_is_not_supported_is_named(
    base: Path, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    written(tmp_path / "a", base, {}, **{**OF_Q, **fields})
    with pytest.raises(ConfigError, match=f"(?s)model.adapter={tmp_path / 'a'}: {CONFIG}: {words}"):
        found(base, tmp_path / "a")


@pytest.mark.parametrize("layer", ["1", "9" * 5000])
def test_a_layer_without_a_number_is_not_selected(base: Path, tmp_path: Path, layer: str) -> None:
    fields = {**OF_Q, "layers_to_transform": [1], "layers_pattern": "layers|h" if layer == "1" else "layers"}
    adapter = with_modules(tmp_path / "a", [f"model.layers.{layer}.self_attn.q_proj"], **fields)
    with pytest.raises(EvalEngineError, match=f"is of a module that {CONFIG} does not select"):
        found(base, adapter)


Q_A = f"{PREFIX}{Q_PROJ[0]}.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({Q_A: None}, r"needs lora_A and lora_B, not B"),
        ({Q_A: torch.ones(5, 16)}, r"lora_A.weight is \[5, 16\], expected \[4, 16\]"),
        ({Q_A: torch.full((4, 16), torch.nan)}, "lora_A.weight has an infinity or a NaN"),
        ({Q_A: torch.ones(4, 16, dtype=torch.int8)}, "lora_A.weight is I8, not one of"),
        ({"model.norm.weight": torch.ones(16)}, "model.norm.weight does not begin with base_model.model."),
        ({f"{PREFIX}model.norm.weight": torch.ones(16)}, "norm.weight is not LoRA's, and its module"),
        ({f"{PREFIX}{Q_PROJ[0]}.lora_magnitude_vector": torch.ones(16)}, "magnitude_vector is not LoRA's"),
        ({f"{PREFIX}lm_head.weight": torch.ones(24, 16)}, r"is \[24, 16\], and the model's \[23, 16\]"),
        (
            {f"{PREFIX}{Q_PROJ[0].replace('q_', 'k_')}.lora_A.weight": torch.ones(4, 16)}
            | {f"{PREFIX}{Q_PROJ[0].replace('q_', 'k_')}.lora_B.weight": torch.ones(8, 4)},
            f"is of a module that {CONFIG} does not select",
        ),
        (
            {f"{PREFIX}{part}.weight": torch.ones(23, 16) for part in (HEAD, f"{HEAD}.modules_to_save")},
            "are one weight",
        ),
        (
            {f"{PREFIX}model.layers.1.cross.q_proj.lora_A.weight": torch.ones(4, 16)}
            | {f"{PREFIX}model.layers.1.cross.q_proj.lora_B.weight": torch.ones(16, 4)},
            r"changes model.layers.1.cross.q_proj.weight, which the model does not have",
        ),
        (
            dict.fromkeys(
                [Q_A.replace("layers.0", "layers.1"), Q_A.replace("layers.0", "layers.1").replace("_A", "_B")]
            ),
            f"no lora_A and lora_B for {Q_PROJ[1]}, which {CONFIG} selects",
        ),
    ],
)
def test_every_tensor_must_be_used(base: Path, tmp_path: Path, change: dict[str, Tensor | None], words: str) -> None:
    adapter = tmp_path / "a"
    written(adapter, base, ON_Q, **OF_Q)
    tensors: dict[str, Tensor | None] = {**load_file(adapter / WEIGHTS), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, adapter / WEIGHTS)
    with pytest.raises(EvalEngineError, match=words):
        logits(found(base, adapter))


def test_what_no_adapter_is_merged_into(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tmp_path / "a"
    written(adapter, base, ON_Q, **OF_Q)
    with pytest.raises(ConfigError, match="loaded with dummy weights; an adapter needs the safetensors"):
        found(base, adapter, load_format="dummy")
    with pytest.raises(ConfigError, match=r"it has an adapter and no model; set model\.adapter="):
        found(adapter)
    with pytest.raises(ConfigError, match=r"model\.adapter=.*: no adapter_config\.json there"):
        found(base, base)
    with pytest.raises(ConfigError, match="adapter_revision: set without"):
        found(base, adapter_revision="abc")
    packed = {name: replace(tensor, method="scaled", packing="fp8") for name, tensor in stored_tensors(base).items()}
    resolved = resolve_adapter(ModelConfig(path=str(base), adapter=str(adapter)))
    with pytest.raises(ConfigError, match=r"q_proj\.lora_A\.weight changes a packed weight \(fp8\); set model\.path"):
        with_adapter(packed, resolved, Parameters(key=str, foreign=lambda name: None))
    calls = []

    def snapshot(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options["revision"], *options["allow_patterns"]))
        return str(adapter)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    hub = found(base, Path("some/lora"), adapter_revision="abc").adapter
    assert hub is not None and (hub.source, hub.revision) == ("some/lora", "a")
    assert calls == [("some/lora", "abc", CONFIG, WEIGHTS, "adapter_model.bin", "tokenizer_config.json")]


def with_modules(folder: Path, modules: list[str], **fields: Any) -> Path:
    """An adapter with LoRA for modules of any model."""
    written(folder, folder.parent / "llama", {}, **fields)
    parts = {f"{PREFIX}{module}.lora_{{}}.weight": module for module in modules}
    a, b = torch.ones(4, 16), torch.ones(16, 4)
    save_file({name.format(m): x.clone() for name in parts for m, x in (("A", a), ("B", b))}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize(
    ("modules", "targets", "skipped"),
    [
        (["transformer.h.0.attn.c_attn"], ["c_attn"], "transformer"),
        (["model.vision_tower.layers.0.self_attn.q_proj"], r".*vision_tower.*q_proj", "model.vision_tower"),
        (["model.vision_tower.layers.0.self_attn.q_proj"], "all-linear", "model.vision_tower"),
        ([], "all-linear", ""),
    ],
)
def test_an_adapter_that_changes_nothing(
    base: Path, tmp_path: Path, modules: list[str], targets: list[str] | str, skipped: str, implementation: str
) -> None:
    adapter = with_modules(tmp_path / "a", modules, target_modules=targets)
    words = f"changes the model{f': the model does not have {skipped}' * bool(skipped)}. Set model.path to"
    with pytest.raises(EvalEngineError, match=words):
        logits(found(base, adapter, implementation=implementation))


def test_an_adapter_of_the_text_model_in_a_wrapper(base: Path, tmp_path: Path) -> None:
    adapter = with_modules(
        tmp_path / "a", ["model.language_model.layers.0.self_attn.q_proj"], target_modules="all-linear"
    )
    with pytest.raises(EvalEngineError, match="which the model does not have"):
        found(base, adapter)


def test_the_base_folder_has_another_adapter(base: Path, tmp_path: Path) -> None:
    written(base, base, ON_Q, **OF_Q)
    written(tmp_path / "a", base, {Q_PROJ[0]: (4, PLAIN)}, target_modules=[Q_PROJ[0]])
    for adapter in (None, tmp_path / "a"):
        with pytest.raises(ConfigError, match="an adapter belongs to these weights, which would be left out"):
            found(base, adapter)
    (tmp_path / "link").symlink_to(base)
    assert torch.equal(logits(found(base, tmp_path / "link")), logits(found(base, base)))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_an_adapter_that_overflows(base: Path, tmp_path: Path, implementation: str) -> None:
    written(tmp_path / "a", base, {Q_PROJ[0]: (4, PLAIN)}, target_modules=[Q_PROJ[0]])
    tensors = {name: tensor * 1e25 for name, tensor in load_file(tmp_path / "a" / WEIGHTS).items()}
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    with pytest.raises(EvalEngineError, match=rf"{Q_PROJ[0]}\.weight has an infinity or a NaN with .*q_proj\.lora_A"):
        logits(found(base, tmp_path / "a", implementation=implementation))


def test_a_saved_head_does_not_stand_for_skipped_layers(base: Path, tmp_path: Path) -> None:
    fields = {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}
    adapter = with_modules(tmp_path / "a", ["model.vision_tower.layers.0.self_attn.q_proj"], **fields)
    head = {f"{PREFIX}lm_head.weight": torch.ones(23, 16)}
    save_file({**load_file(adapter / WEIGHTS), **head}, adapter / WEIGHTS)
    with pytest.raises(EvalEngineError, match=r"the model does not have model\.vision_tower"):
        found(base, adapter)


def test_a_pattern_selects_modules_that_must_be_there(base: Path, tmp_path: Path) -> None:
    written(tmp_path / "a", base, {Q_PROJ[0]: (4, PLAIN)}, target_modules=r".*\.(q_proj|v_proj)")
    with pytest.raises(EvalEngineError) as error:
        found(base, tmp_path / "a")
    for module in ("0.self_attn.v_proj", "1.self_attn.q_proj", "1.self_attn.v_proj"):
        assert f"no lora_A and lora_B for model.layers.{module}, which" in str(error.value)


@pytest.mark.parametrize(
    ("kept", "fields", "words"),
    [
        ((), {"modules_to_save": ["lm_head"]}, r"no lm_head\.weight, which is in modules_to_save"),
        ((), {"modules_to_save": ["embed_tokens"]}, r"no model\.embed_tokens\.weight, which is in modules_to_save"),
        ((), {"target_modules": ["q_proj", "lm_head"]}, "no lora_A and lora_B for lm_head, which"),
        ((EMBEDDING,), {"modules_to_save": ["lm_head"]}, r"no lm_head\.weight, which is in modules_to_save"),
        ((EMBEDDING,), {"target_modules": ["q_proj", "lm_head"]}, "no lora_A and lora_B for lm_head, which"),
    ],
)
@pytest.mark.parametrize("only_head", [False, True])
def test_a_tied_model_has_both_tables(
    tmp_path: Path, kept: tuple[str, ...], fields: dict[str, Any], words: str, only_head: bool
) -> None:
    tied_qwen3(tmp_path / "qwen3")
    written(tmp_path / "a", tmp_path / "qwen3", ON_Q, tuple(f"{name}.weight" for name in kept), **{**OF_Q, **fields})
    if only_head:
        tensors = load_file(tmp_path / "qwen3" / "model.safetensors")
        tensors[f"{HEAD}.weight"] = tensors.pop(f"{EMBEDDING}.weight")
        save_file(tensors, tmp_path / "qwen3" / "model.safetensors")
    with pytest.raises(EvalEngineError, match=words):
        found(tmp_path / "qwen3", tmp_path / "a")
