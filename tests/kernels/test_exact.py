"""The exact level's row ops give the contract's integers, are close to float64, and depend on no schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from evalengine.kernels import exact, exact_math, exact_product
from evalengine.kernels import exact_math as em
from tests.bitwise import assert_bitwise_equal
from tests.kernels import exact_contract
from tests.random_tensors import randn
from tests.references import reference

SHAPES = [(1, 1, 1), (1, 7, 5), (3, 17, 31), (5, 70, 576), (129, 33, 100), (2, 5, 8192), (3, 4, 8193), (2, 3, 17000)]


def outlier_activations(rows: int, columns: int) -> Tensor:
    """Returns normal numbers with one channel about 2.5e4 times the others, as in the input of SmolLM2's down_proj."""
    x = randn(rows, columns)
    x[:, 3] = 2.5e4
    return x


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_is_the_contracts_integer_product(m: int, n: int, k: int) -> None:
    x, weight = outlier_activations(m, max(k, 4))[:, :k], randn(n, k, seed=1)
    assert_bitwise_equal(exact.linear(x, exact.quantize_weight(weight)), exact_contract.linear(x, weight))


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_linear_and_bmm_against_float64(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """linear is within the weights' unit of float64, and bmm has linear's bytes."""
    x, weight, bias = randn(m, k).to(dtype), randn(n, k, seed=1).to(dtype), randn(n, seed=2)
    truth = reference.linear(x, weight, bias)
    result = exact.linear(x, exact.quantize_weight(weight), bias)
    unit = 2 * weight.abs().amax(1).double() * 2.0**-26  # a unit of the weights' limb
    assert ((result - truth).abs() <= 1.5 * x.double().norm(dim=1, keepdim=True) * unit + 1e-7 * truth.abs()).all()
    product = exact.bmm(x[None], weight.t()[None])
    assert_bitwise_equal(product[0], exact.linear(x, exact.quantize_weight(weight)))


def row_error(x: Tensor, weight: Tensor, *, limbs: int) -> float:
    """Returns the largest relative row error (L2) before the rounding to float32, with one or two activation limbs."""
    quantized = exact.quantize_weight(weight)
    parts = torch.empty(2, *x.shape, dtype=torch.float64)
    em.split_limbs(em.widen(x), em.row_absmax(x), 17, parts)
    y = (parts[:limbs].sum(0) @ quantized.limb.t()) * quantized.scale
    truth = reference.linear(x, weight)
    return float(((y - truth).norm(dim=1) / truth.norm(dim=1)).max())


def test_two_limbs_are_needed_and_enough() -> None:
    """Beside an outlier channel, two activation limbs are as close as float32 arithmetic, and one is not."""
    x = outlier_activations(16, 1536)
    weight = torch.randint(-128, 128, (64, 1536), generator=torch.Generator().manual_seed(3)).bfloat16()
    weight[:, 3] = 0  # the outlier sets the rows' scale but adds nothing, so it only costs precision
    assert row_error(x, weight, limbs=2) <= 5e-7  # float32 arithmetic has 3.3e-7
    assert row_error(x, weight, limbs=1) >= 1e-4


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 127, 128, 129, 257])
def test_a_row_does_not_depend_on_the_batch(rows: int) -> None:
    x, weight = outlier_activations(257, 100), exact.quantize_weight(randn(33, 100, seed=1))
    whole = exact.linear(x, weight)
    assert_bitwise_equal(exact.linear(x[:rows], weight), whole[:rows])
    assert_bitwise_equal(exact.linear(x.flip(0)[-rows:], weight), whole[:rows].flip(0))


