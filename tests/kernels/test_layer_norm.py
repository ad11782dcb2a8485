"""Layer norm is within its roundings of float64, and its bits depend on no batch, view, fusion or schedule."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import row_sum
from evalengine.kernels.layer_norm import add_layer_norm, layer_norm
from tests import random_tensors
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EPS = 1e-5
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
HIDDEN = [1, 7, 63, 64, 65, 577, 4097]
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # NumPy warns


@triton.jit
def _means_kernel(x_ptr, mean_ptr, variance_ptr, H: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + tl.program_id(0) * H + column, column < H, 0.0).to(tl.float32)
    mean = row_sum.mean(x, H, 1)
    place = tl.program_id(0) + tl.arange(0, 1)
    tl.store(mean_ptr + place, mean)
    tl.store(variance_ptr + place, row_sum.mean_square(tl.where(column < H, x - mean[:, None], 0.0), H, 1))


randn = partial(random_tensors.randn, device=DEVICE)


def eager(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Cohere's formula, with a bias beside it, from the kernel's two means; a CPU takes the interpreter's rsqrt."""
    mean, variance = torch.empty(2, len(x), device=DEVICE)
    hidden = x.shape[1]
    block = triton.next_power_of_2(hidden)
    _means_kernel[(len(x),)](x.contiguous(), mean, variance, H=hidden, BLOCK=block, enable_fp_fusion=False)
    if CUDA:
        rstd = torch.rsqrt(variance + EPS)
    else:
        rstd = torch.from_numpy(np.float32(1) / np.sqrt(variance.numpy() + np.float32(EPS)))
    normed = (x.float() - mean[:, None]) * rstd[:, None] * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_where_eager_code_rounds(dtype: torch.dtype, hidden: int, with_bias: bool) -> None:
    """Given the kernel's mean and variance, the norm, with and without the residual, has the bytes of eager code."""
    x, residual = randn(5, hidden, dtype=dtype), randn(5, hidden, dtype=dtype, seed=1)
    weight, bias = randn(hidden, dtype=dtype, seed=2) * 30, randn(hidden, dtype=dtype, seed=3) if with_bias else None
    assert_bitwise_equal(layer_norm(x, weight, bias, EPS), eager(x, weight, bias))
    normed, total = add_layer_norm(x, residual, weight, bias, EPS)
    assert_bitwise_equal(total, x + residual)
    assert_bitwise_equal(normed, eager(total, weight, bias))


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 2.0**8])
def test_against_float64(dtype: torch.dtype, hidden: int, scale: float) -> None:
    """The norm is within its roundings of float64, for rows of a mean of 4 deviations, too."""
    x = (randn(4, hidden) * scale).to(dtype)
    x[1, hidden // 2], x[2] = 100 * scale, 0
    x[3] += 4 * scale
    weight, bias = randn(hidden, dtype=dtype, seed=2), randn(hidden, dtype=dtype, seed=3)
    truth = reference.layer_norm(x, weight, bias, EPS)
    error = (layer_norm(x, weight, bias, EPS) - truth).abs()
    rstd = (x.double().var(1, correction=0, keepdim=True) + EPS).rsqrt()
    # One rounding to the dtype; in float32 those of the mean and of every step, relative to the numbers they round.
    steps = (
        8 * 2.0**-24 * ((x.double().abs() + x.double().abs().amax(1, keepdim=True)) * rstd * weight.abs() + bias.abs())
    )
    assert (error <= 1.01 * UNIT[dtype] * truth.abs() + steps + 2.0**-24).all()


def test_rows_alone_and_anywhere() -> None:
    """A row has the same bytes alone and in any place of the batch; torch's layer norm of its parts has not."""
    x, weight, bias = randn(37, 65), randn(65, seed=2), randn(65, seed=3)
    whole = layer_norm(x, weight, bias, EPS)
    for start, end in [(0, 1), (36, 37), (5, 9), (31, 37)]:
        assert_bitwise_equal(layer_norm(x[start:end], weight, bias, EPS), whole[start:end])
    assert_bitwise_equal(layer_norm(x.flip(0), weight, bias, EPS).flip(0), whole)
    order = torch.randperm(65, generator=torch.Generator().manual_seed(1))
    shuffled = layer_norm(x[:, order], weight[order], bias[order], EPS)
    assert_bitwise_equal(shuffled, whole[:, order])
    theirs = [
        torch.nn.functional.layer_norm(v, (65,), weight[o], bias[o], EPS)
        for v, o in ((x, range(65)), (x[:, order], order))
    ]
    assert count_differing(theirs[0][:, order], theirs[1]) > 0  # a sum of floats depends on the order


@pytest.mark.parametrize("hidden", [65, 577, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_schedule_cannot_matter(dtype: torch.dtype, hidden: int) -> None:
    x, residual, weight, bias = (
        randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(5, hidden)] * 2 + [(hidden,)] * 2)
    )
    whole, fused = layer_norm(x, weight, bias, EPS), add_layer_norm(x, residual, weight, bias, EPS)
    for schedule in [(1, 1), (2, 8), (4, 2), (8, 16)][: 4 if CUDA else 2]:
        assert_bitwise_equal(layer_norm(x, weight, bias, EPS, _schedule=schedule), whole)
        again = add_layer_norm(x, residual, weight, bias, EPS, _schedule=schedule)
        for actual, expected in zip(again, fused, strict=True):
            assert_bitwise_equal(actual, expected)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_for_each_head(dtype: torch.dtype, tokens: int, heads: int) -> None:
    """The heads of a merged tensor in one launch have each head's bytes, and are within their roundings of float64."""
    x, weight = randn(tokens, heads + 2, 65, dtype=dtype)[:, 1:-1], randn(heads, 65, dtype=dtype, seed=2)
    whole = layer_norm(x, weight, None, EPS)
    alone = [layer_norm(x[:, head], weight[head], None, EPS) for head in range(heads)]
    assert_bitwise_equal(whole, torch.stack(alone, 1))
    assert_bitwise_equal(layer_norm(x, weight, None, EPS), whole)  # a repeated launch
    truth = reference.layer_norm(x, torch.ones_like(weight[0]), None, EPS) * weight.double()
    assert ((whole - truth).abs() <= 1.01 * UNIT[dtype] * truth.abs() + 2.0**-18 * weight.abs() + 2.0**-24).all()
    assert_bitwise_equal(layer_norm(x, weight, None, EPS, _schedule=(2, 1)), whole)
    both = layer_norm(x, weight, weight, EPS)
    assert_bitwise_equal(both[:, -1], layer_norm(x[:, -1], weight[-1], weight[-1], EPS))


def test_strided_inputs() -> None:
    """Views have the bytes of contiguous copies."""
    x, weight, bias = randn(6, 3, 140), randn(130, seed=2), randn(129, seed=3)
    for view, scale in [
        (x[:, :, 1:130], weight[1:]),
        (x[::2, 1, :130:2], weight[::2]),
        (x[:, 1, :6].t(), weight[:6]),
    ]:
        shift = bias[: view.shape[-1]]
        expected = layer_norm(view.contiguous(), scale.contiguous(), shift, EPS)
        assert_bitwise_equal(layer_norm(view, scale, shift, EPS), expected)
        normed, total = add_layer_norm(view, view, scale, shift, EPS)
        assert_bitwise_equal(normed, layer_norm(total, scale, shift, EPS))


def test_edges() -> None:
    """Constant rows give the bias, rows with NaN or infinities NaN; empty ones nothing."""
    x, weight, bias = randn(7, 65), torch.ones(65, device=DEVICE), randn(65, seed=3)
    x[0], x[1, 3], x[2, 64], x[3, 0] = 0, torch.inf, torch.nan, -torch.nan
    x[4] = 2.0**20
    x[5] *= 1e30  # the squares overflow, so that the row becomes the bias, as in eager code
    out = layer_norm(x, weight, bias, EPS)
    assert out[1:4].isnan().all()
    for row in (0, 4, 5):
        assert_bitwise_equal(out[row], bias)
    assert_bitwise_equal(out[6:], layer_norm(x[6:], weight, bias, EPS))
    for empty in (x[:0], x.view(7, 5, 13)[:, :0]):
        width = empty.shape[-1]
        assert layer_norm(empty, weight[:width], bias[:width], EPS).shape == empty.shape


def test_what_is_refused() -> None:
    x, weight = randn(2, 8), randn(8)
    with pytest.raises(ValueError, match="needs a weight"):
        layer_norm(x, weight[:7], None, EPS)
    with pytest.raises(ValueError, match="needs a bias"):
        layer_norm(x, weight, weight.half(), EPS)
    layer_norm(x[:, None], x[:1], None, EPS)  # its launch must not serve another weight
    for other in (x, randn(3, 8)):
        with pytest.raises(ValueError, match=r"needs a weight of torch.float32 \[1, 8\], not torch.float32 \[., 8\]"):
            layer_norm(x[:, None], other, None, EPS)
    with pytest.raises(ValueError, match=r"needs a bias of torch.float32 \[2, 8\]"):
        layer_norm(x, x, weight, EPS)
    with pytest.raises(ValueError, match="must agree"):
        add_layer_norm(x, x[:1], weight, weight, EPS)
    with pytest.raises(ValueError, match="layer_norm over 16385 numbers: at most 16384"):
        layer_norm(torch.zeros(1, 16385, device=DEVICE), torch.zeros(16385, device=DEVICE), None, EPS)


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31() -> None:
    """The last rows of a tensor of more than 2^31 elements have the bytes of a small tensor."""
    rows, hidden = (1 << 31) // 4096 + 3, 4096
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=DEVICE)
    weight, bias = (randn(hidden, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    x[-3:] = randn(3, hidden, dtype=torch.bfloat16)
    expected = layer_norm(x[-3:].clone(), weight, bias, EPS)
    assert_bitwise_equal(layer_norm(x, weight, bias, EPS)[-3:], expected)
