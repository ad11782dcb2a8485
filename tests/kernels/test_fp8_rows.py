"""Activations in FP8 are the nearest numbers by float64, at every level; a group's bytes hang on that group alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evalengine.kernels import exact_rows, fp8_rows
from evalengine.layers import create_ops
from evalengine.layers.variants import Fp8Rows
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter computes bf16 wrongly
RULES = [Fp8Rows(), Fp8Rows(128), Fp8Rows(128, power=True), Fp8Rows(None, 0.03699999302625656)]  # a float32 number
IGNORE_INTERPRETER = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def activations(tokens: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of unlike sizes, with outliers and ties: multiples of a 448th of the largest number are halves of steps."""
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(k))
    x = x * torch.logspace(-3, 2, tokens)[:, None]
    x[-1] = torch.arange(k) % 449
    x[-1, ::128] = 448
    return x.to(dtype).to(DEVICE)


def truth(x: Tensor, rule: Fp8Rows) -> Tensor:
    k = x.shape[-1]
    size = min(rule.group or k, k)
    padded = torch.nn.functional.pad(x.cpu().double(), (0, -k % size))
    return reference.fp8_rows(padded, size, rule.scale, rule.power)[:, :k]


def by_kernel(x: Tensor, rule: Fp8Rows) -> Tensor:
    return fp8_rows.fp8_rows(x, rule.group, rule.scale, rule.power)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 96), (7, 300), (3, 2500)])
def test_numbers_are_the_nearest_at_every_level(shape: tuple[int, int], rule: Fp8Rows) -> None:
    x = activations(*shape)
    expected = truth(x, rule).float()
    assert_bitwise_equal(by_kernel(x, rule).cpu(), expected)
    assert_bitwise_equal(exact_rows.fp8_rows(x, rule.group, rule.scale, rule.power).cpu(), expected)
    fast = create_ops("fast", torch.float32, torch.device("cpu")).fp8_rows(x.cpu(), rule)
    assert torch.equal(fast, expected)  # but for zeros' signs
    assert count_differing(expected, x.cpu()) or shape == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_result_is_rounded_to_the_models_dtype(rule: Fp8Rows, dtype: torch.dtype) -> None:
    x = activations(5, 300, dtype)
    assert_bitwise_equal(by_kernel(x, rule).cpu(), truth(x, rule).float().to(dtype))


@pytest.mark.parametrize("level", ["kernel", "exact"])
def test_a_row_has_its_bytes_alone_and_a_scale_of_all_rows_would_not_give_them(level: str) -> None:
    def rows(x: Tensor, group: int | None = None, scale: float | None = None) -> Tensor:
        return (fp8_rows if level == "kernel" else exact_rows).fp8_rows(x, group, scale)  # type: ignore[attr-defined]

    x = activations(9, 300)
    for group in (None, 128):
        whole = rows(x, group)
        for i in range(9):
            assert_bitwise_equal(rows(x[i : i + 1], group), whole[i : i + 1])
        assert_bitwise_equal(rows(x.view(3, 3, 300), group).flatten(0, 1), whole)
        assert_bitwise_equal(rows(x.flip(0), group).flip(0), whole)
    of_all = rows(x, None, float(x.abs().max()) / 448)[3:4]
    alone = rows(x[3:4], None, float(x[3].abs().max()) / 448)
    assert count_differing(of_all, alone), "dynamic by the tensor: other rows change this one's bytes"


def test_tiles_and_views_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = activations(6, 700)
    for rule in RULES:
        whole = by_kernel(x, rule)
        wide = torch.cat([x, x], 1)
        assert_bitwise_equal(by_kernel(wide[:, :700], rule), whole)
        for block, warps in ((128, 1), (1024, 8)):
            with monkeypatch.context() as patch:
                patch.setattr(fp8_rows, "BLOCK", block)
                patch.setattr(fp8_rows, "WARPS", warps)
                patch.setattr(fp8_rows, "_launches", {})
                assert_bitwise_equal(by_kernel(x, rule), whole)


@IGNORE_INTERPRETER
@pytest.mark.parametrize("power", [False, True])
def test_edges(power: bool) -> None:
    """A group of zeros stays so, one that is not finite becomes NaN and changes no other, tiny numbers are kept."""
    x, rule = activations(4, 256), Fp8Rows(128, power=power)
    plain = by_kernel(x, rule)
    odd = x.clone()
    odd[0, :128], odd[1, 130], odd[2, 3] = 0.0, torch.inf, torch.nan
    fast = create_ops("fast", torch.float32, torch.device("cpu")).fp8_rows(odd.cpu(), rule).to(DEVICE)
    for found in (by_kernel(odd, rule), exact_rows.fp8_rows(odd, 128, None, power), fast):
        assert not found[0, :128].any() and found[1, 128:].isnan().all() and found[2, :128].isnan().all()
        assert_bitwise_equal(found[3], plain[3])
        for part in (found[0, 128:], found[1, :128], found[2, 128:], found[3]):
            assert part.isfinite().all()
    constant = Fp8Rows(None, 0.5)
    for found in (by_kernel(odd, constant), exact_rows.fp8_rows(odd, None, 0.5)):
        assert found.isnan().sum() == 2 and found[1, 130].isnan() and found[2, 3].isnan()
    assert by_kernel(torch.full((1, 8), 1e-37, device=DEVICE), Fp8Rows()).isfinite().all()
    empty = torch.empty(0, 256, device=DEVICE)
    assert by_kernel(empty, Fp8Rows(128)).shape == exact_rows.fp8_rows(empty, 128).shape == (0, 256)
