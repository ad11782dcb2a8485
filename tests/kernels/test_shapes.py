"""`Shapes`: schedules are verified for the sizes of the weights that the layers really make."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from evalengine.kernels.attention_variant import Latent
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.kernels.shapes import LinearShape
from evalengine.layers.exact import ExactOps
from evalengine.layers.parallel import TensorParallel
from evalengine.layers.recurrent import CausalConv
from evalengine.layers.rows import HeadNorm
from evalengine.models.decoder import DecoderForCausalLM
from evalengine.models.hf_config import from_hf
from evalengine.models.spec import Block, ModelSpec, RopeSpec
from tests.parity.families import CASES, case, configuration

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_so_are_those_of_experts(ranks: int) -> None:
    """Of the router, unless it is a product in float32, of the shared expert, and of one of the others."""
    ops = ExactOps(torch.float32, torch.device("cpu"))
    ops.tp = TensorParallel(ranks - 1, ranks, group=SimpleNamespace())
    mixture = Mixture(Router(6, 2, bias=True), 24, bias=True, shared_size=40, shared_gate=True)
    spec = replace(SPEC, blocks=(Block(mixture=mixture),))
    mlp = DecoderForCausalLM(spec, ops).model.layers[0].mlp
    layers, experts = spec.shapes.linear_layers(ranks), spec.shapes.expert_layers(ranks)
    made = {
        "gate": mlp.gate,
        "shared gate_up_proj": mlp.shared_expert.gate_up_proj,
        "shared down_proj": mlp.shared_expert.down_proj,
        "shared_expert_gate": mlp.shared_expert_gate,
    }
    assert list(layers) == ["qkv_proj", "o_proj", *made]
    for name, layer in made.items():
        assert LinearShape(*layer.weight.shape, getattr(layer, "bias", None) is not None) == layers[name], name
    for name, shape in experts.items():
        layer = getattr(mlp.experts, name)
        assert LinearShape(*layer.weight.shape[1:], layer.bias is not None) == shape and len(layer.weight) == 6
    wide = replace(spec, blocks=(Block(mixture=replace(mixture, router=Router(6, 2, wide=True))), Block()))
    assert "gate" not in wide.shapes.linear_layers() and "down_proj" in wide.shapes.linear_layers()


@pytest.mark.parametrize("q_rank", [None, 20])
def test_so_are_those_of_latent_attention(q_rank: int | None) -> None:
    """Every rank has the whole of the products that make latents, and its heads of those that expand them."""
    ops = ExactOps(torch.float32, torch.device("cpu"))
    ops.tp = TensorParallel(1, 2, group=SimpleNamespace())
    rope = RopeSpec(theta=1e4, rotary_dim=8, at_end=True)
    spec = replace(SPEC, num_kv_heads=8, rope=rope, blocks=(Block(latent=Latent(12, 10, 8, q_rank)),))
    attention = DecoderForCausalLM(spec, ops).model.layers[0].self_attn
    layers = spec.shapes.linear_layers(2)
    assert list(layers) == ["a_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_up_proj", "down_proj"]
    for name in list(layers)[:4]:
        layer = getattr(attention, name)
        assert LinearShape(*layer.weight.shape, layer.bias is not None) == layers[name], name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_so_are_those_of_every_family(name: str, ranks: int) -> None:
    """Each shape of the tiny models' configurations is a weight's, and each weight of a product has its shape."""
    spec = from_hf(configuration(*case(name)))
    ops = ExactOps(torch.float32, torch.device("cpu"))
    ops.tp = TensorParallel(ranks - 1, ranks, group=SimpleNamespace())
    layers, experts = set(), set()
    for path, layer in DecoderForCausalLM(spec, ops).model.layers.named_modules():
        weight = getattr(layer, "weight", None)
        if weight is None or weight.ndim < 2 or isinstance(layer, CausalConv | HeadNorm):
            continue
        shape = LinearShape(*weight.shape[-2:], getattr(layer, "bias", None) is not None)
        (experts if ".experts." in path else layers).add(shape)
    wide = spec.mixture is not None and spec.mixture.router.wide
    router = {LinearShape(spec.mixture.router.experts, spec.hidden_size)} if wide and spec.mixture else set()
    assert layers - router == set(spec.shapes.linear_layers(ranks).values())
    assert experts == set(spec.shapes.expert_layers(ranks).values())
