"""`CudaOps` against plain torch's `FastOps` and float64: under Triton's interpreter here, on the device where there is
one. Its fused forms give the bytes of the forms they are made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.layers import create_ops
from evalengine.layers.fast import FastOps
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import GREEDY, Ops
from evalengine.layers.variants import Norm
from tests.bitwise import assert_bitwise_equal
from tests.references import reference

pytest.importorskip("triton")
from evalengine.layers.cuda import CudaFastOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # Triton's interpreter is wrong for bfloat16
DTYPES = [torch.float32, HALF]
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-7}  # twice the largest relative error of one rounding


def ops_for(dtype: torch.dtype) -> tuple[Ops, Ops]:
    """Our ops, and plain torch's on the same device."""
    return CudaFastOps(dtype, DEVICE, "triton"), FastOps(dtype, DEVICE)


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor, roundings: int, floor: float = 1e-2) -> None:
    """They differ by at most so many roundings, relative to the value or, where terms cancel, to `floor`."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs()
    bound = roundings * ROUNDING[actual.dtype] * expected.double().abs().clamp(min=floor)
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (3, 149), (0, 16)])
def test_row_and_element_ops_are_plain_torchs(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    ours, plain = ops_for(dtype)
    x, residual = random(2, tokens, hidden, dtype=dtype, scale=3.0)
    weight = random(hidden, dtype=dtype, seed=1)
    assert_close(ours.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6), 4)
    assert_bitwise_equal(ours.add(x, residual), plain.add(x, residual))
    gate_up = random(tokens, 2 * hidden, dtype=dtype, scale=4.0)
    assert_close(ours.silu_and_mul(gate_up), plain.silu_and_mul(gate_up), 4)
    logits = random(tokens, hidden, dtype=torch.float32, scale=9.0)
    assert_close(ours.log_softmax(logits), plain.log_softmax(logits), 4, floor=1.0)
    ids = torch.arange(tokens, device=DEVICE) % 5
    table = random(5, hidden, dtype=dtype)
    assert_bitwise_equal(ours.embedding(ids, table), table[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 48)])
def test_rope_and_store_kv_are_plain_torchs(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    ours, plain = ops_for(dtype)
    inv_freq = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    tables = ours.rope_table(inv_freq, 40, 1.5)
    for actual, expected in zip(tables, plain.rope_table(inv_freq, 40, 1.5), strict=True):
        assert_bitwise_equal(actual, expected)
    positions = torch.tensor([0, 3, 39, 3, 7], device=DEVICE)
    cos, sin = (table[positions] for table in tables)
    k = random(5, heads, head_dim, dtype=dtype)
    v = random(5, heads, head_dim, dtype=dtype, seed=1)
    assert_bitwise_equal(ours.rope(k, cos, sin), plain.rope(k, cos, sin))
    slots = torch.tensor([6, -1, 0, 20, 13], device=DEVICE)
    pools = [torch.full((2, 3, 7, heads, head_dim), 9.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    for ops, (k_cache, v_cache) in zip((ours, plain), pools, strict=True):
        ops.store_kv(k, v, (k_cache, v_cache), slots)
    assert_bitwise_equal(*pools)
    assert (pools[0] != 9.0).any(-1).sum() == 4 * heads * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_fused_gives_the_same_bytes(dtype: torch.dtype) -> None:
    ours, _ = ops_for(dtype)
    x, residual = random(2, 5, 101, dtype=dtype, scale=3.0)
    weight = random(101, dtype=dtype, seed=1)
    fused, parts = (form(x, residual, weight, 1e-6) for form in (ours.add_rms_norm, in_parts(ours).add_rms_norm))
    for actual, expected in zip(fused, parts, strict=True):
        assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [True, False])
def test_qk_norm_rope_store_fused_gives_the_same_bytes(with_norms: bool, dtype: torch.dtype) -> None:
    ours, _ = ops_for(dtype)
    heads, kv_heads, head_dim = 4, 2, 24
    qkv = random(5, (heads + 2 * kv_heads) * head_dim, dtype=dtype, scale=3.0)
    q, k, v = (
        part.unflatten(-1, (-1, head_dim))
        for part in qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    )
    norms = (*random(2, head_dim, dtype=dtype, seed=1), Norm(1e-6)) if with_norms else None
    cos, sin = random(2, 5, head_dim // 2, dtype=dtype, seed=2)
    slots = torch.tensor([6, -1, 0, 20, 13], device=DEVICE)
    rotated, pools = [], [torch.zeros(2, 3, 7, kv_heads, head_dim, dtype=dtype, device=DEVICE) for _ in range(2)]
    for ops, (k_cache, v_cache) in zip((ours, in_parts(ours)), pools, strict=True):
        rotated.append(ops.qk_norm_rope_store((q, k, v), norms, cos, sin, (k_cache, v_cache), slots))
    assert_bitwise_equal(*rotated)
    assert_bitwise_equal(*pools)
    assert pools[0].any()


NORMS = [
    Norm(1e-6, offset=1.0, cast_first=False),
    Norm(1e-6, cast_first=False),
    Norm(1e-6, kind="layer", bias=True),
    Norm(1e-6, kind="layer"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [Norm(1e-6), *NORMS], ids=str)
def test_norms_are_plain_torchs_and_the_fused_form_has_their_bytes(norm: Norm, dtype: torch.dtype) -> None:
    ours, plain = ops_for(dtype)
    x, residual = random(2, 5, 149, dtype=dtype, scale=3.0)
    weight, bias = random(149, dtype=dtype, seed=1), random(149, dtype=dtype, seed=2) if norm.bias else None
    normed = ours.norm(x, weight, bias, norm)
    assert_close(normed, plain.norm(x, weight, bias, norm), 6, floor=0.1)
    fused, total = ours.add_norm(x, residual, weight, bias, norm)
    assert_bitwise_equal(total, x + residual)
    assert_bitwise_equal(fused, ours.norm(total, weight, bias, norm))
    if norm.is_plain:
        assert_bitwise_equal(normed, ours.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_scales_and_caps_are_plain_torchs(dtype: torch.dtype) -> None:
    ours, plain = ops_for(dtype)
    x = random(3, 298, dtype=dtype, scale=2.0)
    for kind in ("silu", "gelu", "gelu_tanh", "relu2"):
        for gated in (True, False):
            mine, theirs = (ops.activation(x, kind, gated=gated) for ops in (ours, plain))
            assert_close(mine, theirs, 8, floor=4.0)
    assert_bitwise_equal(ours.activation(x, "silu", gated=True), ours.silu_and_mul(x))
    assert_bitwise_equal(ours.scale(x, 0.22), plain.scale(x, 0.22))
    logits = random(3, 149, dtype=torch.float32, scale=40.0)
    assert_close(ours.softcap(logits, 30.0), plain.softcap(logits, 30.0), 6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS[:2], ids=["Gemma", "OLMo 2"])
def test_qk_norm_rope_store_of_other_norms_and_a_wide_table(norm: Norm, dtype: torch.dtype) -> None:
    ours, plain = ops_for(dtype)
    tables = ours.rope_table(10000.0 ** -(torch.arange(0, 24, 2) / 24), 40, 1.5, wide=True)
    assert all(table.dtype == torch.float32 for table in tables)
    cos, sin = (table[torch.tensor([0, 3, 39, 3, 7], device=DEVICE)] for table in tables)
    q, k, v = random(5, 8, 24, dtype=dtype, scale=3.0).split([4, 2, 2], dim=1)
    weights = tuple(random(2, 24, dtype=dtype, seed=1))
    assert_bitwise_equal(ours.rope(q, cos, sin), plain.rope(q, cos, sin))
    slots = torch.tensor([6, -1, 0, 20, 13], device=DEVICE)
    rotated, pools = [], [torch.zeros(2, 3, 7, 2, 24, dtype=dtype, device=DEVICE) for _ in range(2)]
    for ops, (k_cache, v_cache) in zip((ours, in_parts(ours)), pools, strict=True):
        rotated.append(ops.qk_norm_rope_store((q, k, v), (*weights, norm), cos, sin, (k_cache, v_cache), slots))
    assert_bitwise_equal(*rotated)
    assert_bitwise_equal(*pools)
    assert pools[0].any()


def one_nan(x: Tensor) -> Tensor:
    """x with one NaN for all NaNs, as on a GPU; the interpreter is numpy, where a NaN keeps its operand's bits."""
    return x if DEVICE.type == "cuda" or not x.is_floating_point() else torch.where(x.isnan(), torch.nan, x)


