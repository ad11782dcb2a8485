"""Weights that stay packed in memory (`native`): the bytes of the unpacked model, which layers keep them, and what they
take. The kernels run in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from evalengine.config.schema import ModelConfig
from evalengine.engine.execute import memory
from evalengine.engine.load.hf_folder import model_tensors
from evalengine.engine.load.loader import load_model, resolve_checkpoint, weights_fingerprint
from evalengine.engine.load.packed_weights import in_layout, select_packed
from evalengine.engine.load.shards import read_tensors
from evalengine.errors import ConfigError
from evalengine.kernels import packed_matmul
from evalengine.kernels.packed_rows import PackedFragments, PackedRows, fragments_of
from evalengine.layers.base import checkpoint_tensors
from evalengine.layers.cuda import NativeOps
from evalengine.layers.parallel import TensorParallel
from evalengine.models.decoder import without_storage
from evalengine.models.registry import get_family
from tests.bitwise import assert_bitwise_equal
from tests.engine import test_mxfp4
from tests.engine.test_packed import METHODS, by_gptq, packed_folder
from tests.engine.test_packed_formats import FORMATS
from tests.parity.paged import PagedRunner
from tests.parity.random_models import without_tokenizer
from tests.parity.test_families import tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
gpt_oss = test_mxfp4.folders
# Of each method whether the kernels read it: not where inputs' groups are out of order.
KEPT = {
    **dict.fromkeys(METHODS, True),
    **dict.fromkeys(FORMATS, True),
    **dict.fromkeys(("gptq", "gptq_v2", "w4a16 act-order"), False),
    "gptq in order": True,
}


@pytest.fixture(autouse=True)
def methods(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FORMATS.items():
        monkeypatch.setitem(METHODS, name, value)

    def in_order(name: str, weight: Tensor) -> Any:
        """GPTQ without act-order: the numbers are others, the tensors the same."""
        parts, _ = by_gptq(name, weight)
        stem = name.removesuffix(".weight")
        parts[f"{stem}.g_idx"] = torch.arange(weight.shape[1]).int() // 32
        return parts, weight

    monkeypatch.setitem(METHODS, "gptq in order", (in_order, METHODS["gptq"][1]))


def native(folder: Path, *, keeps: bool, dtype: torch.dtype = torch.float32) -> PagedRunner:
    ops = NativeOps(dtype, DEVICE)
    ops.keeps_packed = keeps
    return PagedRunner(load_model(without_tokenizer(folder), ops, 64), block_size=16)


def packed_layers(runner: PagedRunner) -> set[str]:
    modules = runner.model.named_modules()
    return {name for name, layer in modules if isinstance(getattr(layer, "prepared", None), PackedFragments)}


@pytest.mark.parametrize("method", KEPT)
def test_bytes_in_memory_stand_for_the_numbers_that_are_read(method: str, tmp_path: Path) -> None:
    """Each weight, in the layout of the kernels, unpacks to what a model without it would hold."""
    folder = packed_folder(tmp_path, method, "minimax-m2" if method == "nvfp4" else "qwen3-window")[1]
    checkpoint = without_tokenizer(folder)
    spec, stored = checkpoint.spec, model_tensors(folder, checkpoint.spec)
    needed = [*checkpoint_tensors(without_storage(spec))]
    packed = select_packed(spec, get_family(spec.architecture).weights, stored, needed)
    assert bool(packed.files) == KEPT[method] and {*packed.files} == ({*packed.forms} if KEPT[method] else set())
    for name, numbers in read_tensors(packed.files):
        rows = in_layout(packed.files[name])
        moved = PackedRows(*(None if x is None else x.contiguous().to(DEVICE) for x in rows[:3]), rows.form)
        out = torch.empty(rows.shape, dtype=torch.float16, device=DEVICE)
        assert_bitwise_equal(packed_matmul.unpack(fragments_of(moved), out).cpu(), numbers.half().view(rows.shape))


@pytest.mark.parametrize(
    "method", ["awq", "fp8", *(pytest.param(m, marks=pytest.mark.slow) for m in ("nvfp4", "int8"))]
)
def test_a_model_has_the_unpacked_ones_bytes(method: str, tmp_path: Path) -> None:
    """By steps that unpack a weight to memory first."""
    folder = packed_folder(tmp_path, method)[1]
    unpacked, packed = (native(folder, keeps=keeps) for keeps in (False, True))
    assert packed_layers(packed) and not packed_layers(unpacked)
    ids = tokens(21)
    expected = unpacked.step({"s": ids})["s"]
    assert_bitwise_equal(packed.step({"s": ids})["s"], expected)


def test_gpt_oss_keeps_its_experts(gpt_oss: tuple[Path, Path]) -> None:
    """Whose tensors hold all experts, inputs before outputs, gate and up in turn."""
    unpacked, packed = (native(gpt_oss[1], keeps=keeps) for keeps in (False, True))
    assert {name.rsplit(".", 1)[1] for name in packed_layers(packed)} == {"gate_up_proj", "down_proj"}
    ids = tokens(17)
    expected = unpacked.step({"s": ids})["s"]
    assert_bitwise_equal(packed.step({"s": ids})["s"], expected)


def test_dummies_are_packed_as_config_json_says(gpt_oss: tuple[Path, Path]) -> None:
    """The same numbers whether they stay packed or not, under a name of their own."""
    plain, dummy = (resolve_checkpoint(ModelConfig(name="t", path=str(path), load_format="dummy")) for path in gpt_oss)
    assert weights_fingerprint(plain) != weights_fingerprint(dummy) and plain.spec.packing is None
    layers: list[dict[str, Any]] = []
    for keeps in (False, True):
        ops = NativeOps(torch.float32, DEVICE)
        ops.keeps_packed = keeps
        model = load_model(dummy, ops, 64)
        layers.append({name: layer.prepared for name, layer in model.named_modules() if hasattr(layer, "prepared")})
    packed = {name for name, rows in layers[1].items() if isinstance(rows, PackedFragments)}
    assert len(packed) == 4 and all(".mlp.experts." in name for name in packed)
    for name, rows in layers[1].items():
        numbers = packed_matmul.unpack(rows, torch.empty(rows.shape, device=DEVICE)) if name in packed else rows
        assert_bitwise_equal(numbers, layers[0][name])
        assert 0.015 < numbers.std() < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["awq", "fp8", "nvfp4", "int8", "w4a16 zeros", "mxfp4"])
def test_on_a_gpu_every_step_has_the_unpacked_models_bytes(method: str, tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, method)[1]
    unpacked, packed = (native(folder, keeps=keeps, dtype=torch.bfloat16) for keeps in (False, True))
    assert not packed_matmul.excluded
    for count in (1, 21, 60):
        expected, found = (runner.step({f"s{count}": tokens(count)})[f"s{count}"] for runner in (unpacked, packed))
        assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["fp8", "gpt-oss"])
def test_a_rank_keeps_its_rows(method: str, rank: int, tmp_path: Path, gpt_oss: tuple[Path, Path]) -> None:
    """Those that it has of the unpacked weights."""
    folder = gpt_oss[1] if method == "gpt-oss" else packed_folder(tmp_path / "own", method)[1]
    layers: list[dict[str, Any]] = []
    for keeps in (False, True):
        ops = NativeOps(torch.float32, DEVICE)
        ops.keeps_packed, ops.tp = keeps, TensorParallel(rank, 2, object())
        model = load_model(without_tokenizer(folder), ops, 64)
        layers.append({name: layer.prepared for name, layer in model.named_modules() if hasattr(layer, "prepared")})
    packed = {name: rows for name, rows in layers[1].items() if isinstance(rows, PackedFragments)}
    assert packed
    for name, rows in packed.items():
        out = torch.empty(rows.shape, device=DEVICE)
        assert_bitwise_equal(packed_matmul.unpack(rows, out), layers[0][name])


@pytest.mark.parametrize("method", ["awq", "gpt-oss"])
def test_memory_counts_packed_bytes_and_scales(
    method: str, tmp_path: Path, gpt_oss: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fits by its packed bytes, of experts too, is loaded where its unpacked numbers would not fit."""
    folder = gpt_oss[1] if method == "gpt-oss" else packed_folder(tmp_path / "own", method)[1]
    asked: list[int] = []
    check = memory._gib
    checkpoint = without_tokenizer(folder)
    runner = native(folder, keeps=True)
    packed = [layer.prepared for name, layer in runner.model.named_modules() if name in packed_layers(runner)]
    saved = sum(4 * rows.shape.numel() - sum(x.nbytes for x in rows.tensors) for rows in packed)
    saved -= 4 * max(rows.shape.numel() for rows in packed)  # the room to unpack one
    whole = 4 * memory.num_parameters(checkpoint.spec)
    assert saved > whole // 8
    monkeypatch.setattr(memory, "_free_bytes", lambda device: whole - saved // 2)
    monkeypatch.setattr(memory, "_gib", lambda size: asked.append(size) or check(size))  # type: ignore[func-returns-value]
    native(folder, keeps=True)
    with pytest.raises(ConfigError, match="take a smaller model"):
        native(folder, keeps=False)
    assert asked[0] == whole
    monkeypatch.setattr(memory, "_free_bytes", lambda device: whole - saved)
    with pytest.raises(ConfigError, match="take a smaller model"):
        native(folder, keeps=True)
    assert asked[3] == whole - saved
