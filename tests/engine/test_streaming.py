"""A folder of many shards is read file by file and tensor by tensor: no copy of the whole model lies on the host."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from evalengine.engine.load import loader, shards
from evalengine.engine.load.loader import load_model
from evalengine.engine.load.shards import INDEX, StoredTensor, read_tensors
from evalengine.layers import create_ops
from evalengine.models.decoder import num_parameters
from tests.parity.families import random_model
from tests.parity.random_models import without_tokenizer

SHARDS = 16
STATUS = Path("/proc/self/status")
MIB = 1 << 20


def anonymous_bytes() -> int:
    """This process's memory that is no file's."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """16 shards with a layer each of FP8 numbers, scaled by the tensor; 24 MiB a layer once they are unpacked."""
    sizes = {"hidden_size": 512, "intermediate_size": 6144, "num_hidden_layers": SHARDS, "vocab_size": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = random_model("qwen3", {**sizes, **heads, "num_hidden_layers": 1}, tmp_path)
    whole = {name: x.detach() for name, x in model.state_dict().items()}
    (tmp_path / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number in range(SHARDS):
        own: dict[str, Tensor] = {}
        for name, x in whole.items():
            if ".layers.0." not in name and number:
                continue
            name = name.replace(".layers.0.", f".layers.{number}.")
            own[name] = x.to(torch.float8_e4m3fn) if "_proj.weight" in name else x.clone()
            if "_proj.weight" in name:
                own[f"{name}_scale"] = torch.tensor(1.0)
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(own, tmp_path / file)
        places |= dict.fromkeys(own, file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    config = json.loads((tmp_path / "config.json").read_text())
    packed = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config |= {"num_hidden_layers": SHARDS, "layer_types": ["full_attention"] * SHARDS, "quantization_config": packed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.skipif(not STATUS.exists(), reason="the kernel's account of memory is Linux's")
@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "control"])
def test_the_host_holds_a_tensor_at_a_time(folder: Path, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the model itself. The control reads all tensors first, which the bound must not let through."""
    before = anonymous_bytes()
    most = 0
    opened: Counter[str] = Counter()
    real_open = shards._open

    def seen(stored: Mapping[str, StoredTensor], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, tensor in [*read_tensors(stored, device)] if whole else read_tensors(stored, device):
            most = max(most, anonymous_bytes() - before)
            yield name, tensor

    def counted(file: Path) -> Any:
        opened[file.name] += 1
        return real_open(file)

    checkpoint = without_tokenizer(folder)
    monkeypatch.setattr(loader, "read_tensors", seen)
    monkeypatch.setattr(shards, "_open", counted)
    model = load_model(checkpoint, create_ops("fast", torch.bfloat16, torch.device("cpu")), 16)
    weights = 2 * num_parameters(checkpoint.spec)
    assert weights > 250 * MIB and len(opened) == SHARDS
    assert (most < weights + 64 * MIB) != whole, f"{most / MIB:.0f} MiB for weights of {weights / MIB:.0f}"
    del model
