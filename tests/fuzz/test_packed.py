"""Packed checkpoints with one field of `quantization_config`, or one tensor, exchanged: a sentence or a model, never a
traceback."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evalengine.engine.load.hf_folder import folder_spec
from evalengine.errors import ConfigError, EvalEngineError
from tests.engine.test_fp8_activations import by_tokens
from tests.engine.test_packed import METHODS, loaded, packed_folder
from tests.engine.test_packed_formats import FORMATS, fp8
from tests.fuzz.cases import Case, cases
from tests.fuzz.test_hf_folder import places_in

ALL = {**METHODS, **FORMATS, "by tokens": (fp8(1, None), by_tokens())}
VALUES = [None, 0, -1, 2.5, "x", "1x1", "re:(", [], [1], [128, 128], {}, {"a": {}}, [[]], True, 10**9]


def with_another_value(case: Case, quantization: Any) -> Any:
    changed = json.loads(json.dumps(quantization))
    place = case.choice([*places_in(changed)])
    functools.reduce(lambda inner, key: inner[key], place[:-1], changed)[place[-1]] = case.choice(VALUES)
    return changed


def with_another_tensor(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = case.choice([name for name in tensors if "_proj" in name])
    old = tensors[name]
    new = case.choice([
        lambda: old.flatten()[:0],
        lambda: old.float().half(),
        lambda: old.unsqueeze(0),
        lambda: old[: max(1, len(old) // 2)] if old.ndim else old.expand(3),
        lambda: torch.zeros_like(old) if old.dtype != torch.int32 else old.flip(0),
    ])()  # fmt: skip
    return {**tensors, name: new.clone().contiguous()}


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "w4a16 zeros", "int8", "modelopt nvfp4", "by tokens"])
def test_a_sentence_or_a_model(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "here", ALL[method])
    folder = packed_folder(tmp_path, "here")[1]
    file, weights = folder / "config.json", folder / "model.safetensors"
    config, tensors = json.loads(file.read_text()), load_file(weights)
    for case in cases(f"packed, {method}", 12):
        quantization, stored = config["quantization_config"], tensors
        if case.random() < 0.6:
            quantization = with_another_value(case, quantization)
        else:
            stored = with_another_tensor(case, tensors)
        file.write_text(json.dumps({**config, "quantization_config": quantization}))
        save_file(stored, weights)
        with case.named(quantization):
            try:
                folder_spec(folder, "here", with_weights=True)
                loaded(folder)
            except (ConfigError, EvalEngineError) as error:
                assert str(error).isprintable() and len(str(error)) < 1500
