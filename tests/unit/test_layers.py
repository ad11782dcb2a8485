"""Layers: sharding, the fast level's ops against transformers' modules (bytes), RoPE tables."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.kernels import exact
from evalengine.layers import create_ops
from evalengine.layers.base import Layer
from evalengine.layers.embedding import LMHead, VocabEmbedding
from evalengine.layers.linear import MergedLinear, OutputLinear, QKVLinear
from evalengine.layers.ops import GREEDY, Ops
from evalengine.layers.parallel import TensorParallel, vocabulary_ranges
from evalengine.layers.rows import HeadNorm
from evalengine.layers.variants import Norm
from evalengine.models.hf_config import from_hf, spec_from_json
from evalengine.models.registry import family_of_type, get_family
from evalengine.models.spec import RopeSpec

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def fast(dtype: torch.dtype = torch.float32) -> Ops:
    return create_ops("fast", dtype, CPU)


def of_rank(rank: int, size: int, level: str = "exact") -> Ops:
    """The ops of one rank, for holding its weights: there is no other rank to exchange anything with."""
    return create_ops(level, torch.float32, CPU, tp=TensorParallel(rank, size, group=object()))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bytes(a.contiguous().view(torch.uint8).numpy()) == bytes(b.contiguous().view(torch.uint8).numpy())
    )


def fill(layer: Layer, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Load the whole checkpoint tensors into one rank's layer; returns its parameters."""
    for shard in layer.checkpoint_shards("proj"):
        for kind, param in layer.named_parameters(recurse=False):
            layer.weight_loader(param, whole[f"{shard}.{kind}"], shard)
    return dict(layer.named_parameters(recurse=False))


def random_checkpoint(layer: Layer) -> dict[str, Tensor]:
    """Random tensors for all shards of the layer."""
    tensors = {}
    for shard, shape in layer.checkpoint_shards("proj").items():
        tensors |= {f"{shard}.weight": torch.randn(shape), f"{shard}.bias": torch.randn(shape[:1])}
    return tensors


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "build",
    [
        lambda ops: OutputLinear(ops, 5, 12, bias=True),
        lambda ops: VocabEmbedding(ops, 19, 3),
        lambda ops: LMHead(ops, 19, 3),
        lambda ops: VocabEmbedding(ops, 2, 3),  # there are fewer ids than ranks: some ranks hold none
    ],
)
def test_row_shards_concatenate_to_the_whole(build, tp_size: int) -> None:
    whole = random_checkpoint(build(of_rank(0, 1)))
    ranks = [fill(build(of_rank(r, tp_size)), whole) for r in range(tp_size)]
    for kind in ranks[0]:
        assert same_bytes(torch.cat([rank[kind] for rank in ranks]), whole[f"proj.{kind}"])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_what_is_summed_over_ranks_is_cut_by_columns_and_has_one_bias(tp_size: int) -> None:
    whole = random_checkpoint(OutputLinear(of_rank(0, 1, "fast"), 8, 12, bias=True))
    ranks = [fill(OutputLinear(of_rank(r, tp_size, "fast"), 8, 12, bias=True), whole) for r in range(tp_size)]
    assert same_bytes(torch.cat([rank["weight"] for rank in ranks], dim=1), whole["proj.weight"])
    assert same_bytes(ranks[0]["bias"], whole["proj.bias"]) and not any(rank["bias"].any() for rank in ranks[1:])


