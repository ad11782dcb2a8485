"""Models whose FP8 weights ask for FP8 inputs: which layers quantise, by what, and equal bytes under every schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evalengine import LLM
from evalengine.config.schema import ModelConfig
from evalengine.engine.load.hf_folder import folder_spec
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from evalengine.layers.base import Layer
from evalengine.layers.experts import ExpertDown
from evalengine.layers.linear import MergedLinear, OutputLinear
from evalengine.layers.parallel import TensorParallel
from evalengine.layers.variants import Fp8Rows
from evalengine.models.decoder import DecoderForCausalLM
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.engine.test_families import SCHEDULES, differing, one_by_one, requests, run
from tests.engine.test_packed import METHODS, loaded, logits_of, packed_folder
from tests.engine.test_packed_formats import compressed, fp8
from tests.parity.random_models import without_tokenizer

PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def by_tokens(**inputs: Any) -> dict[str, Any]:
    quantization = compressed("float-quantized", strategy="channel")
    quantization["config_groups"]["group_0"]["input_activations"] = {**PER_TOKEN, **inputs}
    return quantization


def folder_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Any, family: str = "qwen3-window") -> Path:
    monkeypatch.setitem(METHODS, "here", (fp8(1, None), quantization))
    return packed_folder(tmp_path, "here", family)[1]


def rules_of(folder: Path) -> dict[str, Fp8Rows | None]:
    return {n: layer.input_rule for n, layer in loaded(folder).named_modules() if isinstance(layer, Layer)}


def test_layers_quantise_what_the_checkpoint_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of packed weights, and no other; a constant is the largest of those that a merged layer has."""
    rules = rules_of(folder_of(tmp_path / "a", monkeypatch, by_tokens()))
    packed = {name for name, rule in rules.items() if rule is not None}
    assert {rules[name] for name in packed} == {Fp8Rows()}
    assert {name.split(".", 3)[3] for name in packed} == {"self_attn.qkv_proj", "self_attn.o_proj"}
    blocks = rules_of(packed_folder(tmp_path / "b", "fp8")[1])
    assert {rule for rule in blocks.values() if rule} == {Fp8Rows(32)}
    method = METHODS["fp8"][0], {**METHODS["fp8"][1], "scale_fmt": "ue8m0"}
    monkeypatch.setitem(METHODS, "ue8m0", method)
    powers = packed_folder(tmp_path / "d", "ue8m0")[1]
    assert {rule for rule in rules_of(powers).values() if rule} == {Fp8Rows(32, power=True)}
    assert "inputs by 1x32, to powers of two" in str(folder_spec(powers, "model.path", True, "auto").packing)
    static = folder_of(tmp_path / "c", monkeypatch, {"quant_method": "modelopt", "quant_algo": "FP8"})
    file = static / "model.safetensors"
    scale = "model.layers.2.self_attn.k_proj.input_scale"
    save_file({**load_file(file), scale: torch.tensor(1.5)}, file)
    constants = rules_of(static)
    assert constants["model.layers.2.self_attn.qkv_proj"] == Fp8Rows(None, 1.5)
    assert constants["model.layers.1.self_attn.qkv_proj"] == Fp8Rows(None, 1.0)


def test_that_inputs_are_quantised_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = folder_of(tmp_path, monkeypatch, by_tokens())
    with_inputs = logits_of(quantized)
    file = quantized / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    file.write_text(json.dumps(config))
    assert count_differing(logits_of(quantized), with_inputs) > len(with_inputs)


