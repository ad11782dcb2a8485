"""GGUF files that llama.cpp's own converter wrote give the logits of transformers' module of their source.

`converted/` has the files, and where they come from; `converted/convert.py` writes them anew.
"""

from __future__ import annotations

import lzma
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from evalengine.config.overrides import parse
from evalengine.engine.load.gguf import GGUFFile
from evalengine.engine.load.loader import Checkpoint, _weights_of, file_stamp, files_of, load_model, weights_fingerprint
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from evalengine.report.compare.weight_tensors import _sets
from tests.engine.test_gguf_families import CASES as FAMILIES
from tests.parity.families import LONG, MAMBA, configuration
from tests.parity.paged import PagedRunner

FOLDER = Path(__file__).with_name("converted")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FEW_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
IDS = [3 + (7 * i + i * i) % 60 for i in range(24)]  # longer than two windows

LONG_OF_3 = {**LONG, "short_factor": [1.0, 1.25, 1.5], "long_factor": [4.0, 5.0, 6.0]}
GRANITE_4 = {
    **MAMBA,
    "layer_types": ["full_attention"] * 2,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 48,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
}
FOUR_LAYERS = {"num_hidden_layers": 4}
ALL_HEADS = {"num_key_value_heads": 4}
# What a case of another test needs at these sizes, or this test besides.
OTHER: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3": {"query_pre_attn_scalar": 8, "num_hidden_layers": 7},
    "phi3-long": {"rope_parameters": LONG_OF_3},
    "pythia": ALL_HEADS,
    "olmoe": ALL_HEADS,
    **dict.fromkeys(("olmo3", "exaone4", "smollm3", "cohere2", "lfm2", "lfm2-moe"), FOUR_LAYERS),
}
# A file's name -> the model's type, its configuration besides SMALL, the converter's options. The converter writes no
# window for Mistral, whose file is a Llama's; three further cases of that table differ from others in no key.
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    **{
        name: (model_type, {**config, **OTHER.get(name, {})}, [])
        for name, (_, model_type, config, _) in FAMILIES.items()
        if name not in ("exaone4-full", "phi3-partial", "stablelm-parallel", "mistral-window")
    },
    "granite4": ("granitemoehybrid", GRANITE_4, []),
    "llama-fused": ("llama", {"attention_bias": True}, ["--fuse-qkv"]),
    "starcoder2-fused": ("starcoder2", {"use_bias": True}, ["--fuse-qkv"]),
    "split": ("llama", {}, ["--split-max-tensors", "8"]),
}


def source(name: str) -> PreTrainedModel:
    """The model of a file. Its weights are odd sixteenths, which compress well."""
    model_type, config, _ = CASES[name]
    last = {key: config[key] for key in ("num_hidden_layers", "num_key_value_heads") if key in config}
    if config.get("head_dim", 0) is None:
        last["head_dim"] = None
    few = {key: size for key, size in FEW_EXPERTS.items() if config.get(key)}
    made = configuration(model_type, {**config, **SMALL, **few, **last})
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.requires_grad or key.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(lattice(key, tensor))
    return model


def lattice(name: str, tensor: Tensor) -> Tensor:
    """Numbers that depend on the name and the shape alone, around 1 for norms' weights that start there."""
    numbers = np.random.RandomState(zlib.crc32(name.encode())).randint(0, 4, tensor.shape)
    middle = tensor.mean().round() if tensor.ndim == 1 else 0.0
    return middle + torch.from_numpy((2 * numbers - 3) / 16).to(tensor)


def unpacked(name: str, folder: Path) -> Path:
    """The GGUF file of a case, or the first part of its several."""
    files = sorted(FOLDER.glob(f"{name}.gguf.xz")) or sorted(FOLDER.glob(f"{name}-0*.gguf.xz"))
    for file in files:
        (folder / file.stem).write_bytes(lzma.decompress(file.read_bytes()))
    return folder / files[0].stem


def logits(path: Path) -> Tensor:
    """The logits of `IDS` by the engine."""
    file = GGUFFile(path)
    checkpoint = Checkpoint(path, "gguf", file.spec(), None, str(path), None, file, file_stamp(path, "gguf"))
    model = load_model(checkpoint, create_ops("fast", torch.float32, torch.device("cpu")), 64)
    return PagedRunner(model).step({"s": IDS})["s"]


@pytest.mark.parametrize("name", CASES)
def test_a_converted_file_has_the_logits_of_its_source(name: str, tmp_path: Path) -> None:
    expected = source(name)(torch.tensor([IDS])).logits[0].detach()
    torch.testing.assert_close(logits(unpacked(name, tmp_path)), expected, rtol=0, atol=1e-4)


def test_a_split_model_is_read_from_its_first_part(tmp_path: Path) -> None:
    first = unpacked("split", tmp_path)
    parts = [first, *(first.with_name(f"split-0000{i}-of-00003.gguf") for i in (2, 3))]
    assert _weights_of(tmp_path, "auto") == (first, "gguf") and list(_sets(first)) == [parts]
    (globbed,) = parse([f"model.path=glob('{tmp_path}/*')"], multirun=False)
    assert globbed.input_line == f"model.path={first}"
    file = GGUFFile(first)
    checkpoint = Checkpoint(first, "gguf", file.spec(), None, "", None, file, file_stamp(first, "gguf"))
    assert files_of(checkpoint) == parts
    assert {name for name, _ in file.tensors()} == {name for name, _ in pickle.loads(pickle.dumps(file)).tensors()}
    with pytest.raises(ConfigError, match=r"part 2 of 3 of a split model; set model.path to .*-00001-of-00003.gguf"):
        GGUFFile(parts[1])
    parts[2].touch()
    with pytest.raises(EvalEngineError, match="have changed since"):
        weights_fingerprint(checkpoint)


def replaced(old: bytes, new: bytes, first: int = 2) -> Callable[..., object]:
    """A change of bytes in the parts from number `first` on, counted from 0."""

    def change(*parts: Path) -> None:
        for part in parts[first:]:
            assert old in part.read_bytes()
            part.write_bytes(part.read_bytes().replace(old, new))

    return change


TOTAL = (b"tensors.count\5\0\0\0\x15", b"tensors.count\5\0\0\0\x63")  # 21 tensors, 99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, c: c.unlink(), r"00003-of-00003.gguf: part 3 of 3 is missing; download"),
        (lambda a, b, c: c.write_bytes(b.read_bytes()), r"\(split.no=1, expected 2\); download or copy all"),
        (lambda a, b, c: c.write_bytes(c.read_bytes()[:-40]), r"00003-of-00003.gguf: not a whole GGUF"),
        (replaced(b"blk.1.attn_k", b"blk.0.attn_k"), r"\(tensors of parts before it: blk.0.attn_k.weight\)"),
        (replaced(*TOTAL), r"not part 3 .*\(split.tensors.count=99, expected 21\)"),
        (replaced(*TOTAL, first=0), r"its 3 parts have 21 tensors, expected 99 \(split.tensors.count\)"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(
    change: Callable[..., object], message: str, tmp_path: Path
) -> None:
    first = unpacked("split", tmp_path)
    change(first, *(first.with_name(f"split-0000{i}-of-00003.gguf") for i in (2, 3)))
    with pytest.raises(EvalEngineError, match=message):
        GGUFFile(first)
