"""RMS norm rounds as eager code does, and its bits depend on no batch, view, fusion or schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import row_sum
from evalengine.kernels.rms_norm import add_rms_norm, normalize, rms_norm
from tests import random_tensors
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EPS = 1e-6
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.float16, BFLOAT16]
HIDDEN = [1, 7, 63, 64, 65, 577, 4097]
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # NumPy warns


@triton.jit
def _mean_square_kernel(x_ptr, out_ptr, H: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + tl.program_id(0) * H + column, column < H, 0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0) + tl.arange(0, 1), row_sum.mean_square(x, H, 1))


@triton.jit
def _normalize_kernel(x_ptr, weight_ptr, out_ptr, n, eps, BLOCK: tl.constexpr):
    """Calls `normalize` as a fused kernel may: two rows, along axis 1, with a width known only at run time."""
    row, column = tl.arange(0, 2)[:, None], tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * n + column, column < n, 0.0)
    weight = tl.load(weight_ptr + column, column < n, 0.0)
    tl.store(out_ptr + row * n + column, normalize(x.to(tl.float32), weight, n, eps, x.dtype), column < n)


randn = partial(random_tensors.randn, device=DEVICE)


def eager(x: Tensor, weight: Tensor, variance: Tensor, offset: float = 0.0, cast_first: bool = True) -> Tensor:
    """Computes transformers' LlamaRMSNorm and Qwen3RMSNorm after the variance (or, not cast_first, Olmo2RMSNorm, and
    Gemma2RMSNorm with offset 1); a CPU takes the interpreter's rsqrt."""
    if CUDA:
        rstd = torch.rsqrt(variance + EPS)
    else:
        rstd = torch.from_numpy(np.float32(1) / np.sqrt(variance.numpy() + np.float32(EPS)))
    if cast_first:
        return weight * (x.float() * rstd[:, None]).to(x.dtype)
    return (x.float() * rstd[:, None] * (weight.float() + offset)).to(x.dtype)


def kernel_variance(x: Tensor) -> Tensor:
    """Returns the mean square of each row, by the fixed-point sum that the norm uses: [n, H] -> float32 [n]."""
    variance = torch.empty(len(x), device=DEVICE)
    hidden = x.shape[1]
    _mean_square_kernel[(len(x),)](
        x.contiguous(), variance, H=hidden, BLOCK=triton.next_power_of_2(hidden), enable_fp_fusion=False
    )
    return variance


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_where_eager_code_rounds(dtype: torch.dtype, hidden: int) -> None:
    """Given the kernel's variance, the norm, with and without the residual, has the bytes of eager code."""
    x, residual = randn(5, hidden, dtype=dtype), randn(5, hidden, dtype=dtype, seed=1)
    weight = randn(hidden, dtype=dtype, seed=2) * 30  # K-norm weights reach 96
    assert_bitwise_equal(rms_norm(x, weight, EPS), eager(x, weight, kernel_variance(x)))
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert_bitwise_equal(total, x + residual)
    assert_bitwise_equal(normed, eager(total, weight, kernel_variance(total)))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_is_rounded_once(dtype: torch.dtype, hidden: int, offset: float) -> None:
    """OLMo 2's and Gemma's norms have the bytes of eager code given the variance, with the residual, too, and under
    every schedule; they are within one rounding of float64."""
    x, residual = randn(5, hidden, dtype=dtype), randn(5, hidden, dtype=dtype, seed=1)
    weight, variant = randn(hidden, dtype=dtype, seed=2), {"offset": offset, "cast_first": False}
    whole = rms_norm(x, weight, EPS, **variant)
    assert_bitwise_equal(whole, eager(x, weight, kernel_variance(x), **variant))
    normed, total = add_rms_norm(x, residual, weight, EPS, **variant)
    assert_bitwise_equal(total, x + residual)
    assert_bitwise_equal(normed, eager(total, weight, kernel_variance(total), **variant))
    assert_bitwise_equal(rms_norm(x[3:4], weight, EPS, **variant), whole[3:4])
    assert_bitwise_equal(rms_norm(x, weight, EPS, **variant, _schedule=(2, 8)), whole)
    truth = reference.rms_norm(x, weight, EPS, offset)
    bound = (1.01 * UNIT[dtype] + 8 * 2.0**-24) * truth.abs() + 2.0**-22 + 2 * 2.0**-24 * offset * truth.abs()
    assert ((whole - truth).abs() <= bound).all()
    if hidden >= 577 and dtype != torch.float32:
        assert count_differing(rms_norm(x, weight, EPS), rms_norm(x, weight, EPS, cast_first=False)) > 0


