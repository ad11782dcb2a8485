"""LoRA adapters (`model.adapter`): merged by the formula, of the run's identity, or rejected by name.

Adapters are written here as PEFT writes them. Merged weights are expected in float64, by the formula. Every case of
`CASES` had the logits of PEFT 0.21.2's unmerged model.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from evalengine.config.check import complete_model
from evalengine.config.schema import ModelConfig
from evalengine.engine.load.adapter import CONFIG, resolve_adapter
from evalengine.engine.load.hf_folder import folder_spec
from evalengine.engine.load.loader import Checkpoint, load_model, resolve_checkpoint, weights_fingerprint
from evalengine.engine.load.module_weights import _adapted
from evalengine.engine.load.shards import read_tensors, stored_tensors
from evalengine.engine.loaded_model import _model_config
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from evalengine.layers.parallel import TensorParallel
from tests.engine.hf_folders import IDS, edit, tiny_llama
from tests.engine.tied_folder import tied_qwen3
from tests.parity.paged import PagedRunner

CPU = torch.device("cpu")
WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."
ATTENTION = [f"model.layers.{i}.self_attn" for i in range(2)]
Q_PROJ = [f"{attention}.q_proj" for attention in ATTENTION]
EMBEDDING, HEAD, NORM = "model.embed_tokens", "lm_head", "model.layers.1.input_layernorm"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama whose head is its own, and a tied Qwen3."""
    root = tmp_path_factory.mktemp("bases")
    tiny_llama(root / "llama")
    tied_qwen3(root / "qwen3")
    return root


@pytest.fixture
def base(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "llama", tmp_path / "llama"))