@pytest.mark.parametrize(
    ("vocabulary", "size", "block"), [(1, 1, 1), (9001, 2, 4096), (9001, 8, 4096), (151_936, 4, 1)]
)
def test_every_token_id_has_one_rank_and_borders_lie_between_blocks(vocabulary: int, size: int, block: int) -> None:
    ranges = vocabulary_ranges(vocabulary, size, block)
    assert len(ranges) == size and [i for part in ranges for i in part] == list(range(vocabulary))
    assert all(part.start % block == 0 for part in ranges if part)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 2 * block


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_merged_shards_concatenate_within_each_part(tp_size: int) -> None:
    sizes = {"gate_proj": 12, "up_proj": 8}
    whole = random_checkpoint(MergedLinear(fast(), 5, sizes, bias=True))
    layers = [MergedLinear(of_rank(r, tp_size), 5, sizes, bias=True) for r in range(tp_size)]
    ranks = [fill(layer, whole) for layer in layers]
    for kind in ("weight", "bias"):
        gates = torch.cat([rank[kind][: 12 // tp_size] for rank in ranks])
        ups = torch.cat([rank[kind][12 // tp_size :] for rank in ranks])
        assert same_bytes(gates, whole[f"gate_proj.{kind}"]) and same_bytes(ups, whole[f"up_proj.{kind}"])


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 6), (2, 6), (2, 2), (4, 2), (4, 1)])
def test_norms_of_each_head_follow_their_heads(tp_size: int, heads: int) -> None:
    """A rank holds the weights of the heads that it projects, also where several ranks hold one head."""
    norm = Norm(1e-5, kind="layer", cast_first=False, bias=True)
    whole = random_checkpoint(HeadNorm(fast(), heads, 4, norm))
    stacked = torch.stack([whole[f"proj.{head}.weight"] for head in range(heads)])
    for rank in range(tp_size):
        ops = of_rank(rank, tp_size)
        own = fill(HeadNorm(ops, heads, 4, norm), whole)
        assert list(own) == ["weight"]
        qkv = QKVLinear(ops, 3, 2 * tp_size * heads, heads, 4)
        assert same_bytes(own["weight"], qkv.own_heads(stacked[None], "k_proj")[0])


@pytest.mark.parametrize(("tp_size", "kv_heads"), [(1, 2), (2, 2), (2, 1), (4, 4), (4, 2), (4, 1)])
def test_qkv_shards_by_heads_and_replicates_kv_heads(tp_size: int, kv_heads: int) -> None:
    heads, head_dim, hidden = 8, 6, 5
    whole = random_checkpoint(QKVLinear(fast(), hidden, heads, kv_heads, head_dim, bias=True))
    group = heads // kv_heads
    for rank in range(tp_size):
        layer = QKVLinear(of_rank(rank, tp_size), hidden, heads, kv_heads, head_dim, True)
        weight = fill(layer, whole)["weight"]
        q, k, v = layer.split(weight.t())  # features stand in the place of tokens: [hidden, heads, head_dim]
        first = rank * heads // tp_size
        for i in range(q.shape[1]):
            head = first + i
            kv_head, local = head // group, i // (q.shape[1] // k.shape[1])
            for part, name, index, where in ((q, "q", head, i), (k, "k", kv_head, local), (v, "v", kv_head, local)):
                rows = slice(index * head_dim, (index + 1) * head_dim)
                assert same_bytes(part[:, where].t(), whole[f"{name}_proj.weight"][rows]), (rank, name, head)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 7), (17, 64), (5, 149), (2, 1025)])
def test_element_wise_ops_are_byte_equal_to_transformers(tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens + size)
    ops = fast(dtype)
    x = torch.randn(tokens, size).mul(30).to(dtype)
    norm = Qwen3RMSNorm(size, eps=1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(size) * 9)
        assert same_bytes(ops.rms_norm(x, norm.weight, 1e-6), norm(x))
    gate, up = torch.randn(2, tokens, size).mul(8).to(dtype)
    activation = Qwen3MLP(Qwen3Config(hidden_size=8, intermediate_size=8)).act_fn
    assert same_bytes(ops.silu_and_mul(torch.cat((gate, up), dim=-1)), activation(gate) * up)
    assert same_bytes(ops.add(x, gate), gate + x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 48), (8, 64), (5, 128)])
def test_rope_is_byte_equal_to_transformers(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = LlamaConfig(hidden_size=heads * head_dim, num_attention_heads=heads, rope_parameters=rope)
    ops = fast(dtype)
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 17, 999])
    cos, sin = ops.rope_table(rotary.inv_freq, 1000, 1.0)
    q = torch.randn(4, heads, head_dim).to(dtype)
    their_cos, their_sin = rotary(q, positions[None])
    expected, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], their_cos, their_sin)
    assert same_bytes(ops.rope(q, cos[positions], sin[positions]), expected[0].transpose(0, 1))


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("head_dim", [2, 48, 64, 80, 128])
@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", **LLAMA3}])
@pytest.mark.parametrize("theta", [10000.0, 130000.0, 500000.0])
def test_inv_freq_equals_transformers_to_an_ulp(theta: float, rope: dict, head_dim: int) -> None:
    parameters = {"rope_type": "default", "rope_theta": theta, **rope}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, rope_parameters=parameters)
    expected = LlamaRotaryEmbedding(config).inv_freq
    actual = from_hf(config).rope.inv_freq(head_dim)
    # torch's own float32 pow is off by an ulp for some numbers; blending carries that error through a few operations.
    torch.testing.assert_close(actual, expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 32}])