@pytest.mark.parametrize("k", [1, 100, 1024, 1025, 5000])
def test_neither_the_order_of_k_nor_zeros_in_it_change_a_bit(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = outlier_activations(7, max(k, 4))[:, :k], randn(11, k, seed=1)
    weight[0] *= 2e-4
    weight[0, -1] = 3.0  # the rows have: an outlier, terms of one sign, terms that cancel
    weight[1] = weight[1].abs() * x[0].sign()
    whole = exact.linear(x, exact.quantize_weight(weight))
    order = torch.randperm(k + 700, generator=torch.Generator().manual_seed(k))
    shuffled, weights = (torch.cat((m, torch.zeros(len(m), 700)), 1)[:, order] for m in (x, weight))
    assert_bitwise_equal(exact.linear(shuffled, exact.quantize_weight(weights)), whole)
    assert_bitwise_equal(exact.bmm(shuffled[None], weights.t()[None])[0], whole)
    assert_bitwise_equal(exact.bmm(x[None], weight.t()[None])[0], whole)
    monkeypatch.setattr(exact_product, "SEGMENT", 100)
    assert_bitwise_equal(exact.linear(x, exact.quantize_weight(weight)), whole)
    assert_bitwise_equal(exact.bmm(x[None], weight.t()[None])[0], whole)


def test_float32_products_do_depend_on_the_order_of_k() -> None:
    """torch's float32 product changes with the order of K, so that the test above can fail."""
    x, weight = randn(7, 5000), randn(11, 5000, seed=1)
    assert not torch.equal(x @ weight.t(), x.flip(1) @ weight.flip(1).t())


@pytest.mark.parametrize("columns", [1, 512, 513, 9001, 600_000])
def test_row_sums_depend_on_neither_order_nor_zeros(columns: int) -> None:
    x = randn(3, columns) * torch.tensor([[1.0], [1e-30], [1e30]])
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    assert_bitwise_equal(exact.mean(x[:, order], -1), exact.mean(x, -1))
    norm = exact.rms_norm(x, torch.ones(columns), 0.0)
    assert_bitwise_equal(exact.rms_norm(x[:, order], torch.ones(columns), 0.0), norm[:, order])
    assert (norm.double().square().mean(-1) - 1).abs().max() < 1e-6


def test_float32_rows_do_depend_on_the_batch() -> None:
    """torch's float32 linear gives some row other bits in another batch, so that the tests above can fail."""
    x, weight = randn(64, 576), randn(576, 576, seed=1)
    whole = torch.nn.functional.linear(x, weight)
    assert any(not torch.equal(torch.nn.functional.linear(x[:m], weight), whole[:m]) for m in range(1, 64))


ROW_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: exact.rms_norm(x, randn(x.shape[-1], seed=9), 1e-6),
    "log_softmax": exact.log_softmax,
    "softmax": exact.softmax,
    "mean": lambda x: exact.mean(x, -1, True),
    "silu": exact.silu,
    "silu_and_mul": lambda x: exact.silu_and_mul(torch.cat((x, x.flip(1)), -1)),
    "add": lambda x: exact.add(x, x.flip(1)),
}
TRUTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: reference.rms_norm(x, randn(x.shape[-1], seed=9), 1e-6),
    "log_softmax": reference.log_softmax,
    "softmax": reference.softmax,
    "mean": lambda x: reference.mean(x, -1, True),
    "silu": lambda x: torch.nn.functional.silu(x.double()),
    "silu_and_mul": lambda x: reference.silu_and_mul(torch.cat((x, x.flip(1)), -1)),
    "add": lambda x: x.double() + x.flip(1).double(),
}


