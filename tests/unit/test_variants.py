"""Norms, activations, scales and RoPE beyond Llama's: `fast` has the bytes of transformers' own modules, `exact` is
near float64, and the forms that combine ops have their bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, Starcoder2Config
from transformers.activations import ACT2FN
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.cohere2.modeling_cohere2 import apply_rotary_pos_emb as rotate_pairs
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, Gemma2TextScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2Config, Olmo2RMSNorm, Olmo2RotaryEmbedding
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rotate_halves
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2DecoderLayer

from evalengine.layers import create_ops
from evalengine.layers.ops import Ops
from evalengine.layers.variants import Activation, Norm
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.random_tensors import randn
from tests.references import reference

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6
NORMS = {
    "Llama": Norm(EPS),
    "Gemma": Norm(EPS, offset=1.0, cast_first=False),
    "OLMo 2": Norm(EPS, cast_first=False),
    "StarCoder2": Norm(EPS, kind="layer", cast_first=False, bias=True),
    "Cohere2": Norm(EPS, kind="layer", cast_first=False),
}
SHAPES = [(1, 1), (3, 7), (17, 64), (5, 149), (40, 1025), (0, 16)]


def fast(dtype: torch.dtype) -> Ops:
    return create_ops("fast", dtype, CPU)


def theirs(family: str, size: int) -> nn.Module:
    """transformers' own norm."""
    if family == "StarCoder2":
        return nn.LayerNorm(size, eps=EPS)
    kinds = {"Gemma": Gemma2RMSNorm, "OLMo 2": Olmo2RMSNorm, "Cohere2": Cohere2LayerNorm}
    return kinds[family](size, eps=EPS)