@pytest.mark.parametrize("rope_type", ["yarn", "llama3", "linear"])
def test_a_top_level_original_length_counts_as_in_transformers(rope_type: str, inner: dict) -> None:
    """It precedes the one in `rope_parameters`."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, **inner}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields = {"max_position_embeddings": 4096, "rope_parameters": rope, "original_max_position_embeddings": 16}
    sizes = {"hidden_size": 32, "num_attention_heads": 4}
    spec = spec_from_json({"model_type": "llama", **sizes, **fields})
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict({**sizes, **deepcopy(fields)}))
    torch.testing.assert_close(spec.rope.inv_freq(8), theirs.inv_freq, rtol=5e-7, atol=0)
    assert spec.max_position_embeddings == (64 if rope_type == "yarn" else 4096)


@pytest.mark.slow  # two processes; kernels/test_exact_isa takes the instructions away from every op
def test_inv_freq_bits_do_not_depend_on_the_instruction_set() -> None:
    code = (
        "import torch\n"
        "from evalengine.models.spec import RopeSpec\n"
        "sizes = (64, 80, 96, 128, 256)\n"
        "ours = [RopeSpec(theta=130000.0).inv_freq(d) for d in sizes]\n"
        "torchs = [1.0 / 130000.0 ** (torch.arange(0, d, 2).float() / d) for d in sizes]\n"
        "for tensors in (ours, torchs):\n"
        "    print(torch.cat(tensors).numpy().tobytes().hex())\n"
    )
    outputs = []
    for more in ({}, {"ATEN_CPU_CAPABILITY": "default"}):
        env = {**os.environ, **more}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        outputs.append(done.stdout.split())
    assert outputs[0][0] == outputs[1][0]
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert outputs[0][1] != outputs[1][1], "torch's own pow agrees here: this test shows nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store_kv_rounds_to_the_pool_and_skips_slot_minus_one(dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 3, 2, 4)
    k_cache, v_cache = torch.full((2, 2, 5, 2, 4), 9.0, dtype=dtype)
    fast(dtype).store_kv(k, v, (k_cache, v_cache), torch.tensor([7, -1, 0]))
    for new, cache in ((k, k_cache), (v, v_cache)):
        assert same_bytes(cache[1, 2], new[0].to(dtype)) and same_bytes(cache[0, 0], new[2].to(dtype))
        cache[1, 2] = cache[0, 0] = 9.0
        assert (cache == 9.0).all()


@pytest.mark.parametrize("level", ["fast", "exact"])
def test_fused_forms_are_the_forms_they_are_made_of(level: str) -> None:
    torch.manual_seed(0)
    ops = create_ops(level, torch.bfloat16, CPU)
    x, residual = torch.randn(2, 5, 24).to(torch.bfloat16).to(ops.activation_dtype)
    weight, head_weight = torch.randn(24).to(torch.bfloat16), torch.randn(8).to(torch.bfloat16)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert same_bytes(total, ops.add(x, residual)) and same_bytes(normed, ops.rms_norm(total, weight, 1e-6))
    q, k, v = x.view(5, 3, 8), residual.view(5, 3, 8), x.view(5, 3, 8)
    cos, sin = (table[:5] for table in ops.rope_table(RopeSpec(theta=1e4).inv_freq(8), 9, 1.0))
    pools = torch.zeros(2, 2, 4, 3, 8, dtype=torch.bfloat16)
    expected = pools.clone()
    slots = torch.tensor([6, 0, -1, 3, 5])
    for q_weight in (head_weight, None):
        norms = None if q_weight is None else (q_weight, q_weight, Norm(1e-6))
        rotated = ops.qk_norm_rope_store((q, k, v), norms, cos, sin, tuple(pools), slots)
        heads = [x if q_weight is None else ops.rms_norm(x, q_weight, 1e-6) for x in (q, k)]
        ops.store_kv(ops.rope(heads[1], cos, sin), v, tuple(expected), slots)
        assert same_bytes(rotated, ops.rope(heads[0], cos, sin)) and same_bytes(pools, expected)
        assert pools.any()


@pytest.mark.parametrize("level", ["fast", "exact"])
def test_read_out(level: str) -> None:
    """The greedy token is the lowest id among equals; a row with a NaN has the token V and no logprob."""
    logits = torch.randn(4, 7)
    logits[1, 3:6] = logits[1].max() + 1
    logits[2, 4] = torch.nan
    rows, columns = torch.tensor([0, 0, 1, 1, 2, 3]), torch.tensor([6, 0, GREEDY, 5, GREEDY, GREEDY])
    ops = create_ops(level, torch.float32, CPU)
    greedy, values = ops.read_out(logits, rows, columns)
    logprobs = ops.log_softmax(logits)
    best = [int(logits[0].argmax()), 3, 7, int(logits[3].argmax())]
    assert greedy.dtype == torch.int64 and greedy.tolist() == best
    expected = [logprobs[0, 6], logprobs[0, 0], logprobs[1, 3], logprobs[1, 5], logprobs[2, 6], logprobs[3, best[3]]]
    assert same_bytes(values, torch.stack(expected)) and bool(values[4].isnan())
    greedy, values = ops.read_out(logits, None, torch.tensor([6, 5, GREEDY, GREEDY]))
    assert greedy.tolist() == best and same_bytes(values, torch.stack([expected[i] for i in (0, 3, 4, 5)]))


@pytest.mark.parametrize("level", ["fast", "exact"])
def test_logits_are_float32_and_not_rounded_to_bfloat16(level: str) -> None:
    ops = create_ops(level, torch.bfloat16, CPU)
    x, weight = torch.randn(3, 64).to(torch.bfloat16), torch.randn(33, 64).to(torch.bfloat16)
    logits = ops.lm_head(x.to(ops.activation_dtype), ops.prepare_weight(weight, lm_head=True))
    torch.testing.assert_close(logits, (x.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-5)


def test_exact_keeps_no_original_weight_and_outputs_float32() -> None:
    layer = OutputLinear(create_ops("exact", torch.bfloat16, CPU), 5, 3)
    fill(layer, random_checkpoint(layer))
    layer.finalize()
    assert layer.weight is None and isinstance(layer.prepared, exact.ExactWeight)
    assert layer(torch.randn(2, 5)).dtype == torch.float32


def test_unusable_levels_name_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be native, exact or fast"):
        create_ops("precise", torch.bfloat16, CPU)

    def broken(device: torch.device) -> None:
        raise RuntimeError("float64 products miss bits")

    monkeypatch.setattr(exact, "self_test", broken)
    with pytest.raises(EvalEngineError, match=r"engine.device=cpu: float64 products miss bits"):
        create_ops("exact", torch.float32, CPU)


def test_config_errors_are_listed_together() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 4.0}
    config = Qwen2Config(hidden_act="gelu", rope_parameters=rope)
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ConfigError) as caught:
        from_hf(config)
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert all(word in text for word in ("hidden_act='gelu'", "dynamic", "quantization_config"))


def test_inactive_sliding_window_is_accepted() -> None:
    spec = from_hf(Qwen2Config(use_sliding_window=False, sliding_window=4096, eos_token_id=[5, 7]))
    assert spec.attention_bias and not spec.attention_output_bias and spec.eos_token_ids == (5, 7)
    assert spec.rope == RopeSpec(theta=10000.0)


def test_unknown_architectures_list_the_supported_ones() -> None:
    supported = r"LlamaForCausalLM \(llama\), .*Qwen2ForCausalLM \(qwen2\), .*Qwen3ForCausalLM \(qwen3\)"
    with pytest.raises(ConfigError, match=f"MambaForCausalLM is not supported; supported: .*{supported}"):
        get_family("MambaForCausalLM")
    with pytest.raises(ConfigError, match=supported):
        family_of_type("mamba")
