"""`Shapes`: schedules are verified for the sizes of the weights that the layers really make."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from evalengine.kernels.shapes import LinearShape
from evalengine.layers.exact import ExactOps
from evalengine.layers.parallel import TensorParallel
from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    architecture="Qwen2ForCausalLM", vocab_size=96, hidden_size=64, intermediate_size=48, num_layers=1, num_heads=8,
    num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope=RopeSpec(theta=1e4), max_position_embeddings=32,
    tie_word_embeddings=True, attention_bias=True, attention_output_bias=False, qk_norm=False, dtype=torch.float32,
    bos_token_id=None, eos_token_ids=(),
)  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_linear_layers_are_those_of_the_model(ranks: int) -> None:
    """The shapes are those of the model's weights, also with fewer KV heads than ranks."""
    ops = ExactOps(torch.float32, torch.device("cpu"))
    ops.tp = TensorParallel(ranks - 1, ranks, group=SimpleNamespace())
    layer = DecoderForCausalLM(SPEC, ops).model.layers[0]
    parts = {**dict(layer.self_attn.named_children()), **dict(layer.mlp.named_children())}
    expected = SPEC.shapes.linear_layers(ranks)
    assert list(expected) == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    for name, shape in expected.items():
        biased = parts[name].bias is not None
        assert LinearShape(*parts[name].weight.shape, biased) == shape, name


def test_a_rank_holds_a_kv_head_where_there_are_fewer_than_ranks() -> None:
    assert [SPEC.shapes.heads_of_rank(ranks) for ranks in (1, 2, 4, 8)] == [(8, 2), (4, 1), (2, 1), (1, 1)]
