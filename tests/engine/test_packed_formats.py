"""Packed weights in the spellings of compressed-tensors, ModelOpt and FP8 without blocks: a model has the bytes of the
model of the numbers that they stand for, which the float64 reference makes of the same integers.
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
from evalengine.engine.load.packed import RULE
from evalengine.errors import EvalEngineError
from evalengine.models.packing import packing_problems
from tests.bitwise import assert_bitwise_equal
from tests.engine.test_packed import GROUP, METHODS, Parts, check_refused, logits_of, packed_folder, word
from tests.references import reference

Packed = tuple[Parts, Tensor]


def of_e4m3(codes: Tensor) -> Tensor:
    return reference.of_small_float(codes.view(torch.uint8).int(), 4, 3)


def random(shape: tuple[int, ...], low: int, high: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape) + high))


def fp8(rows: int | None, columns: int | None, end: str = "_scale", shape: tuple[int, ...] | None = None) -> Any:
    """FP8 with a scale for so many rows and columns (None: all); shape: of the scales, if not [rows, columns]."""

    def pack(name: str, weight: Tensor) -> Packed:
        n, k = weight.shape
        r, c = rows or n, columns or k
        codes = random((n, k), 0, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn)
        codes = torch.where(weight < 0, -codes.float(), codes.float()).to(torch.float8_e4m3fn)
        scales = (random((-(-n // r), -(-k // c)), 1, 1000).float() / 3e6).float()
        whole = reference.dequantized(
            of_e4m3(codes), scales.double().repeat_interleave(r, 0)[:n].repeat_interleave(c, 1)[:, :k]
        )
        stored = scales if shape is None else scales.reshape([n if size == -1 else size for size in shape])
        return {name: codes, f"{name}{end}": stored, name.replace("weight", "input_scale"): torch.ones(1)}, whole

    return pack


def words(bits: int, *, zeros: bool = False, groups_of: Callable[[int], list[int]] | None = None) -> Any:
    """compressed-tensors' integers in int32 words, with a scale for GROUP inputs."""

    def pack(name: str, weight: Tensor) -> Packed:
        n, k = weight.shape
        group_of = groups_of(k) if groups_of else [i // GROUP for i in range(k)]
        groups, per, index = max(group_of) + 1, 32 // bits, torch.tensor(group_of)
        numbers = random((n, k), 0, 1 << bits)
        scales = (random((n, groups), 1, 99).float() / (2000 << (bits - 4))).bfloat16()
        zero = random((n, groups), 0, 1 << bits) if zeros else torch.full((n, groups), 1 << (bits - 1))
        rows = numbers.tolist()
        parts = {
            f"{name}_packed": torch.tensor(
                [[word(r[i : i + per], bits) for i in range(0, k, per)] for r in rows]
            ).int(),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor([n, k]),
        }
        if zeros:
            columns = zero.t().tolist()
            packed = [[word(c[i : i + per], bits) for i in range(0, n, per)] for c in columns]
            parts[f"{name}_zero_point"] = torch.tensor(packed).t().contiguous().int()
        if groups_of:
            parts[f"{name}_g_idx"] = index.int()
        return parts, reference.dequantized(numbers.double(), scales.double()[:, index], zero.double()[:, index])

    return pack


def int8(name: str, weight: Tensor) -> Packed:
    """A number a byte, with a scale and a zero for each row."""
    n, k = weight.shape
    numbers, zeros = random((n, k), -128, 128).to(torch.int8), random((n, 1), -20, 20).to(torch.int8)
    scales = random((n, 1), 1, 999).float() / 3e5
    whole = reference.dequantized(numbers.double(), scales.double(), zeros.double())
    return {name: numbers, f"{name}_scale": scales, f"{name}_zero_point": zeros}, whole


def fp4(kind: str) -> Any:
    """e2m1, two in a byte: mxfp4 with a power of two for 32, nvfp4 with e4m3 for 16 and a float32 for all."""

    def pack(name: str, weight: Tensor) -> Packed:
        n, k = weight.shape
        codes, row = random((n, k), 0, 16), 32 if kind == "mxfp4" else 16
        pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        numbers = reference.of_small_float(codes, 2, 1)
        if kind == "mxfp4":
            exponents = random((n, k // row), 120, 125).to(torch.uint8)
            factors = 2.0 ** (exponents.double() - 127)
            parts = {f"{name}_packed": pairs, f"{name}_scale": exponents}
        else:
            scales = random((n, k // row), 1, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn)
            of_all = torch.tensor([1 / 700.0 if kind == "modelopt" else 701.3])
            own = of_e4m3(scales)
            factors = (own * of_all.double() if kind == "modelopt" else own / of_all.double()).float().double()
            names = ("", "_scale_2") if kind == "modelopt" else ("_packed", "_global_scale")
            parts = {f"{name}{names[0]}": pairs, f"{name}_scale": scales, f"{name}{names[1]}": of_all}
        return parts, reference.dequantized(numbers, factors.repeat_interleave(row, 1))

    return pack


def compressed(form: str, bits: int = 8, kind: str = "float", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "dynamic": False, **weights}}
    ignore = {"ignore": ["lm_head", "re:.*mlp.gate$"], "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **ignore}


def turned(k: int) -> list[int]:
    """The inputs' groups out of order, as after act-order."""
    return [(7 * i) % (k // GROUP) for i in range(k)]


INT4 = compressed("pack-quantized", 4, "int", strategy="group", group_size=GROUP)
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8 tensor": (fp8(None, None, "_scale", ()), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 tensor inv": (fp8(None, None, "_scale_inv", (1,)), {"quant_method": "fp8", "weight_block_size": None}),
    "fp8 row": (fp8(1, None), compressed("float-quantized", strategy="channel")),
    "fp8 whole": (fp8(None, None, shape=(1,)), compressed("naive-quantized", strategy="tensor")),
    "fp8 block": (fp8(40, 32), compressed("float-quantized", strategy="block", block_structure="40x32")),
    "int8": (int8, compressed("int-quantized", 8, "int", strategy="channel")),
    "w4a16": (words(4), INT4),
    "w4a16 zeros": (words(4, zeros=True), INT4),
    "w4a16 act-order": (words(4, groups_of=turned), INT4),
    "w8a16": (words(8, zeros=True), compressed("pack-quantized", 8, "int", strategy="group")),
    "nvfp4": (fp4("nvfp4"), compressed("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16)),
    "mxfp4": (fp4("mxfp4"), compressed("mxfp4-pack-quantized", 4, strategy="group", group_size=32)),
    "modelopt fp8": (fp8(None, None, "_scale", ()), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt rows": (
        fp8(1, None, "_scale", (-1,)),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "modelopt nvfp4": (fp4("modelopt"), {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}),
}


@pytest.fixture
def folders(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setitem(METHODS, "here", FORMATS[request.param])
    return packed_folder(tmp_path, "here")


@pytest.mark.parametrize("folders", FORMATS, indirect=True)
def test_a_packed_model_has_the_bytes_of_the_one_it_unpacks_to(folders: tuple[Path, Path]) -> None:
    plain, small = folders
    assert_bitwise_equal(logits_of(small), logits_of(plain, inputs_of=small))
    assert_bitwise_equal(logits_of(small, torch.float32), logits_of(plain, torch.float32, small))


def test_experts_are_packed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "here", FORMATS["nvfp4"])
    plain, small = packed_folder(tmp_path, "here", "minimax-m2")
    assert_bitwise_equal(logits_of(small), logits_of(plain))


@pytest.mark.parametrize("folders", ["modelopt nvfp4"], indirect=True)
def test_modelopts_own_file_counts(folders: tuple[Path, Path]) -> None:
    """Where config.json says nothing of packed weights."""
    plain, small = folders
    file = small / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    algorithm = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (small / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "m"}, "quantization": algorithm}))
    assert_bitwise_equal(logits_of(small), logits_of(plain))


@pytest.mark.parametrize(
    ("folders", "form"), [("w4a16 act-order", "int4 by 1x32"), ("fp8 block", "fp8 by 40x32")], indirect=["folders"]
)
def test_the_spec_names_form_and_rule(folders: tuple[Path, Path], form: str) -> None:
    plain, small = (folder_spec(folder, "here", with_weights=True) for folder in folders)
    assert plain.packing is None and "packing" not in plain.plain
    assert small.plain["packing"] == small.packing == f"{form} ({RULE})"
    assert small.described.endswith(f", weights packed as {small.packing}")


@pytest.mark.parametrize(
    ("folders", "end", "damage", "why"),
    [
        ("nvfp4", "_global_scale", None, "are no compressed-tensors"),
        ("w4a16", "_scale", None, "lacks its partners"),
        ("w4a16 zeros", "_zero_point", lambda x: x[:3], "are no compressed-tensors"),
        ("w4a16 act-order", "_g_idx", lambda x: x + 40, "names a group that is not there"),
        ("w4a16 act-order", "_g_idx", lambda x: x.masked_fill(x == 0, -1), "names a group that is not there"),
        ("w4a16 act-order", "_g_idx", lambda x: x - 5, "names a group that is not there"),
        ("modelopt rows", "_scale", lambda x: x[:5], "are no modelopt"),
        ("int8", "_zero_point", lambda x: x.float(), "are no compressed-tensors"),
    ],
    indirect=["folders"],
)
def test_tensors_that_do_not_fit_are_damage(
    folders: tuple[Path, Path], end: str, damage: Callable[[Tensor], Tensor] | None, why: str
) -> None:
    file = folders[1] / "model.safetensors"
    name = f"model.layers.1.self_attn.q_proj.weight{end}"
    tensors = load_file(file)
    old = tensors.pop(name)
    save_file({**tensors, **({name: damage(old).contiguous()} if damage else {})}, file)
    with pytest.raises(EvalEngineError, match=why):
        logits_of(folders[1])


FIRST = r"model\.layers\.0\.self_attn\.k_proj\.weight"  # [64, 96]


@pytest.mark.parametrize(
    ("folders", "weights", "why"),
    [
        ("w4a16", {"group_size": 16}, "_scale has 64 x 3 scales for 64 x 96 numbers, expected 64 x 6 by the strategy"),
        ("w4a16", {"group_size": 48}, "_scale has 64 x 3 .*, expected 64 x 2"),
        ("w4a16 zeros", {"strategy": "channel"}, "_scale has 64 x 3 .*, expected 64 x 1"),
        ("w4a16 act-order", {"group_size": 96}, "_scale has 64 x 3 .*, expected 64 x 1"),
        ("fp8 row", {"strategy": "tensor"}, "_scale has 64 x 1 .*, expected 1 x 1"),
        ("fp8 row", {"strategy": "block", "block_structure": [32, 32]}, "_scale has 64 x 1 .*, expected 2 x 3"),
        ("int8", {"strategy": "group", "group_size": 32}, "_scale has 64 x 1 .*, expected 64 x 3"),
        ("nvfp4", {"group_size": 32}, "_scale has 64 x 6 .*, expected 64 x 3"),
        ("mxfp4", {"group_size": 16}, "_scale has 64 x 3 .*, expected 64 x 6"),
        ("int8", {"type": "float"}, r" is I8 \(type=int, num_bits=8\), expected type=float, num_bits=8 by config.json"),
        ("fp8 row", {"type": "int"}, r" is F8_E4M3 \(type=float, num_bits=8\), expected type=int, num_bits=8 by"),
    ],
    indirect=["folders"],
)
def test_tensors_packed_otherwise_than_config_json_says_are_refused(
    folders: tuple[Path, Path], weights: dict[str, Any], why: str
) -> None:
    file = folders[1] / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= weights
    file.write_text(json.dumps(config))
    with pytest.raises(EvalEngineError, match=FIRST + why):
        logits_of(folders[1])


@pytest.mark.parametrize("folders", ["fp8 row", "fp8 tensor", "modelopt fp8"], indirect=True)
def test_fp8_data_labelled_as_int8_is_refused(folders: tuple[Path, Path]) -> None:
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    fp8_names = [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]
    save_file({**tensors, **{name: tensors[name].view(torch.int8) for name in fp8_names[-1:]}}, file)
    with pytest.raises(
        EvalEngineError, match=rf"{fp8_names[-1]} is I8 \(.*\), expected type=float, num_bits=8 by config"
    ):
        logits_of(folders[1])


@pytest.mark.parametrize("folders", ["w4a16"], indirect=True)
def test_a_shape_that_the_numbers_do_not_have_is_refused(folders: tuple[Path, Path]) -> None:
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.q_proj.weight_shape"
    save_file({**tensors, name: tensors[name] - torch.tensor([0, 4])}, file)
    with pytest.raises(EvalEngineError, match=rf"{name} is \[192, 92\], expected \[192, 96\], the shape of the packed"):
        logits_of(folders[1])


@pytest.mark.parametrize(
    ("quantization", "why"),
    [
        ({**INT4, "format": "marlin-24"}, "format='marlin-24', only 'naive-quantized' or"),
        ({**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse-24-bitmask'"),
        ({**INT4, "transform_config": {"config_groups": {"R1": {}}}}, "rotated"),
        ({**INT4, "config_groups": {}}, "config_groups={}"),
        (compressed("pack-quantized", 3, "int"), "num_bits=3, only 4 or 8"),
        (compressed("pack-quantized", 4, "int", group_size="32"), "group_size='32': must be a number, -1 or null"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ', only 'FP8' or"),
        ({**METHODS["gptq"][1], "dynamic": {"+:.*down.*": {"bits": 8}}}, "modules of other sizes"),
        ({"quant_method": "bitsandbytes"}, "only fp8, gptq, awq, compressed-tensors, modelopt"),
    ],
)
def test_what_is_not_read_is_refused_by_name(quantization: dict[str, Any], why: str, tmp_path: Path) -> None:
    check_refused(quantization, why, tmp_path)


def test_groups_of_several_forms_are_read_and_of_several_sizes_refused() -> None:
    group = INT4["config_groups"]["group_0"]
    forms = {"a": {**group, "format": "pack-quantized"}, "b": {"weights": {"num_bits": 8, "type": "float"}}}
    forms["b"]["format"] = "float-quantized"
    mixed = {**INT4, "format": "mixed-precision", "config_groups": forms}
    assert not [*packing_problems(mixed, takes_mxfp4=False)]
    forms["b"]["weights"] = {"num_bits": 8, "type": "int"}
    assert "4 and of 8 bits" in "".join(packing_problems(mixed, takes_mxfp4=False))


@pytest.mark.parametrize("value", [None, 1, "x", [], {}, [[1]], {"a": 1}, {"a": {"weights": [1]}}, 4.5])
@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "compressed-tensors", "modelopt"])
def test_any_value_of_a_field_is_read_or_refused_by_a_sentence(method: str, value: object) -> None:
    for whole in (dict(INT4), dict(METHODS["fp8"][1]), {"bits": 4, "group_size": 8}):
        for field in (*whole, "dynamic", "quant_algo", "quantized_layers", "weight_block_size", "transform_config"):
            quantization = {**whole, field: value, "quant_method": method}
            assert all(isinstance(problem, str) for problem in packing_problems(quantization, takes_mxfp4=False))