@pytest.mark.parametrize("hidden", [65, 577])
def test_other_rounding_points_give_other_bits(hidden: int) -> None:
    """A weight multiplied before the rounding, or a residual sum left unrounded, gives other bytes."""
    x, residual = randn(5, hidden, dtype=torch.float16), randn(5, hidden, dtype=torch.float16, seed=1)
    weight = randn(hidden, dtype=torch.float16, seed=2)
    rstd = torch.rsqrt(kernel_variance(x) + EPS)[:, None]
    weight_first = (x.float() * rstd * weight.float()).half()
    assert count_differing(rms_norm(x, weight, EPS), weight_first) > 0
    unrounded = x.float() + residual.float()
    rstd = torch.rsqrt(unrounded.square().mean(1, keepdim=True) + EPS)
    assert count_differing(add_rms_norm(x, residual, weight, EPS)[0], weight * (unrounded * rstd).half()) > 0


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 2.0**8])
def test_against_float64(dtype: torch.dtype, hidden: int, scale: float) -> None:
    """The norm is within its roundings of float64."""
    x = randn(4, hidden, dtype=dtype) * scale
    x[1, hidden // 2] = 100 * scale
    x[2] = 0
    weight = randn(hidden, dtype=dtype, seed=2)
    truth = reference.rms_norm(x, weight, EPS)
    error = (rms_norm(x, weight, EPS) - truth).abs()
    # There are two roundings to the dtype, and four to float32: mean, + eps, rsqrt (2 ulp), product.
    assert (error <= (2.01 * UNIT[dtype] + 8 * 2.0**-24) * truth.abs() + 2.0**-22).all()


def test_rows_alone_and_anywhere() -> None:
    """A row has the same bytes alone and in any place of the batch."""
    x, weight = randn(37, 65), randn(65, seed=2)
    whole = rms_norm(x, weight, EPS)
    for start, end in [(0, 1), (36, 37), (5, 9), (31, 37)]:
        assert_bitwise_equal(rms_norm(x[start:end], weight, EPS), whole[start:end])
    assert_bitwise_equal(rms_norm(x.flip(0), weight, EPS).flip(0), whole)


def differing_from_alone(norm: Callable[[Tensor], Tensor], rows: int, dtype: torch.dtype) -> int:
    """Norms `rows` rows that repeat seven of 48 numbers; counts the elements that differ from the row normed alone."""
    x = randn(7, 48, dtype=dtype)
    alone = torch.cat([norm(row[None]) for row in x])
    repeated = torch.arange(rows) % len(x)
    return count_differing(norm(x[repeated]), alone[repeated])


def norm_of_float_sums(x: Tensor) -> Tensor:
    """A norm that depends on the batch: float32 squares added in blocks of 16 columns, or of 8 above 256 rows."""
    values = x.float().cpu().numpy()
    squares = np.square(values).reshape(len(x), -1, 16 if len(x) <= 256 else 8)
    total = squares.cumsum(2)[..., -1].cumsum(1)[..., -1:]
    return torch.from_numpy(values / np.sqrt(total / np.float32(x.shape[1]) + np.float32(EPS)))


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 600])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_a_row_does_not_see_how_many_there_are(dtype: torch.dtype, rows: int) -> None:
    """A row does not depend on the number of rows; a norm whose block changes above 256 rows is caught."""
    weight = randn(48, dtype=dtype, seed=2)
    assert differing_from_alone(lambda x: rms_norm(x, weight, EPS), rows, dtype) == 0
    assert differing_from_alone(lambda x: torch.cat(add_rms_norm(x, x.flip(1), weight, EPS), 1), rows, dtype) == 0
    assert (differing_from_alone(norm_of_float_sums, rows, dtype) > 0) is (rows > 256)