@pytest.mark.parametrize("columns", [1, 7, 513, 9001])
@pytest.mark.parametrize("name", ROW_OPS)
def test_row_ops_against_float64_and_alone(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row op is close to float64, and has the same bytes for a row alone and with smaller tiles."""
    x = randn(37, columns) * 5
    whole = ROW_OPS[name](x)
    truth = TRUTHS[name](x)
    assert whole.dtype == torch.float32
    assert ((whole - truth).abs() <= 1.5e-7 * truth.abs() + 3e-7).all()
    for row in (0, 17, 36):
        assert_bitwise_equal(ROW_OPS[name](x[row : row + 1]), whole[row : row + 1])
    monkeypatch.setattr(exact_math, "TILE", 1000)
    assert_bitwise_equal(ROW_OPS[name](x), whole)
    assert ROW_OPS[name](x[:0]).shape == whole[:0].shape


def test_tiles_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = outlier_activations(300, 700), randn(1500, 700, seed=1)
    a, b = randn(6, 20, 50), randn(6, 50, 30, seed=1)

    def results() -> list[Tensor]:
        rows = [op(x) for op in ROW_OPS.values()]
        return [exact.linear(x, exact.quantize_weight(weight)), exact.bmm(a, b), *rows]

    before = results()
    threads = torch.get_num_threads()
    monkeypatch.setattr(exact_math, "TILE", 4096)
    monkeypatch.setattr(exact, "_ROW_BLOCK", 7)
    monkeypatch.setattr(exact, "_PRODUCT_ELEMENTS", 2000)
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        after = results()
    finally:
        torch.set_num_threads(threads)
    for left, right in zip(after, before, strict=True):
        assert_bitwise_equal(left, right)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["linear", "bmm", "rms_norm", "log_softmax", "softmax", "mean"])
def test_a_bad_number_spoils_its_own_row_only(name: str, bad: float) -> None:
    """A row with NaN or an infinity becomes NaN as a whole, and no other row changes."""
    weight = randn(6, 50, seed=1)
    ops = {
        **ROW_OPS,
        "linear": lambda x: exact.linear(x, exact.quantize_weight(weight)),
        "bmm": lambda x: exact.bmm(x[None], weight.t()[None])[0],
    }
    x = randn(5, 50)
    clean = ops[name](x)
    x[2, 20] = bad
    if name in ("log_softmax", "softmax") and bad == -torch.inf:  # -inf is a masked logit, not an error
        assert not ops[name](x).isnan().any()
        return
    spoilt = ops[name](x)
    assert spoilt[2].isnan().all()
    assert_bitwise_equal(spoilt[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_zero_rows_empty_batches_and_subnormals() -> None:
    """Zero rows and subnormals give +0, and empty batches give empty results of the right shape."""
    weight = exact.quantize_weight(randn(6, 50, seed=1))
    zeros = torch.zeros(2, 50)
    assert_bitwise_equal(exact.linear(-zeros, weight), torch.zeros(2, 6))
    assert_bitwise_equal(exact.rms_norm(zeros, torch.ones(50), 0.0), zeros)
    assert_bitwise_equal(exact.linear(torch.full((2, 50), 1e-40), weight), torch.zeros(2, 6))
    assert exact.linear(torch.zeros(0, 50), weight).shape == (0, 6)
    assert exact.linear(torch.zeros(2, 3, 50), weight).shape == (2, 3, 6)
    assert_bitwise_equal(exact.quantize_weight(torch.zeros(2, 3)).limb, torch.zeros(2, 3, dtype=torch.float64))
    assert exact.silu_and_mul(torch.zeros(0, 8)).shape == (0, 4)
    assert exact.bmm(torch.zeros(0, 2, 3), torch.zeros(0, 3, 4)).shape == (0, 2, 4)


@pytest.mark.parametrize("name", ["linear", *ROW_OPS])
def test_denormals_are_zero_mode_changes_nothing(name: str) -> None:
    """A CPU mode that flushes subnormals, which other code in the process may set, changes no byte."""
    weight = exact.quantize_weight(randn(6, 50, seed=1))
    op = ROW_OPS.get(name, lambda x: exact.linear(x, weight))
    x = randn(4, 50)
    x[0, ::3] *= 1e-39
    x[1] *= 1e-36
    x[2] = 2.0**-126
    before = op(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        assert_bitwise_equal(op(x), before)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("magnitude", [2.0**-95, 2.0**-40, 2.0**60, 2.0**115])
def test_huge_and_small_numbers_keep_their_precision(magnitude: float) -> None:
    x, weight = randn(3, 40).clamp(-1, 1), randn(5, 40, seed=1).clamp(-1, 1)
    scaled = exact.linear(x * magnitude, exact.quantize_weight(weight / magnitude))
    truth = reference.linear(x * magnitude, weight / magnitude)
    assert ((scaled - truth).abs() <= 1e-5).all()
    assert exact.linear(torch.full((1, 40), 3e38), exact.quantize_weight(torch.full((1, 40), 3e38))).item() == torch.inf


def test_a_vocabulary_of_2_to_the_19() -> None:
    """softmax and log_softmax are right for 2^19 columns, and refuse more."""
    row = torch.zeros(1, 2**19)
    assert exact.softmax(row).unique().tolist() == [2.0**-19]
    assert abs(exact.log_softmax(row)[0, 0].item() + 19 * 0.6931471805599453) < 1e-6
    with pytest.raises(AssertionError, match="at most 524288"):
        exact.log_softmax(torch.zeros(1, 2**19 + 1))


def test_log_softmax_keeps_tiny_logprobs() -> None:
    row = torch.tensor([[0.0, -20.0]])
    assert abs(exact.log_softmax(row)[0, 0].item() / -2.0611536e-9 - 1) < 1e-4


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_softmax_along_any_axis(dim: int) -> None:
    """softmax along any axis has the bytes of softmax along the last one."""
    x = randn(4, 6, 9)
    assert_bitwise_equal(exact.softmax(x, dim), exact.softmax(x.movedim(dim, -1)).movedim(-1, dim).contiguous())


@pytest.mark.parametrize(("dim", "keepdim"), [(0, True), ((0, 2), False), ((-1,), True), ((0, 1, 2), False)])
def test_mean_over_axes(dim: int | tuple[int, ...], keepdim: bool) -> None:
    """mean is close to float64 over one axis, several or all, with and without `keepdim`."""
    x = randn(4, 6, 9)
    truth = reference.mean(x, dim, keepdim)
    result = exact.mean(x, dim, keepdim)
    assert result.shape == truth.shape
    assert (result - truth).abs().max() < 1e-7


def test_rope_table_and_rotation() -> None:
    """The table is close to float64, a shorter table is its beginning, and a rotated row does not depend on others."""
    inv_freq = 1.0 / 1e5 ** (torch.arange(0, 48, 2).float() / 48)
    cos, sin = exact.rope_table(inv_freq, 3000, 1.5)
    angle = (torch.arange(3000).float()[:, None] * inv_freq).double()
    assert cos.shape == sin.shape == (3000, 24)
    assert (cos - 1.5 * angle.cos()).abs().max() < 1e-7
    assert (sin - 1.5 * angle.sin()).abs().max() < 1e-7
    assert_bitwise_equal(exact.rope_table(inv_freq, 17, 1.5)[0], cos[:17])
    x = randn(30, 5, 48)
    rotated = exact.apply_rope(x, cos[:30], sin[:30])
    assert (rotated - reference.apply_rope(x, cos[:30], sin[:30])).abs().max() < 1e-6
    assert_bitwise_equal(exact.apply_rope(x[7:8], cos[7:8], sin[7:8]), rotated[7:8])


def test_self_test_refuses_emulated_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose float64 products are computed in less precision is refused by name."""
    exact.self_test("cpu")
    real = torch.mm

    def emulated(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return out.copy_(real(a.float(), b.float()))

    monkeypatch.setattr(torch, "mm", emulated)
    with pytest.raises(RuntimeError, match="device cpu"):
        exact.self_test("cpu")
