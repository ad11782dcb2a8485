"""The fused q/k norm, RoPE and KV write has the bytes of the three kernels one after another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels import kv_cache, qkv, rms_norm, rope
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
EPS = 1e-6
SHAPES = [  # tokens, query heads, KV heads, head_dim, page size
    (0, 2, 1, 64, 16),
    (1, 1, 1, 48, 16),
    (7, 9, 3, 64, 16),
    (5, 5, 1, 80, 64),
    (3, 17, 17, 96, 24),
    (11, 8, 2, 128, 16),
    (2, 3, 1, 256, 256),
]


@dataclass(frozen=True)
class Step:
    """A layer's tensors after its qkv projection: q, k, v [tokens, heads, D], norms, tables [tokens, D / 2], slots."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    cos: Tensor
    sin: Tensor
    slots: Tensor
    pools: Tensor  # [2, B, block_size, Hkv, D]
    variant: dict[str, Any] = field(default_factory=dict)  # of the norms: offset and cast_first

    def fused(self) -> tuple[Tensor, Tensor]:
        """Returns the rotated q, and a copy of the pools after the write, by the fused kernel."""
        pools = self.pools.clone()
        arguments = (self.q, self.k, self.v, self.q_weight, self.k_weight, EPS, self.cos, self.sin)
        return qkv.qk_norm_rope_store(*arguments, *pools, self.slots, **self.variant), pools

    def unfused(self) -> tuple[Tensor, Tensor]:
        """Returns what `fused` returns, by the three kernels."""
        pools, q, k = self.pools.clone(), self.q, self.k
        if self.q_weight is not None and self.k_weight is not None:
            q = rms_norm.rms_norm(q, self.q_weight, EPS, **self.variant)
            k = rms_norm.rms_norm(k, self.k_weight, EPS, **self.variant)
        kv_cache.store_kv(rope.rope(k, self.cos, self.sin), self.v, *pools, self.slots)
        return rope.rope(q, self.cos, self.sin), pools

    def tokens(self, rows: Tensor) -> Step:
        """Returns the step with only the tokens `rows`."""
        selected = {name: getattr(self, name)[rows] for name in ("q", "k", "v", "cos", "sin", "slots")}
        return replace(self, **selected)