def written(
    folder: Path, base: Path, adapted: dict[str, tuple[int, float]], kept: tuple[str, ...] = (), **fields: Any
) -> dict[str, Tensor]:
    """Write an adapter; return the base's weights merged with it, float64 rounded to float32.

    adapted: module -> its rank and scale. kept: parameters that the adapter replaces. fields: of its configuration.
    """
    folder.mkdir(exist_ok=True)
    weights = {name: tensor.double() for name, tensor in load_file(base / "model.safetensors").items()}
    weights.setdefault(f"{HEAD}.weight", weights[f"{EMBEDDING}.weight"])
    generator, tensors = torch.Generator().manual_seed(0), {}
    merged = dict(weights)
    for name in kept:
        tensors[name] = merged[name] = torch.randn(weights[name].shape, generator=generator)
    for module, (rank, scale) in adapted.items():
        n, k = weights[f"{module}.weight"].shape
        rows, columns = (k, n) if module == EMBEDDING else (n, k)
        a, b = torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)
        a, b = a * 0.2, b * 0.2
        name = f"{module}.lora_embedding_{{}}" if module == EMBEDDING else f"{module}.lora_{{}}.weight"
        tensors |= {name.format("A"): a, name.format("B"): b}
        delta = scale * (b.double() @ a.double())
        merged[f"{module}.weight"] = merged[f"{module}.weight"] + (delta.t() if module == EMBEDDING else delta)
    save_file({PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "bias": "none", **fields}
    (folder / CONFIG).write_text(json.dumps(config))
    return {name: tensor.float() for name, tensor in merged.items()}


def found(base: Path, adapter: Path | None = None, **settings: Any) -> Checkpoint:
    return resolve_checkpoint(ModelConfig(path=str(base), adapter=adapter and str(adapter), **settings))


def logits(checkpoint: Checkpoint) -> Tensor:
    return PagedRunner(load_model(checkpoint, create_ops("exact", torch.float32, CPU), 64)).step({"s": IDS})["s"]


PLAIN = 6 / 4
ON_Q, OF_Q, ON_Q_1 = dict.fromkeys(Q_PROJ, (4, PLAIN)), {"target_modules": ["q_proj"]}, {Q_PROJ[1]: (4, PLAIN)}
# base, modules with rank and scale, replaced parameters, fields of adapter_config.json
CASES: dict[str, tuple[str, dict[str, tuple[int, float]], tuple[str, ...], dict[str, Any]]] = {
    "list": ("llama", ON_Q, (), {**OF_Q, "lora_dropout": 0.1}),
    "tied": ("qwen3", ON_Q, (), {**OF_Q, "fan_in_fan_out": True}),
    "patterns": (
        "llama",
        {Q_PROJ[0]: (4, 9 / 2), Q_PROJ[1]: (3, 6 / math.sqrt(3))}
        | {f"model.layers.{i}.mlp.down_proj": (2, 6 / math.sqrt(2)) for i in range(2)},
        (),
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "alpha_pattern": {"^model.layers.0.*q_proj": 9}}
        | {"rank_pattern": {"down_proj": 2, r"layers\.1\..*q_proj": 3}},
    ),
    "regex": ("llama", {f"{ATTENTION[1]}.o_proj": (4, PLAIN)}, (), {"target_modules": r".*layers\.1\..*o_proj"}),
    "layers": ("llama", ON_Q_1, (), {**OF_Q, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "excluded": ("llama", ON_Q_1, (), {**OF_Q, "exclude_modules": [Q_PROJ[0]]}),
    "all-linear": ("llama", {f"{ATTENTION[0]}.k_proj": (4, PLAIN)}, (), {"target_modules": "all-linear"}),
    "saved": (
        "llama", ON_Q, (f"{HEAD}.weight", f"{NORM}.weight"), {**OF_Q, "modules_to_save": ["lm_head", NORM]},
    ),
    "tied, head saved": ("qwen3", ON_Q, (f"{HEAD}.weight",), {**OF_Q, "modules_to_save": ["lm_head"]}),
    "tied, both saved": (
        "qwen3", ON_Q, (f"{HEAD}.weight", f"{EMBEDDING}.weight"),
        {**OF_Q, "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "embedding": ("llama", {EMBEDDING: (4, PLAIN)}, (), {"target_modules": ["embed_tokens"]}),
    "tied embedding": ("qwen3", {EMBEDDING: (4, PLAIN)}, (), {"target_modules": ["embed_tokens"]}),
    "tied head": ("qwen3", {HEAD: (4, PLAIN)}, (), {"target_modules": ["lm_head"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_merged_by_its_formula(case: str, saved: Path, tmp_path: Path) -> None:
    name, adapted, kept, fields = CASES[case]
    merged = written(tmp_path / "adapter", saved / name, adapted, kept, **fields)
    ours = logits(found(saved / name, tmp_path / "adapter"))
    assert not torch.equal(ours, logits(found(saved / name)))
    whole = Path(shutil.copytree(saved / name, tmp_path / "whole"))
    save_file(merged, whole / "model.safetensors", {"format": "pt"})
    assert torch.allclose(ours, logits(found(whole)), atol=1e-5)


@pytest.mark.parametrize("tables", ["one", "both", "untied"])
@pytest.mark.parametrize(("module", "other"), [(EMBEDDING, HEAD), (HEAD, EMBEDDING)])
def test_a_table_saved_next_to_lora(module: str, other: str, tables: str, saved: Path, tmp_path: Path) -> None:
    """PEFT loads it into the parameter that the tied tables share, and adds LoRA to one of them."""
    base = Path(shutil.copytree(saved / "qwen3", tmp_path / "base"))
    if tables == "untied":  # by a head with other values, as in transformers
        weights = load_file(base / "model.safetensors")
        save_file({**weights, f"{HEAD}.weight": weights[f"{EMBEDDING}.weight"] + 1}, base / "model.safetensors")
    kept = (f"{module}.weight", *[f"{other}.weight"] * (tables == "both"))
    merged = written(tmp_path / "a", base, {module: (4, PLAIN)}, kept, target_modules=[module.rpartition(".")[2]])
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    table = tensors[f"{PREFIX}{module}.base_layer.weight"] = tensors.pop(f"{PREFIX}{module}.weight")
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    if tables == "one":
        merged[f"{other}.weight"] = table
    whole = Path(shutil.copytree(base, tmp_path / "whole"))
    save_file(merged, whole / "model.safetensors")
    assert torch.allclose(logits(found(base, tmp_path / "a")), logits(found(whole)), atol=1e-5)


def test_biases_are_replaced(base: Path, tmp_path: Path) -> None:
    edit(base, attention_bias=True)
    sizes = {f"{attention}.{part}_proj.bias": 8 if part in "kv" else 16 for attention in ATTENTION for part in "qkvo"}
    zeros, adapter = {name: torch.zeros(size) for name, size in sizes.items()}, tmp_path / "a"
    save_file(load_file(base / "model.safetensors") | zeros, base / "model.safetensors")
    merged = written(adapter, base, {}, tuple(sizes), target_modules=[], bias="all")
    tensors = load_file(adapter / WEIGHTS)
    save_file({n.replace("q_proj.", "q_proj.base_layer."): t for n, t in tensors.items()}, adapter / WEIGHTS)
    ours = logits(found(base, adapter))
    save_file(merged, base / "model.safetensors")
    assert torch.equal(ours, logits(found(base)))
    for fields, words in (
        ({}, r"q_proj\.bias is not LoRA's, and its module is not in modules_to_save"),
        ({"modules_to_save": ["q_proj"]}, r"no model\.layers\.0\.self_attn\.q_proj\.weight, which is in modules_to"),
    ):
        written(adapter, base, {}, tuple(sizes), target_modules=[], **fields)
        with pytest.raises(EvalEngineError, match=words):
            logits(found(base, adapter))


def test_the_sum_is_rounded_once(base: Path, tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors")
    module = f"{ATTENTION[1]}.o_proj"
    merged = written(tmp_path / "a", base, {module: (4, PLAIN)}, target_modules=[module])[f"{module}.weight"]
    model = load_model(found(base, tmp_path / "a"), create_ops("fast", torch.bfloat16, CPU), 64)
    assert torch.equal(model.model.layers[1].self_attn.o_proj.prepared, merged.bfloat16())
    before = weights[f"{module}.weight"]
    assert not torch.equal((merged - before).bfloat16() + before, merged.bfloat16()), "rounded twice"


@pytest.mark.parametrize("level", ["exact", "fast"])  # which share this weight by rows and by columns
def test_ranks_have_their_parts_of_one_sum(level: str, base: Path, tmp_path: Path) -> None:
    module = f"{ATTENTION[0]}.o_proj"
    written(tmp_path / "a", base, {module: (4, PLAIN)}, target_modules=[module])
    checkpoint, weights = found(base, tmp_path / "a"), []
    for tp in (TensorParallel(), TensorParallel(0, 2, object()), TensorParallel(1, 2, object())):
        model = load_model(checkpoint, create_ops(level, torch.float32, CPU, tp=tp), 64)
        prepared = model.model.layers[0].self_attn.o_proj.prepared
        weights.append(prepared if level == "fast" else prepared.limb * prepared.scale[:, None])
    whole, *parts = weights
    assert torch.equal(torch.cat(parts, dim=1 if level == "fast" else 0), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["tied", "patterns", "tied embedding"])
def test_a_gpu_merges_the_cpus_bytes(case: str, saved: Path, tmp_path: Path) -> None:
    name, adapted, kept, fields = CASES[case]
    written(tmp_path / "a", saved / name, adapted, kept, **fields)
    adapter = tmp_path / "a"
    of_cpu, of_gpu, base = (
        _tables(found(saved / name, own), torch.device(device))
        for own, device in ((adapter, "cpu"), (adapter, "cuda"), (None, "cpu"))
    )
    assert of_cpu.keys() == of_gpu.keys()
    assert [key for key in of_cpu if not torch.equal(of_cpu[key], of_gpu[key])] == []
    assert [key for key in of_cpu if not torch.equal(of_cpu[key], base[key])], "the adapter changes some"


def _tables(checkpoint: Checkpoint, device: torch.device) -> dict[str, Tensor]:
    """The tables and linear layers' weights as they are loaded in bfloat16, on the CPU."""
    model = load_model(checkpoint, create_ops("fast", torch.bfloat16, device), 64)
    linear = {name: own.prepared for name, own in model.named_modules() if hasattr(own, "prepared")}
    return {name: weight.cpu() for name, weight in {**dict(model.named_parameters()), **linear}.items()}


def test_the_adapter_is_of_the_identity(base: Path, tmp_path: Path) -> None:
    written(tmp_path / "a", base, ON_Q, **OF_Q)
    model = ModelConfig(name="t", path=str(base), adapter=str(tmp_path / "a"))
    checkpoint = resolve_checkpoint(model)
    hashes = [weights_fingerprint(found(base)), weights_fingerprint(checkpoint)]
    written(tmp_path / "a", base, dict.fromkeys(Q_PROJ, (4, 2 * PLAIN)), target_modules=["q_proj"], lora_alpha=12)
    hashes.append(weights_fingerprint(resolve_checkpoint(model)))
    assert len({*hashes}) == 3
    with pytest.raises(EvalEngineError, match="have changed since the model was found"):
        logits(checkpoint)
    torch.save(load_file(tmp_path / "a" / WEIGHTS), tmp_path / "a" / "adapter_model.bin")
    before = logits(resolve_checkpoint(model))
    (tmp_path / "a" / WEIGHTS).unlink()
    assert torch.equal(logits(resolve_checkpoint(model)), before), "a PyTorch file has the same tensors"
    assert _model_config(checkpoint).adapter == model.adapter
    named = complete_model(ModelConfig(name="m", path="x", adapter="./runs/lora"), {"model.adapter"})
    assert (named.name, named.adapter) == ("m+lora", "./runs/lora")


def test_modules_that_the_model_lacks_are_skipped(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An adapter of a model of texts and images may change its vision tower, which no text needs."""
    written(tmp_path / "a", saved / "llama", ON_Q, **OF_Q)
    expected = logits(found(saved / "llama", tmp_path / "a"))
    of_images = {f"{PREFIX}model.vision_tower.layers.0.q_proj.lora_{m}.weight": torch.ones(4, 4) for m in "AB"}
    save_file({**load_file(tmp_path / "a" / WEIGHTS), **of_images}, tmp_path / "a" / WEIGHTS)
    assert torch.equal(logits(found(saved / "llama", tmp_path / "a")), expected)
    assert "model.vision_tower.* (2)" in caplog.text
    (tmp_path / "a" / "tokenizer_config.json").write_text("{}")
    found(saved / "llama", tmp_path / "a")
    assert "its tokenizer and chat template are not used, but the base model's, as in lm-eval" in caplog.text


def test_transformers_module_has_the_adapter(saved: Path, tmp_path: Path) -> None:
    base = saved / "llama"
    written(tmp_path / "a", base, ON_Q, (f"{NORM}.weight",),
            target_modules=["q_proj"], modules_to_save=[NORM])  # fmt: skip
    native, theirs = (logits(found(base, tmp_path / "a", implementation=name)) for name in ("native", "transformers"))
    assert torch.allclose(native, theirs, atol=1e-5)
    written(tmp_path / "b", saved / "qwen3", {EMBEDDING: (4, PLAIN)}, target_modules=["embed_tokens"])
    with pytest.raises(ConfigError, match=r"it changes model\.embed_tokens, which is tied to another table"):
        logits(found(saved / "qwen3", tmp_path / "b", implementation="transformers"))


def test_a_module_that_has_its_inputs_first(tmp_path: Path) -> None:
    """GPT-2's weights are [K, N], and old files lack the prefix `transformer.`."""
    base, adapter = tmp_path / "gpt2", tmp_path / "a"
    config = GPT2Config(vocab_size=23, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    save_file({n.removeprefix("transformer."): t for n, t in tensors.items()}, base / "model.safetensors")
    adapter.mkdir()
    a, b = torch.randn(4, 16) * 0.3, torch.randn(48, 4) * 0.3
    name = f"{PREFIX}transformer.h.0.attn.c_attn.lora_{{}}.weight"
    save_file({name.format("A"): a, name.format("B"): b}, adapter / WEIGHTS)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    (adapter / CONFIG).write_text(json.dumps(fields))
    stored = _adapted(stored_tensors(base), folder_spec(base, "", True).module or "", resolve_adapter(
        ModelConfig(path=str(base), adapter=str(adapter))))  # fmt: skip
    merged = dict(read_tensors(stored))["h.0.attn.c_attn.weight"].double()
    assert torch.allclose(
        merged, tensors["transformer.h.0.attn.c_attn.weight"].double() + (b.double() @ a.double()).t()
    )
