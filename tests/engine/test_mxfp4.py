"""gpt-oss's packed experts are read as the bfloat16 numbers that they stand for, and give that model's bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from evalengine.engine.load.loader import load_model
from evalengine.engine.load.unpacking import mxfp4
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from tests.bitwise import assert_bitwise_equal
from tests.parity.families import WINDOW, random_model
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer
from tests.parity.test_families import tokens

EXPERTS, HIDDEN, INNER = 4, 96, 64


def packed(n: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of weights [E, N, K]; the scales are near those of trained weights."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, n, k // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 125, (EXPERTS, n, k // 32), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_every_byte_with_every_scale_is_what_transformers_makes_of_it() -> None:
    """But for the scale 255, which the format calls NaN and no checkpoint has; results are compared with float64."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(255, 16, 1, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1, 1).expand(255, 16, 1)
    found = mxfp4(blocks, scales)
    nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    sign, exponent, mantissa = nibbles >> 3, (nibbles >> 1) & 3, (nibbles & 1).double()
    value = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent.double() - 1))
    truth = (value * (1 - 2 * sign.double()) * 2.0 ** (scales.double().unsqueeze(-1) - 127)).flatten(-2)
    finite = truth.abs() < 2.0**128
    assert torch.equal(found.transpose(1, 2).double()[finite], truth[finite])
    theirs = convert_moe_packed_tensors(blocks[100:150].clone(), scales[100:150].clone())
    assert torch.equal(theirs, found[100:150])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """One model with packed experts, and with the numbers that transformers makes of them."""
    plain, small = tmp_path / "plain", tmp_path / "packed"
    sizes = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": INNER, "hidden_size": HIDDEN}
    random_model("gpt_oss", {**sizes, "num_hidden_layers": 2, "sliding_window": WINDOW}, plain)
    small.mkdir()
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    halves = dict(tensors)
    for layer in range(2):
        for part, n, k in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            blocks, scales = packed(n, k, 7 * layer + n)
            whole = convert_moe_packed_tensors(blocks.clone(), scales.clone())
            assert whole.shape == tensors[name].shape
            tensors[name] = whole.contiguous()
            del halves[name]
            halves |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    for folder, content, more in ((plain, tensors, {}), (small, halves, {"quantization_config": method})):
        save_file(content, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
    return plain, small


@pytest.mark.parametrize(("level", "dtype"), [("exact", torch.bfloat16), ("fast", torch.float32)])
def test_packed_experts_are_those_that_they_unpack_to(
    folders: tuple[Path, Path], level: str, dtype: torch.dtype
) -> None:
    results = []
    for folder in folders:
        model = load_model(without_tokenizer(folder), create_ops(level, dtype, torch.device("cpu")), 64)
        results.append(PagedRunner(model).step({"s": tokens(23)})["s"])
    assert_bitwise_equal(*results)
    assert results[0].isfinite().all()


def test_a_half_of_a_pair_and_other_sizes_are_damage(folders: tuple[Path, Path]) -> None:
    file = folders[1] / "model.safetensors"
    whole = load_file(file)
    ops = create_ops("exact", torch.bfloat16, torch.device("cpu"))
    name = "model.layers.0.mlp.experts.down_proj"
    for bad, why in (
        ({n: x for n, x in whole.items() if n != f"{name}_scales"}, "down_proj_blocks lacks its partners"),
        ({n: x for n, x in whole.items() if n != f"{name}_blocks"}, "down_proj_scales lacks its partners"),
        ({**whole, f"{name}_scales": whole[f"{name}_scales"][:, :5].contiguous()}, "are no mxfp4"),
        ({**whole, f"{name}_blocks": whole[f"{name}_blocks"].int()}, "are no mxfp4"),
    ):
        save_file(bad, file)
        with pytest.raises(EvalEngineError, match=why):
            load_model(without_tokenizer(folders[1]), ops, 64)


@pytest.mark.parametrize("method", [{"quant_method": "bitsandbytes"}, {"bits": 4}])
def test_other_packed_weights_are_refused(folders: tuple[Path, Path], method: object) -> None:
    file = folders[1] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": method}))
    with pytest.raises(ConfigError, match="quantization_config"):
        without_tokenizer(folders[1])
