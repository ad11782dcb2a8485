"""The CUDA overrides, called directly: on a GPU or under Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.invariant import COVERED_OPS
from evalengine.invariant.cuda import CUDAOverrides
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.invariant.cuda_operands import DEVICE, ROUNDING, randn
from tests.references import reference

KERNELS = CUDAOverrides().kernels()

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def assert_rounds(actual: Tensor, truth: Tensor, *, steps: int = 1) -> None:
    """Asserts that errors stay within `steps` roundings of the dtype; small values have the largest one's roundings,
    since sums cancel."""
    tolerance = ROUNDING[actual.dtype] * steps
    torch.testing.assert_close(actual.double(), truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()) / 4)


def test_the_table_lists_the_overrides() -> None:
    """COVERED_OPS lists every override of CUDA, but for attention kernels, which are refused."""
    on_cuda = {name for name, op in COVERED_OPS.items() if "cuda" in op.devices}
    fused = {name for name in KERNELS if name[0] == "_" and "_attention" in name}  # These are refused.
    assert set(KERNELS) - fused <= on_cuda and fused.isdisjoint(COVERED_OPS)
    newer_torch = {"_fused_rms_norm", "mm.dtype", "addmm.dtype", "bmm.dtype", "baddbmm.dtype"}
    assert on_cuda - set(KERNELS) <= newer_torch


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_against_float64(dtype: torch.dtype) -> None:
    a, b = randn(5, 37, dtype=dtype), randn(37, 19, seed=1, dtype=dtype)
    bias, full = randn(19, seed=2, dtype=dtype), randn(5, 19, seed=3, dtype=dtype)
    product = reference.linear(a, b.t())
    assert_rounds(KERNELS["mm"](a, b), product)
    assert_rounds(KERNELS["bmm"](a[None], b[None])[0], product)
    assert_rounds(KERNELS["mv"](b.t(), a[0]), product[0])
    assert_rounds(KERNELS["addmm"](bias, a, b), product + bias.double(), steps=2)
    assert_rounds(KERNELS["addmm"](full, a, b, beta=0.5, alpha=2), 2 * product + full.double() / 2, steps=3)
    assert_rounds(KERNELS["baddbmm"](full[None], a[None], b[None])[0], product + full.double(), steps=2)
    assert_rounds(KERNELS["addmv"](bias, b.t(), a[0]), product[0] + bias.double(), steps=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_agree_with_each_other(dtype: torch.dtype) -> None:
    """Strides and shapes, and so the batch, decide which of these products F.linear and matmul take."""
    a, b = randn(5, 37, dtype=dtype), randn(37, 19, seed=1, dtype=dtype)
    bias = randn(19, seed=2, dtype=dtype)
    product = KERNELS["mm"](a, b)
    assert_bitwise_equal(KERNELS["bmm"](a[None], b[None])[0], product)
    assert_bitwise_equal(KERNELS["mv"](b.t(), a[0]), product[0])
    assert_bitwise_equal(KERNELS["mv"](a, b[:, 0]), KERNELS["bmm"](a[None], b[None, :, :1])[0, :, 0])
    assert_bitwise_equal(KERNELS["addmm"](bias, a, b), product + bias)  # A fused epilogue is compared with two ops.
    assert_bitwise_equal(KERNELS["addmm"](bias[None], a, b), product + bias)
    assert_bitwise_equal(KERNELS["addmm_"](product.clone(), a, b, beta=0), product)
    if dtype == torch.float32:
        return
    assert count_differing(product + bias, (KERNELS["mm.dtype"](a, b, torch.float32) + bias).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_products_are_products(dtype: torch.dtype) -> None:
    """Each group is one covered mm, whichever operand the groups cut; the second group is empty."""
    grouped, mm = KERNELS["_grouped_mm"], KERNELS["mm"]
    ends, cuts = torch.tensor([3, 3, 9], dtype=torch.int32, device=DEVICE), [slice(0, 3), slice(3, 3), slice(3, 9)]
    a, b = randn(9, 37, dtype=dtype), randn(3, 37, 19, seed=1, dtype=dtype)
    out = grouped(a, b, ends)
    assert_bitwise_equal(out, torch.cat([mm(a[0:3], b[0]), mm(a[3:9], b[2])]))
    assert_rounds(out, torch.cat([reference.linear(a[cut], b[g].t()) for g, cut in enumerate(cuts)]))
    left, right = randn(3, 5, 37, dtype=dtype), randn(37, 9, seed=1, dtype=dtype)
    across = grouped(left, right, ends)
    assert_bitwise_equal(across, torch.cat((mm(left[0], right[:, 0:3]), mm(left[2], right[:, 3:9])), 1))
    terms = grouped(a.t(), randn(9, 19, seed=2, dtype=dtype), ends)
    assert terms.shape == (3, 37, 19) and not terms[1].any()
    assert_bitwise_equal(terms[2], mm(a.t()[:, 3:9], randn(9, 19, seed=2, dtype=dtype)[3:9]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wider_results(dtype: torch.dtype) -> None:
    """Products with float32 results are those of the narrow dtype before its rounding."""
    a, b, bias = randn(5, 37, dtype=dtype), randn(37, 19, seed=1, dtype=dtype), randn(5, 19, seed=2, dtype=dtype)
    product = KERNELS["mm.dtype"](a, b, torch.float32)
    assert_rounds(product, reference.linear(a, b.t()))
    assert_bitwise_equal(product.to(dtype), KERNELS["mm"](a, b))
    assert_bitwise_equal(KERNELS["bmm.dtype"](a[None], b[None], torch.float32)[0], product)
    assert_bitwise_equal(KERNELS["addmm.dtype"](bias, a, b, torch.float32), product + bias.float())
    assert_bitwise_equal(
        KERNELS["baddbmm.dtype"](bias[None], a[None], b[None], torch.float32)[0], product + bias.float()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_reductions_against_float64(dtype: torch.dtype) -> None:
    x = randn(3, 5, 37, dtype=dtype)
    for dim in (-1, 1):
        assert_rounds(KERNELS["_softmax"](x, dim, False), reference.softmax(x, dim))
        assert_rounds(KERNELS["_log_softmax"](x, dim, False), reference.log_softmax(x, dim))
        assert_rounds(KERNELS["mean.dim"](x, [dim], True), reference.mean(x, dim, True))
    assert KERNELS["_softmax"](x, 0, dtype != torch.float32).dtype == torch.float32
    assert_rounds(KERNELS["mean.dim"](x, [0, 2]), reference.mean(x, (0, 2)))
    assert_rounds(KERNELS["mean.dim"](x, None, dtype=torch.float32), reference.mean(x, (0, 1, 2)))
    assert_rounds(KERNELS["mean"](x), reference.mean(x, (0, 1, 2)))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_rms_norm(dtype: torch.dtype, weighted: bool) -> None:
    if "_fused_rms_norm" not in KERNELS:
        pytest.skip("F.rms_norm has no kernel of its own in this torch")
    x, weight = randn(5, 37, dtype=dtype), randn(37, seed=1, dtype=dtype) if weighted else None
    normed, scale = KERNELS["_fused_rms_norm"](x, (37,), weight, 1e-6)
    ones = torch.ones(37, device=DEVICE)
    assert_rounds(normed, reference.rms_norm(x, ones if weight is None else weight, 1e-6))
    assert scale.shape == (5, 1) and normed.dtype == dtype
    default, _ = KERNELS["_fused_rms_norm"](x, (37,), weight, None)
    torch.testing.assert_close(default, F.rms_norm(x, (37,), weight), rtol=4 * ROUNDING[dtype], atol=1e-6)


def test_zeros_after_k_and_masked_columns_change_nothing() -> None:
    """Padding on the right adds such zeros and columns to attention, and it changes no bit."""
    a, b = randn(2, 5, 37), randn(2, 37, 19, seed=1)
    wide_a, wide_b = F.pad(a, (0, 91)), F.pad(b, (0, 0, 0, 91), value=3.0)
    assert_bitwise_equal(KERNELS["bmm"](wide_a, wide_b), KERNELS["bmm"](a, b))
    for masked in (-torch.inf, torch.finfo(torch.float32).min):
        padded = KERNELS["_softmax"](F.pad(a, (0, 91), value=masked), -1, False)
        assert_bitwise_equal(padded[..., :37].contiguous(), KERNELS["_softmax"](a, -1, False))
        assert not padded[..., 37:].any()
    assert count_differing(KERNELS["bmm"](a.flip(-1), b.flip(1)), KERNELS["bmm"](a, b))  # The terms' order does matter.


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_go_to_torch(dtype: torch.dtype) -> None:
    a, b = randn(6, 6, seed=1).to(dtype), randn(6, 6, seed=2).to(dtype)
    assert_bitwise_equal(KERNELS["mm"](a, b), torch.mm(a, b))
    assert_bitwise_equal(KERNELS["addmm"](a[0], a, b), torch.addmm(a[0], a, b))
    assert_bitwise_equal(KERNELS["mean.dim"](a, [0]), a.mean(0))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        KERNELS["mm"](randn(2, 3), randn(4, 5))
    assert KERNELS["mm"](randn(0, 3), randn(3, 4)).shape == (0, 4) and not KERNELS["mm"](randn(2, 0), randn(0, 4)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norms_against_float64(dtype: torch.dtype, affine: bool) -> None:
    """Of rows and of planes; a row alone has its bits, and the statistics are those that torch's gradients take."""
    x = randn(6, 5, 18, dtype=dtype) * 3 + 1
    for shape in ((18,), (5, 18)):
        weight, bias = (randn(*shape, seed=i, dtype=dtype) if affine else None for i in (1, 2))
        out, mean, scale = KERNELS["native_layer_norm"](x, shape, weight, bias, 1e-5)
        wide = [None if p is None else p.double() for p in (weight, bias)]
        assert_rounds(out, F.layer_norm(x.double(), shape, *wide, eps=1e-5), steps=2)
        truth = torch.ops.aten.native_layer_norm(x.double(), shape, *wide, 1e-5)
        assert mean.shape == truth[1].shape and scale.shape == truth[2].shape
        torch.testing.assert_close(scale.double(), truth[2], rtol=1e-5, atol=0)
        alone = [KERNELS["native_layer_norm"](x[i : i + 1], shape, weight, bias, 1e-5)[0] for i in range(6)]
        assert_bitwise_equal(torch.cat(alone), out)
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_sums_against_float64(dtype: torch.dtype) -> None:
    x = randn(6, 8, 3, dtype=dtype)
    for dim, keepdim in (([1], False), ([-1], True), ([0, 2], True), ((2, 1), False)):
        summed = KERNELS["sum.dim_IntList"](x, dim, keepdim)
        assert_rounds(summed, x.double().sum(dim, keepdim))
        assert summed.dtype == dtype and summed.shape == x.sum(dim, keepdim).shape
    assert KERNELS["sum.dim_IntList"](x, [1], dtype=torch.float32).dtype == torch.float32
    assert_bitwise_equal(KERNELS["sum.dim_IntList"](x[2:3], [1]), KERNELS["sum.dim_IntList"](x, [1])[2:3])
    long = randn(2, 65, dtype=dtype)
    assert_bitwise_equal(KERNELS["sum.dim_IntList"](long, [1]), long.sum(1))  # It is torch's own.
    with pytest.raises(IndexError):
        KERNELS["sum.dim_IntList"](x, [5])
