"""Which memory counts as free: a container's limit, without the files that the kernel keeps for it in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from evalengine.certify.model import shapes
from evalengine.config.schema import EngineConfig
from evalengine.engine.execute import memory
from evalengine.engine.execute.cuda_graphs import graph_bytes
from evalengine.engine.execute.parallel.group import slot_bytes
from evalengine.engine.settings import Settings, possible_ranks
from evalengine.layers import create_ops
from evalengine.models.hf_config import from_hf, spec_from_json

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container's folder of limits, with 16 GiB on a machine that has 1 TiB."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory.os, "sysconf", lambda name: 1 << 20)  # This many pages of this many bytes: 1 TiB.
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / "none")
    (tmp_path / "memory.max").write_text(f"{16 * GIB}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("used", "files", "free"), [(4, 0, 12), (15, 12, 13), (17, 0, 0), (17, 2, 1)], ids=lambda x: f"{x}GiB"
)
def test_a_container(cgroup: Path, used: int, files: int, free: int) -> None:
    """Free is the limit less what is used, where files that the kernel can drop are not counted as used."""
    (cgroup / "memory.current").write_text(f"{used * GIB}\n")
    (cgroup / "memory.stat").write_text(f"anon {GIB}\nfile {files * GIB}\ninactive_file {files * GIB}\nactive_file 0\n")
    assert memory._free_bytes(CPU) == free * GIB


def test_a_container_that_does_not_count_files(cgroup: Path) -> None:
    (cgroup / "memory.current").write_text(f"{4 * GIB}\n")
    (cgroup / "memory.stat").write_text("anon 1\n")
    assert memory._free_bytes(CPU) == 12 * GIB, "its limit holds all the same"


def test_no_container_or_no_limit(cgroup: Path) -> None:
    """Without a container, or in one without a limit, the machine's memory counts."""
    assert memory._free_bytes(CPU) == 1 << 40, "memory.current is not there"
    for name, text in (("current", "1"), ("stat", "inactive_file 0"), ("max", "max")):
        (cgroup / f"memory.{name}").write_text(text + "\n")
    assert memory._free_bytes(CPU) == 1 << 40


@pytest.mark.gpu
def test_what_was_given_back_to_torch_is_free_too() -> None:
    """torch returns what it keeps before another pool is planned, since the driver counts that as used."""
    given_back = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    del given_back
    reserved = torch.cuda.memory_reserved()
    assert reserved >= GIB and memory._free_bytes(torch.device("cuda")) > 0
    assert torch.cuda.memory_reserved() <= reserved - GIB


# What formulas that restated Llama's and Qwen's decoders gave, before these were read from the model's own layers:
# bytes of a step's activations on one rank and on two, of the graphs, of the largest gather; the degrees of ranks.
FORMER: dict[str, tuple[type[PretrainedConfig], dict[str, int], tuple[int, int, int, int], list[int]]] = {
    "llama": (
        LlamaConfig,
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8},
        (301989888, 184549376, 138018816, 117440512),
        [1, 2, 4, 8, 16, 32],
    ),
    "qwen2": (
        Qwen2Config,
        {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
         "num_key_value_heads": 2},
        (94371840, 54525952, 99516416, 39845888),
        [1, 2],
    ),
    "qwen3": (
        Qwen3Config,
        {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128},
        (67108864, 41943040, 109510656, 25165824),
        [1, 2, 4, 8, 16],
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
         "num_experts_per_tok": 8},
        (218103808, 125829120, 142016512, 50331648),
        [1, 2, 4, 8, 16, 32],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMER)
def test_memory_is_planned_as_it_was(name: str) -> None:
    config_class, sizes, bytes_of, ranks = FORMER[name]
    spec = from_hf(config_class(**sizes))
    config = EngineConfig(max_num_batched_tokens=4096, max_num_seqs=128)
    one = Settings(CPU, "native", torch.bfloat16, "triton", max_model_len=8192, block_size=16, num_threads=1)
    two = replace(one, tensor_parallel_size=2)
    ops = create_ops("fast", torch.bfloat16, CPU)
    steps = [memory._activation_bytes(config, spec, settings) for settings in (one, two)]
    assert (*steps, graph_bytes(spec, 128, one), slot_bytes(config, spec, ops)) == bytes_of
    assert possible_ranks(spec) == ranks


def test_short_prompts_have_a_chunk_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 prompts of 32 tokens are 256 chunks of a recurrence, not the 128 that so many tokens fill."""
    spec = spec_from_json(shapes()["qwen3.5-0.8b"])
    (rule,) = spec.recurrent_kinds
    settings = Settings(CPU, "native", torch.bfloat16, "triton", max_model_len=8192, block_size=16, num_threads=1)
    config = EngineConfig(max_num_batched_tokens=8192, max_num_seqs=256)
    whole = memory._activation_bytes(config, spec, settings)  # a CPU computes nothing in chunks
    monkeypatch.setattr(memory, "in_chunks", lambda level, device: True)
    chunks = [(memory._activation_bytes(replace(config, max_num_seqs=n), spec, settings) - whole) / rule.chunk_bytes
              for n in (1, 256)]  # fmt: skip
    assert chunks == [129, 384]