@pytest.mark.parametrize("hidden", [65, 577, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_schedule_cannot_matter(dtype: torch.dtype, hidden: int) -> None:
    x, residual, weight = (randn(*shape, dtype=dtype) for shape in ((5, hidden), (5, hidden), (hidden,)))
    whole, fused = rms_norm(x, weight, EPS), add_rms_norm(x, residual, weight, EPS)
    for schedule in [(1, 1), (2, 8), (4, 2), (8, 16)][: 4 if CUDA else 2]:
        assert_bitwise_equal(rms_norm(x, weight, EPS, _schedule=schedule), whole)
        for actual, expected in zip(add_rms_norm(x, residual, weight, EPS, _schedule=schedule), fused, strict=True):
            assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
def test_views_of_a_merged_qkv(dtype: torch.dtype) -> None:
    """Views of a merged qkv tensor have the bytes of contiguous copies, with the residual, too."""
    tokens, heads, dim = 9, 3, 64
    merged = randn(tokens, (heads + 2) * dim + 8, dtype=dtype)
    weight = randn(dim, dtype=dtype, seed=2)
    for start in (0, dim, 8):  # 8 gives a view whose pointer is only 16-byte aligned
        view = merged[:, start : start + heads * dim].view(tokens, heads, dim)
        assert not view.is_contiguous()
        assert_bitwise_equal(rms_norm(view, weight, EPS), rms_norm(view.contiguous(), weight, EPS))
        normed, total = add_rms_norm(view, view.contiguous(), weight, EPS)
        assert_bitwise_equal(total, view + view)
        assert_bitwise_equal(normed, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_misaligned_and_strided_inputs(dtype: torch.dtype) -> None:
    """Misaligned and strided views have the bytes of contiguous copies."""
    x, weight = randn(6, 129, dtype=dtype), randn(130, dtype=dtype, seed=2)
    for view, scale in [
        (x[:, 1:], weight[2:]),
        (x[1::2, :64], weight[1:65]),
        (x[:, ::2], weight[::2]),
        (x.t(), weight[:6]),
    ]:
        expected = rms_norm(view.contiguous(), scale.contiguous(), EPS)
        assert_bitwise_equal(rms_norm(view, scale, EPS), expected)
    deep = x.reshape(2, 3, 129)[:, :, None, 1:]
    assert_bitwise_equal(rms_norm(deep, weight[:128], EPS), rms_norm(deep.contiguous(), weight[:128], EPS))


def test_edges() -> None:
    """Zero rows give zeros, rows with NaN or infinities NaN; tiny and huge numbers give what eager code gives."""
    x, weight = randn(7, 65), torch.ones(65, device=DEVICE)
    x[0], x[1, 3], x[2, 64], x[3, 0] = 0, torch.inf, torch.nan, -torch.nan
    x[4] *= 1e-42  # the squares vanish beside eps
    x[5] *= 1e30  # the squares overflow, so that the row becomes zeros, as in eager code
    out = rms_norm(x, weight, EPS)
    assert out[0].eq(0).all()
    assert out[1:4].isnan().all()
    assert torch.allclose(out[4], x[4] * 1e3, rtol=1e-3, atol=2e-45)
    assert out[5].eq(0).all()
    assert_bitwise_equal(out[6:], rms_norm(x[6:], weight, EPS))
    for empty in (x[:0], x.view(7, 5, 13)[:, :0]):
        assert rms_norm(empty, weight[: empty.shape[-1]], EPS).shape == empty.shape


def test_what_is_refused() -> None:
    """A weight of another dtype or size, shapes that differ, and rows that are too long are a ValueError."""
    x, weight = randn(2, 8), randn(8)
    with pytest.raises(ValueError, match="needs a weight"):
        rms_norm(x, weight.half(), EPS)
    with pytest.raises(ValueError, match="needs a weight"):
        rms_norm(x, weight[:7], EPS)
    with pytest.raises(ValueError, match="must agree"):
        add_rms_norm(x, x[:1], weight, EPS)
    with pytest.raises(ValueError, match="at most 16384"):
        rms_norm(torch.zeros(1, 16385, device=DEVICE), torch.zeros(16385, device=DEVICE), EPS)


@pytest.mark.parametrize("hidden", [1, 48, 64])
def test_normalize_with_a_width_known_at_run_time(hidden: int) -> None:
    x, weight = randn(2, hidden), randn(hidden, seed=2)
    out = torch.empty_like(x)
    _normalize_kernel[(1,)](x, weight, out, hidden, EPS, BLOCK=64, enable_fp_fusion=False)
    assert_bitwise_equal(out, rms_norm(x, weight, EPS))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [576, 1024, 4096, 16384])
def test_transformers_own_bytes_where_its_mean_is_ours(hidden: int) -> None:
    """Rows whose variance torch computes to our float32 have the bytes of transformers' own layer."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x = randn(2048, hidden, dtype=torch.bfloat16)
    layer = Qwen3RMSNorm(hidden, EPS).to(DEVICE, torch.bfloat16)
    layer.weight.data.copy_(randn(hidden, seed=2) * 30)
    same_variance = x.float().pow(2).mean(-1) == kernel_variance(x)
    assert same_variance.sum() > 100  # other rows' variances differ by an ulp
    with torch.no_grad():
        assert_bitwise_equal(rms_norm(x, layer.weight.data, EPS)[same_variance], layer(x)[same_variance])


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31() -> None:
    """The last rows of a tensor of more than 2^31 elements have the bytes of a small tensor."""
    rows, hidden = (1 << 31) // 4096 + 3, 4096
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=DEVICE)
    weight = randn(hidden, dtype=torch.bfloat16)
    x[-3:] = randn(3, hidden, dtype=torch.bfloat16)
    expected = rms_norm(x[-3:].clone(), weight, EPS)
    assert_bitwise_equal(rms_norm(x, weight, EPS)[-3:], expected)