def test_read_out_fused_gives_the_same_bytes() -> None:
    """Rows with ties, with logits that differ where their logprobs do not, a NaN or an infinity; also fewer columns."""
    ours, _ = ops_for(torch.float32)
    logits = random(6, 9001, dtype=torch.float32, scale=5.0)
    logits[1, [8999, 5000, 77]] = 40.0
    logits[2, 9] = torch.nan
    logits[3, 9] = torch.inf
    logits[4] = 0.0
    logits[4, 8998] = 1e-8
    assert ours.log_softmax(logits[4:5]).unique().numel() == 1
    rows = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 5], device=DEVICE)
    columns = torch.tensor([0, 9000, GREEDY, 77, GREEDY, 3, GREEDY, 9, GREEDY, GREEDY], device=DEVICE)
    for some in (slice(None), slice(0, 1), slice(0, 0)):
        fused, parts = (ops.read_out(logits, rows[some], columns[some]) for ops in (ours, in_parts(ours)))
        for actual, expected in zip(fused, parts, strict=True):
            assert_bitwise_equal(actual, expected)
    by_row = columns[torch.tensor([0, 2, 4, 6, 8, 9], device=DEVICE)]
    for actual, expected in zip(*(ops.read_out(logits, None, by_row) for ops in (ours, in_parts(ours))), strict=True):
        assert_bitwise_equal(one_nan(actual), one_nan(expected))
    greedy = ours.read_out(logits, rows, columns)[0].tolist()
    assert greedy[1:3] == [77, 9001] and greedy[4] == 0