def step(tokens: int, q_heads: int, kv_heads: int, head_dim: int, page: int, dtype: torch.dtype, norm: bool) -> Step:
    """Makes a step: magnitudes vary between heads, weights reach about 100, slots are shuffled, a third of them -1."""
    generator = torch.Generator().manual_seed(tokens + q_heads + head_dim)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads = q_heads + 2 * kv_heads
    merged = (randn(tokens, heads, head_dim) * randn(1, heads, 1).exp()).to(DEVICE, dtype)
    weights = [(randn(head_dim) * 30).to(DEVICE, dtype) if norm else None for _ in "qk"]
    angle = randn(tokens, head_dim // 2) * 100
    slots = torch.randperm(2 * tokens + 1, generator=generator)[:tokens]
    slots[1::3] = -1
    pages = (2 * tokens + 1) // page + 1
    return Step(
        *merged.split((q_heads, kv_heads, kv_heads), 1),
        *weights,
        angle.cos().to(DEVICE, dtype),
        angle.sin().to(DEVICE, dtype),
        slots.to(DEVICE),
        torch.full((2, pages, page, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE),
    )


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for left, right in zip(actual, expected, strict=True):
        assert_bitwise_equal(left, right)


@pytest.mark.parametrize("norm", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_the_three_kernels(shape: tuple[int, int, int, int, int], dtype: torch.dtype, norm: bool) -> None:
    """The bytes are equal; q is computed even for slot -1, and the pools' NaN stays wherever nothing is stored."""
    s = step(*shape, dtype, norm)
    q, pools = s.fused()
    assert_same((q, pools), s.unfused())
    assert q.is_contiguous() and not q.isnan().any()
    assert int((~pools.isnan()).sum()) == 2 * int((s.slots >= 0).sum()) * shape[2] * shape[3]


# The slowest sizes: the test above covers them with one form of norms, and the other sizes cover the other forms.
OF_MANY_HEADS = ((7, 9, 3, 64, 16), (3, 17, 17, 96, 24), (11, 8, 2, 128, 16))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=pytest.mark.slow if shape in OF_MANY_HEADS else ()) for shape in SHAPES]
)
def test_bytes_of_the_three_kernels_for_other_norms_and_tables(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, offset: float
) -> None:
    """So for norms that are rounded once (OLMo 2's; Gemma's with its offset), and with tables in float32."""
    s = replace(step(*shape, dtype, norm=True), variant={"offset": offset, "cast_first": False})
    wide = replace(s, cos=s.cos.float(), sin=s.sin.float())
    for variant in (s, wide, replace(wide, variant={}), replace(wide, q_weight=None, k_weight=None)):
        assert_same(variant.fused(), variant.unfused())
    if shape[0] > 1 and dtype != torch.float32:
        assert count_differing(s.fused()[0], replace(s, variant={}).fused()[0]) > 10
        assert count_differing(s.fused()[0], wide.fused()[0]) > 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype: torch.dtype) -> None:
    """The rotated q is within its five roundings, of eps / 2 each, of float64."""
    s = step(5, 3, 1, 80, 16, dtype, norm=True)
    assert s.q_weight is not None
    normed = reference.rms_norm(s.q, s.q_weight, EPS)
    truth = reference.apply_rope(normed, s.cos, s.sin)
    size = normed.abs().unflatten(-1, (2, -1)).sum(-2).repeat(1, 1, 2)
    assert ((s.fused()[0].double() - truth).abs() <= 3 * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_rounding_points_matter(dtype: torch.dtype) -> None:
    """A norm that rounds only after the weight gives other bytes, and so does a norm after RoPE."""
    s = step(5, 3, 1, 80, 16, dtype, norm=True)
    assert s.q_weight is not None
    fused = s.fused()[0]
    early = reference.rms_norm(s.q, s.q_weight, EPS).to(dtype)
    assert count_differing(rope.rope(early, s.cos, s.sin), fused) > 50
    after = rms_norm.rms_norm(rope.rope(s.q, s.cos, s.sin), s.q_weight, EPS)
    assert count_differing(after, fused) > 50


@pytest.mark.parametrize("norm", [True, False], ids=["normed", "plain"])
def test_strides(norm: bool) -> None:
    """Sources that are not views of one tensor, and pools interleaved by page, with padding, give the same bytes."""
    s = step(7, 6, 3, 48, 16, torch.float16, norm)
    expected = s.fused()
    apart = replace(
        s,
        q=s.q.transpose(0, 1).contiguous().transpose(0, 1),
        k=s.k.contiguous(),
        v=s.v.mT.contiguous().mT,
        cos=s.cos.t().contiguous().t(),
    )
    assert_same(apart.fused(), expected)
    assert_same(replace(s, v=s.v.contiguous()).fused(), expected)  # k and v have different token strides
    pages = s.pools.shape[1]
    pools = torch.full((pages, 16, 2, 3, 50), torch.nan, dtype=torch.float16, device=DEVICE)
    strided = pools.permute(2, 0, 1, 3, 4)[..., :48]
    q = qkv.qk_norm_rope_store(s.q, s.k, s.v, s.q_weight, s.k_weight, EPS, s.cos, s.sin, *strided, s.slots)
    assert_same((q, strided), expected)
    assert pools[..., 48:].isnan().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns when NaN becomes an integer
def test_a_token_depends_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token has the same bytes alone, shuffled, beside infinities and with every tile; its position has an effect."""
    s = step(7, 9, 3, 64, 16, torch.float16, norm=True)
    q, pools = s.fused()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert_same(s.tokens(order).fused(), (q[order], pools))
    alone = s.tokens(torch.tensor([3], device=DEVICE))
    alone_q, alone_pools = alone.fused()
    assert_bitwise_equal(alone_q, q[3:4])
    flat, alone_flat = (x.flatten(1, 2)[:, s.slots[3]] for x in (pools, alone_pools))
    assert_bitwise_equal(alone_flat, flat)
    moved = replace(alone, cos=s.cos[4:5], sin=s.sin[4:5])
    assert count_differing(moved.fused()[0], q[3:4]) > 100
    poisoned = replace(s, q=s.q.clone())
    poisoned.q[0] = torch.inf
    poisoned.q[3, 2, 40] = torch.nan
    poisoned_q = poisoned.fused()[0]
    assert poisoned_q[0].isnan().all() and poisoned_q[3, 2].isnan().all()  # the bad rows are NaN as a whole
    assert_bitwise_equal(poisoned_q[3, [0, 1, 3]], q[3, [0, 1, 3]])
    assert_bitwise_equal(poisoned_q[4:], q[4:])
    for warps in (1, 2, 8):
        monkeypatch.setattr(rope, "TILE_WARPS", warps)
        assert_same(s.fused(), (q, pools))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [1, 257, *(pytest.param(n, marks=pytest.mark.slow) for n in (255, 256, 600))])
def test_a_token_does_not_see_how_many_there_are(tokens: int, dtype: torch.dtype) -> None:
    """A token's bytes do not depend on the number of tokens, above all around 256, where other engines' norms change
    their block. The batch repeats eight tokens, each of which is compared with itself alone; only the first is stored,
    because the interpreter takes some 10 ms per program."""
    s = step(8, 1, 1, 16, 16, dtype, norm=True)
    s.slots[1:] = -1
    q, pools = s.tokens(torch.arange(tokens, device=DEVICE) % 8).fused()
    alone = [s.tokens(torch.tensor([token], device=DEVICE)).fused() for token in range(8)]
    expected = torch.cat([alone_q for alone_q, _ in alone])
    assert_bitwise_equal(q, expected[torch.arange(tokens, device=DEVICE) % 8])
    assert_bitwise_equal(pools, alone[0][1])
    assert count_differing(expected[1:], expected[:-1]) > 50  # the eight tokens do differ


def test_extreme_magnitudes() -> None:
    """Rows of zeros, of huge and of tiny numbers, whose halves share one exponent, have the three kernels' bytes."""
    s = step(6, 2, 1, 64, 16, torch.float32, norm=True)
    q = s.q.clone()
    q[0], q[1, :, :32], q[2, :, 32:], q[3] = 0.0, 1e-30, 1e-30, 1e-44
    q[4], q[5] = q[4] * 1e18, q[5] * 1e-30
    s = replace(s, q=q)
    assert_same(s.fused(), s.unfused())


@pytest.mark.gpu
def test_pools_beyond_two_to_the_31_elements() -> None:
    """Slots of pools of more than 2^31 elements have the three kernels' bytes."""
    s = step(5, 32, 8, 128, 64, torch.bfloat16, norm=True)
    pages = 2**15 + 1
    if torch.cuda.mem_get_info()[0] < 20 * pages * 64 * 8 * 128:
        pytest.skip("needs 43 GB of GPU memory")
    last = pages * 64 - 1
    slots = torch.tensor([last, 3, -1, last - 64, last - 1], device=DEVICE)
    s = replace(s, slots=slots, pools=torch.zeros(2, pages, 64, 8, 128, dtype=torch.bfloat16, device=DEVICE))
    (q, fused), (expected_q, unfused) = s.fused(), s.unfused()
    assert_bitwise_equal(q, expected_q)
    assert torch.equal(fused.view(torch.int16), unfused.view(torch.int16))  # 8 GB each, so compared without copies


@pytest.mark.gpu
def test_many_tokens() -> None:
    """A prefill of Qwen3-8B's shape has the three kernels' bytes, and those of single tokens."""
    s = step(8191, 32, 8, 128, 64, torch.bfloat16, norm=True)
    q, pools = s.fused()
    assert_same((q, pools), s.unfused())
    for token in (0, 1, 4099, 8190):
        alone = s.tokens(torch.tensor([token], device=DEVICE))
        assert_bitwise_equal(alone.fused()[0], q[token : token + 1])
