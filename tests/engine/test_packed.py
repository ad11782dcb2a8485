"""Packed weights give the bytes of the model that they unpack to; what is not read of them is refused by name.

The tests pack by their own code, number by number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evalengine.engine.load.hf_folder import folder_spec
from evalengine.engine.load.loader import load_model
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from evalengine.layers.base import Layer
from evalengine.models.causal_lm import CausalLM
from tests.bitwise import assert_bitwise_equal
from tests.parity.families import make
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer
from tests.parity.test_families import tokens

Parts = dict[str, Tensor]
BLOCK = (40, 32)  # divides no number of rows
GROUP = 32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def word(numbers: list[int], bits: int) -> int:
    """An int32 whose lowest bits are the first number's."""
    value = sum(number << (bits * i) for i, number in enumerate(numbers))
    return value - (1 << 32) if value >= 1 << 31 else value


def by_fp8(name: str, weight: Tensor) -> tuple[Parts, Tensor]:
    """A weight in blocks with scales, and what it stands for."""
    n, k = weight.shape
    whole, packed = torch.empty(n, k), torch.empty(n, k, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-n // BLOCK[0]), -(-k // BLOCK[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows = slice(i * BLOCK[0], (i + 1) * BLOCK[0])
            columns = slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[rows, columns].abs().max() / 448
            packed[rows, columns] = (weight[rows, columns] / scales[i, j]).to(torch.float8_e4m3fn)
            whole[rows, columns] = packed[rows, columns].float() * scales[i, j]
    return {name: packed, f"{name}_scale_inv": scales}, whole


def _integers(weight: Tensor, bits: int, group_of: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [K, N], zeros and scales [groups, N], and the float32 numbers [N, K] that they stand for."""
    k = weight.shape[1]
    generator = torch.Generator().manual_seed(k)
    groups = max(group_of) + 1
    numbers = torch.randint(0, 1 << bits, (k, len(weight)), generator=generator)
    zeros = torch.randint(1, 1 << bits, (groups, len(weight)), generator=generator)
    scales = (torch.rand(groups, len(weight), generator=generator) * 0.2 / (1 << bits)).half()
    index = torch.tensor(group_of)
    return numbers, zeros, scales, ((numbers - zeros[index]).float() * scales.float()[index]).t().contiguous()


def by_gptq(name: str, weight: Tensor, bits: int = 4, offset: int = 1) -> tuple[Parts, Tensor]:
    """Words along K; the inputs' groups are out of order, as after act-order."""
    n, k = weight.shape
    group_of = [(7 * i) % (-(-k // GROUP)) for i in range(k)]
    numbers, zeros, scales, whole = _integers(weight, bits, group_of)
    per = 32 // bits
    columns = numbers.t().tolist()
    qweight = torch.tensor([[word(columns[j][i : i + per], bits) for j in range(n)] for i in range(0, k, per)])
    rows = (zeros - offset).tolist()
    qzeros = torch.tensor([[word(row[j : j + per], bits) for j in range(0, n, per)] for row in rows])
    stem = name.removesuffix(".weight")
    parts = {f"{stem}.qweight": qweight.int(), f"{stem}.qzeros": qzeros.int(), f"{stem}.scales": scales}
    return {**parts, f"{stem}.g_idx": torch.tensor(group_of).int()}, whole


def by_awq(name: str, weight: Tensor) -> tuple[Parts, Tensor]:
    n, k = weight.shape
    numbers, zeros, scales, whole = _integers(weight, 4, [i // GROUP for i in range(k)])

    def packed(rows: list[list[int]]) -> Tensor:
        return torch.tensor([[word([row[j + i] for i in ORDER], 4) for j in range(0, n, 8)] for row in rows]).int()

    stem = name.removesuffix(".weight")
    return {
        f"{stem}.qweight": packed(numbers.tolist()), f"{stem}.qzeros": packed(zeros.tolist()), f"{stem}.scales": scales,
    }, whole  # fmt: skip


METHODS: dict[str, tuple[Callable[[str, Tensor], tuple[Parts, Tensor]], dict[str, Any]]] = {
    "fp8": (by_fp8, {"quant_method": "fp8", "weight_block_size": [*BLOCK], "activation_scheme": "dynamic"}),
    "gptq": (by_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}),
    "gptq_v2": (
        lambda name, weight: by_gptq(name, weight, 8, 0),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (by_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def packed_folder(tmp_path: Path, method: str, family: str = "qwen3-window") -> tuple[Path, Path]:
    """A model whose projections are packed, and the model of the numbers that they stand for."""
    plain, small = tmp_path / "plain", tmp_path / "packed"
    make(family, plain)
    small.mkdir()
    pack, quantization = METHODS[method]
    whole, halves = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "_proj.weight" in name and tensor.shape[0] % 8 == tensor.shape[1] % 32 == 0:
            parts, whole[name] = pack(name, tensor)
            halves |= parts
        else:
            whole[name] = halves[name] = tensor
    assert len(halves) > len(whole)
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    for folder, content, more in ((plain, whole, {}), (small, halves, {"quantization_config": quantization})):
        save_file({name: x.contiguous() for name, x in content.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
    return plain, small


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16, level: str = "exact") -> CausalLM:
    return load_model(without_tokenizer(folder), create_ops(level, dtype, torch.device("cpu")), 64)


def logits_of(folder: Path, dtype: torch.dtype = torch.bfloat16, inputs_of: Path | None = None) -> Tensor:
    """inputs_of: a model whose products' inputs are quantised, as they are to be here."""
    model = loaded(folder, dtype)
    for name, layer in loaded(inputs_of).named_modules() if inputs_of else ():
        if isinstance(layer, Layer):
            model.get_submodule(name).input_rule = layer.input_rule
    return PagedRunner(model).step({"s": tokens(19)})["s"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_a_packed_model_has_the_bytes_of_the_one_it_unpacks_to(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain, small = packed_folder(tmp_path, method)
    assert_bitwise_equal(logits_of(small, dtype), logits_of(plain, dtype, small))


def test_experts_may_be_packed(tmp_path: Path) -> None:
    plain, small = packed_folder(tmp_path, "fp8", "minimax-m2")
    assert_bitwise_equal(logits_of(small), logits_of(plain, inputs_of=small))


def test_what_is_read_shows(tmp_path: Path) -> None:
    """The comparison can fail: the other count of a GPTQ zero is another model."""
    plain, small = packed_folder(tmp_path, "gptq")
    file = small / "config.json"
    config = json.loads(file.read_text())
    before = folder_spec(small, "model.path", True, "auto").plain
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    file.write_text(json.dumps(config))
    assert not torch.equal(logits_of(small), logits_of(plain))
    assert folder_spec(small, "model.path", True, "auto").plain != before, "a run's identity tells the two models apart"


@pytest.mark.parametrize(
    ("method", "drop", "why"),
    [
        ("gptq", "g_idx", "lacks its partners"),
        ("awq", "scales", "lacks its partners"),
        ("fp8", "weight", "lacks its partners"),
    ],
)
def test_a_tensor_without_its_partners_is_damage(method: str, drop: str, why: str, tmp_path: Path) -> None:
    file = packed_folder(tmp_path, method)[1] / "model.safetensors"
    tensors = load_file(file)
    save_file({n: x for n, x in tensors.items() if n != f"model.layers.1.self_attn.q_proj.{drop}"}, file)
    with pytest.raises(EvalEngineError, match=why):
        logits_of(file.parent)


def test_sizes_that_config_json_does_not_describe_are_damage(tmp_path: Path) -> None:
    for method, field, value in (
        ("fp8", "weight_block_size", [64, 64]),
        ("gptq", "bits", 8),
        ("awq", "group_size", 16),
    ):
        folder = packed_folder(tmp_path / method, method)[1]
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"][field] = value
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(EvalEngineError, match=f"are no {method} as config.json describes it"):
            logits_of(folder)


@pytest.mark.parametrize(
    ("quantization", "why"),
    [
        ({"quant_method": "quark"}, "of method 'quark', only fp8, gptq, awq"),
        ({"quant_method": "mxfp4"}, "of method 'mxfp4'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({**METHODS["fp8"][1], "fmt": "e5m2"}, "fmt='e5m2', only 'e4m3' or 'float8_e4m3fn'"),
        ({**METHODS["gptq"][1], "bits": 3}, "bits=3, only 4 or 8"),
        ({**METHODS["gptq"][1], "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({**METHODS["awq"][1], "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "awq", "bits": 4}, "group_size=None: must be numbers"),
        ({"bits": 4}, "packed weights are not supported, only"),
    ],
)
def test_what_is_not_read_is_refused_by_name(quantization: dict[str, Any], why: str, tmp_path: Path) -> None:
    check_refused(quantization, why, tmp_path)


def check_refused(quantization: dict[str, Any], why: str, folder: Path) -> None:
    """A checkpoint that says so of its weights is refused."""
    make("qwen3-window", folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))
    with pytest.raises(ConfigError, match=why):
        without_tokenizer(folder)