def in_parts(ops: Ops) -> Ops:
    """The same ops, whose fused forms are composed of the others."""

    class Parts(CudaFastOps):
        add_rms_norm = Ops.add_rms_norm
        qk_norm_rope_store = Ops.qk_norm_rope_store
        read_out = Ops.read_out

    return Parts(ops.dtype, ops.device, "triton")


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_by_triton_is_float64s_within_rounding(dtype: torch.dtype) -> None:
    ours, _ = ops_for(dtype)
    lens, block_size = [(1, 5), (1, 33), (6, 6), (3, 20)], 16
    pages = [[7], [2, 5, 0], [1], [4, 3]]
    q = random(sum(n for n, _ in lens), 4, 16, dtype=dtype)
    k_cache, v_cache = random(2, 8, block_size, 2, 16, dtype=dtype, seed=1)
    metadata = AttentionMetadata.build([n for n, _ in lens], [n for _, n in lens], pages, block_size, DEVICE)
    output = ours.attention(q, (k_cache, v_cache), metadata, AttentionVariant(0.25)).cpu()
    tensors = [x.cpu() for x in (q, k_cache, v_cache.abs(), v_cache)]
    truth, magnitude = (
        reference.paged_attention(
            *tensors[:2], v, metadata.block_table.cpu(), metadata.query_lens, metadata.kv_lens, AttentionVariant(0.25)
        )
        for v in (tensors[3], tensors[2])
    )
    # In bfloat16, weights and output are rounded, 2^-8 each; in float32, the scores and the exponential have errors.
    bound = (8 if dtype == torch.float32 else 1.1) * ROUNDING[dtype] * magnitude
    assert ((output.double() - truth).abs() <= bound).all()


@pytest.mark.gpu
def test_the_levels_classes_on_cuda() -> None:
    assert type(create_ops("fast", torch.bfloat16, DEVICE)) is CudaFastOps
    assert create_ops("native", torch.bfloat16, DEVICE).name == "native"


def test_products_are_plain_torchs() -> None:
    ours, plain = ops_for(torch.float32)
    x, weight, bias = (random(*shape, dtype=torch.float32) for shape in ((3, 16), (5, 16), (5,)))
    for ops in (ours, plain):
        prepared = ops.prepare_weight(weight, lm_head=True)
        assert_bitwise_equal(ops.linear(x, prepared, bias), torch.nn.functional.linear(x, weight, bias))
        assert ops.lm_head(x, prepared).dtype == torch.float32
    assert ours.name == plain.name == "fast" and ours.fused and not plain.fused