@pytest.mark.parametrize("family", ["qwen3-window", "minimax-m2"])
def test_no_schedule_changes_a_bit(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = without_tokenizer(folder_of(tmp_path, monkeypatch, by_tokens(), family))
    expected = one_by_one(checkpoint, requests(), batch_invariant=True, max_model_len=96)
    for schedule in SCHEDULES:
        outputs = run(checkpoint, requests(), schedule, batch_invariant=True, max_model_len=96)
        assert not differing(outputs, expected), schedule


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_quantise_the_whole_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's scale is that of all its features, of which a rank has a part."""
    checkpoint = without_tokenizer(folder_of(tmp_path, monkeypatch, by_tokens()))
    settings = {"batch_invariant": True, "max_model_len": 96, "num_kv_blocks": 64, "block_size": 16}
    outputs = []
    for ranks in (1, 2):
        with LLM(checkpoint, tensor_parallel_size=ranks, **settings) as llm:
            outputs.append({output.request_id: output for output in llm.run(requests())})
    assert not differing(*outputs)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_sums_has_its_part_of_the_whole_rows_numbers(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At `fast` a rank multiplies its own features alone, whose scale is made of all ranks'."""
    tp = TensorParallel(rank, 2, object())
    ops = create_ops("fast", torch.float32, torch.device("cpu"), tp=tp)
    for name in ("linear", "expert_linear"):
        monkeypatch.setattr(ops, name, lambda x, *_: x)
    whole = torch.randn(6, 3, 64) * torch.arange(1, 65)
    expected = ops.fp8_rows(whole, Fp8Rows()).chunk(2, -1)[rank]
    monkeypatch.setattr(tp, "gather_features", lambda x: whole.flatten(0, -2)[: len(x)])
    dense, experts = OutputLinear(ops, 64, 8, part=True), ExpertDown(ops, 4, 64, 8, False)
    dense.input_rule = experts.input_rule = Fp8Rows()
    assert_bitwise_equal(experts(whole.chunk(2, -1)[rank], None), expected)
    assert_bitwise_equal(dense(whole.chunk(2, -1)[rank].flatten(0, 1)), expected.flatten(0, 1))


def test_layers_differ_where_some_are_left_unpacked() -> None:
    """So that no CUDA graph is captured after one layer alone has had its kernels made."""
    spec = resolve_checkpoint(ModelConfig(path="asset:tinymath")).spec
    for rules in ((), (0,), range(spec.num_layers)):
        model = DecoderForCausalLM(spec, create_ops("fast", torch.float32, torch.device("cpu")))
        for number in rules:
            model.get_submodule(f"model.layers.{number}.mlp.down_proj").input_rule = Fp8Rows(scale=1.0 + number)  # type: ignore[assignment]
        model.finalize(64)
        assert model.layers_alike == (len(rules) != 1)


@pytest.mark.parametrize("level", ["exact", "fast"])
def test_a_part_of_a_merged_layer_may_take_its_input_as_it_is(level: str) -> None:
    ops = create_ops(level, torch.float32, torch.device("cpu"))
    whole, mixed, plain = (MergedLinear(ops, 64, {"a": 5, "b": 3, "c": 9}) for _ in range(3))
    weight, x = torch.randn(17, 64), torch.randn(6, 64)
    for layer in (whole, mixed, plain):
        assert layer.weight is not None
        layer.weight.copy_(weight)
        layer.finalize()
        layer.input_rule = None if layer is plain else Fp8Rows()
    mixed.leave_unquantized(["b"])
    expected = torch.cat([whole(x)[:, :5], plain(x)[:, 5:8], whole(x)[:, 8:]], 1)
    assert_bitwise_equal(mixed(x), expected)
    assert count_differing(mixed(x), whole(x)) and count_differing(mixed(x), plain(x))


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"strategy": "tensor"}, "a token's results would depend on the other requests"),
        ({"num_bits": 4}, "input_activations.num_bits=4, only 8"),
        ({"strategy": "channel"}, "input_activations.strategy='channel', only 'token' or 'group'"),
        ({"strategy": "group", "group_size": 0}, "input_activations.group_size=0: must be a number"),
    ],
)
def test_other_inputs_are_refused_by_name(
    inputs: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=why):
        without_tokenizer(folder_of(tmp_path, monkeypatch, by_tokens(**inputs)))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "lacks its partner"),
        (torch.tensor([1.0, 2.0]), "not one number"),
        (torch.tensor(0.0), "is 0.0, no scale"),
    ],
)
def test_a_constant_that_is_none_is_damage(
    value: torch.Tensor | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    static = folder_of(tmp_path, monkeypatch, by_tokens(strategy="tensor", dynamic=False))
    file = static / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.o_proj.input_scale"]
    save_file({**tensors, **({} if value is None else {"model.layers.1.self_attn.o_proj.input_scale": value})}, file)
    with pytest.raises(EvalEngineError, match=why):
        loaded(static)