def test_which_modules_the_families_have() -> None:
    """GPT-NeoX's and StarCoder2's layers hold torch's LayerNorm, and the two GELUs."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    neox = GPTNeoXLayer(GPTNeoXConfig(**sizes), 0)
    starcoder = Starcoder2DecoderLayer(Starcoder2Config(**sizes, num_key_value_heads=2), 0)
    for layer in (neox, starcoder):
        assert type(layer.input_layernorm) is nn.LayerNorm and layer.input_layernorm.bias is not None
    assert type(neox.mlp.act) is type(ACT2FN["gelu"]) and type(starcoder.mlp.act) is type(ACT2FN["gelu_pytorch_tanh"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), SHAPES)
@pytest.mark.parametrize("family", ["Gemma", "OLMo 2", "StarCoder2", "Cohere2"])
def test_fast_norms_are_byte_equal_to_transformers(family: str, tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = randn(tokens, size).mul(30).to(dtype), randn(tokens, size, seed=1).to(dtype)
    module = theirs(family, size).to(dtype)
    with torch.no_grad():
        module.weight.copy_(randn(size, seed=2) * 9)
        bias = getattr(module, "bias", None)
        if bias is not None:
            bias.copy_(randn(size, seed=3))
        ops = fast(dtype)
        assert_bitwise_equal(ops.norm(x, module.weight, bias, NORMS[family]), module(x))
        normed, total = ops.add_norm(x, residual, module.weight, bias, NORMS[family])
        assert_bitwise_equal(total, residual + x)
        assert_bitwise_equal(normed, module(residual + x))


def test_one_norm_has_not_anothers_bytes() -> None:
    """In bfloat16 each family's norm differs from the others', so that equality can fail; Gemma 3's is Gemma 2's."""
    x, weight, bias = (randn(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate([(9, 64), (64,), (64,)]))
    bias.zero_()
    ops = fast(torch.bfloat16)
    results = {name: ops.norm(x, weight, bias if norm.bias else None, norm) for name, norm in NORMS.items()}
    names = list(results)
    for i, name in enumerate(names[:3]):
        assert all(count_differing(results[name], results[other]) > 10 for other in names[i + 1 :])
    gemma3 = Gemma3RMSNorm(64, eps=EPS).bfloat16()
    with torch.no_grad():
        gemma3.weight.copy_(weight)
        assert_bitwise_equal(results["Gemma"], gemma3(x))


@pytest.mark.parametrize("wrong", [{"offset": 1.0}, {"offset": 1.0, "kind": "layer"}, {"bias": True}])
def test_norms_that_nobody_has_are_refused(wrong: dict) -> None:
    with pytest.raises(AssertionError):
        Norm(EPS, **wrong)
    assert [name for name, norm in NORMS.items() if norm.is_plain] == ["Llama"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), SHAPES)
@pytest.mark.parametrize(
    ("kind", "name"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu"), ("relu2", "relu2")]
)
def test_fast_activations_are_byte_equal_to_transformers(
    kind: Activation, name: str, tokens: int, size: int, dtype: torch.dtype
) -> None:
    gate, up = (randn(tokens, size, seed=i).mul(8).to(dtype) for i in range(2))
    ops = fast(dtype)
    assert_bitwise_equal(ops.activation(torch.cat((gate, up), -1), kind, gated=True), ACT2FN[name](gate) * up)
    assert_bitwise_equal(ops.activation(gate, kind, gated=False), ACT2FN[name](gate))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 48), (5, 128)])
def test_fast_rope_with_a_wide_table_is_byte_equal_to_transformers(
    heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """OLMo 2's; and Cohere 2's, whose pairs stand side by side, once they are put apart."""
    config = Olmo2Config(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    rotary, ops, positions = Olmo2RotaryEmbedding(config), fast(dtype), torch.tensor([0, 1, 17, 999])
    q = randn(4, heads, head_dim, dtype=dtype)
    cos, sin = (table[positions] for table in ops.rope_table(rotary.inv_freq, 1000, 1.0, wide=True))
    assert cos.dtype == torch.float32
    their_cos, their_sin = rotary(q, positions[None])
    by_head = q.transpose(0, 1)[None]
    expected = rotate_halves(by_head, by_head, their_cos, their_sin)[0][0].transpose(0, 1)
    assert_bitwise_equal(ops.rope(q, cos, sin), expected)
    narrow = [table[positions] for table in ops.rope_table(rotary.inv_freq, 1000, 1.0)]
    assert dtype == torch.float32 or head_dim == 2 or count_differing(ops.rope(q, *narrow), expected) > 10
    side_by_side = q.unflatten(-1, (2, -1)).mT.flatten(-2).transpose(0, 1)[None]
    pairs = [table.repeat_interleave(2, -1)[None] for table in (cos, sin)]
    rotated = rotate_pairs(side_by_side, side_by_side, *pairs)[0][0].transpose(0, 1)
    assert_bitwise_equal(ops.rope(q, cos, sin), rotated.unflatten(-1, (-1, 2)).mT.flatten(-2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_scales_are_byte_equal_to_transformers(dtype: torch.dtype) -> None:
    """Gemma's embedding, whose factor is rounded to the dtype, and Granite's multipliers, which are not."""
    table, ids = randn(11, 72, dtype=dtype), torch.tensor([3, 0, 10])
    embedding = Gemma2TextScaledWordEmbedding(11, 72, 0, embed_scale=72**0.5).to(dtype)
    with torch.no_grad():
        embedding.weight.copy_(table)
        factor = torch.tensor(72**0.5, dtype=dtype).item()
        ops = fast(dtype)
        assert_bitwise_equal(ops.scale(ops.embedding(ids, table), factor), embedding(ids))
        if dtype == torch.bfloat16:
            assert count_differing(ops.scale(ops.embedding(ids, table), 72**0.5), embedding(ids)) > 0
    assert_bitwise_equal(ops.scale(table, 0.22), table * 0.22)


def test_fast_softcap_is_that_of_gemmas_code() -> None:
    logits = randn(5, 1001) * 40
    assert_bitwise_equal(fast(torch.float32).softcap(logits, 30.0), torch.tanh(logits / 30.0) * 30.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_is_within_a_rounding_of_float64(dtype: torch.dtype) -> None:
    ops = create_ops("exact", dtype, CPU)
    x, residual = randn(7, 149) * 20, randn(7, 149, seed=1)
    weight, bias = (randn(149, dtype=dtype, seed=i) for i in (2, 3))
    for norm in NORMS.values():
        normed, total = ops.add_norm(x, residual, weight, bias if norm.bias else None, norm)
        assert_bitwise_equal(total, ops.add(x, residual))
        assert_bitwise_equal(normed, ops.norm(total, weight, bias if norm.bias else None, norm))
        assert normed.dtype == torch.float32
        truth = (
            reference.layer_norm(total, weight, bias if norm.bias else None, EPS)
            if norm.kind == "layer"
            else reference.rms_norm(total, weight, EPS, norm.offset)
        )
        assert ((normed - truth).abs() <= 2.0**-24 * truth.abs() * 1.01 + 1e-9).all()
    assert_bitwise_equal(ops.scale(x, 0.22), (x.double() * 0.22).float())
    assert ((ops.softcap(x, 30.0) - reference.softcap(x, 30.0)).abs() <= 2.0**-23 * x.abs()).all()
    for kind in ("silu", "gelu", "gelu_tanh", "relu2"):
        truth = reference.gated(x[:, :148], kind)
        assert ((ops.activation(x[:, :148], kind, gated=True) - truth).abs() <= 2.0**-23 * truth.abs() + 1e-12).all()


@pytest.mark.parametrize("level", ["fast", "exact"])
@pytest.mark.parametrize("family", ["Gemma", "OLMo 2"])
def test_q_and_k_take_the_norm(level: str, family: str) -> None:
    """The form for q, k and v norms by the variant, rotates by the wide table, and stores, as its parts do."""
    ops, norm = create_ops(level, torch.bfloat16, CPU), NORMS[family]
    q, k, v = (randn(5, 3, 8, dtype=ops.activation_dtype, seed=i) for i in range(3))
    weights = [randn(8, dtype=torch.bfloat16, seed=i) for i in (4, 5)]
    tables = ops.rope_table(10000.0 ** -(torch.arange(0, 8, 2) / 8), 9, 1.0, wide=True)
    cos, sin = (table[:5] for table in tables)
    pools, expected = (torch.zeros(2, 2, 4, 3, 8, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.tensor([6, 0, -1, 3, 5])
    rotated = ops.qk_norm_rope_store((q, k, v), (*weights, norm), cos, sin, pools, slots)
    heads = [ops.norm(x, weight, None, norm) for x, weight in zip((q, k), weights, strict=True)]
    ops.store_kv(ops.rope(heads[1], cos, sin), v, expected, slots)
    assert_bitwise_equal(rotated, ops.rope(heads[0], cos, sin))
    assert_bitwise_equal(pools, expected)
    other = ops.qk_norm_rope_store((q, k, v), (*weights, NORMS["Llama"]), cos, sin, pools, slots)
    assert (level == "exact" and family == "OLMo 2") or count_differing(other, rotated) > 5
