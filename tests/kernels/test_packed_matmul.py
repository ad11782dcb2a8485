"""Products that read packed weights have the bytes of the dense kernel's products with the numbers that they stand for.

In the interpreter NumPy's order of summation follows the tile's depth, which is the same on both sides.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evalengine.kernels import expert_matmul, matmul, packed_matmul
from evalengine.kernels.expert_groups import group
from evalengine.kernels.launching import launch
from evalengine.kernels.matmul_schedules import POINTER, MatmulSchedule
from evalengine.kernels.packed_matmul import PackedSchedule
from evalengine.kernels.packed_rows import PackedForm, PackedRows
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels.packed_weights import FORMS, packed
from tests.kernels.test_expert_matmul import ids_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter computes bf16 wrongly
DTYPES = [torch.float16, torch.float32, BF16]
IDS = [f"{form.kind}-{form.group}" for form in FORMS]


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def of_the_same_depth(s: PackedSchedule) -> MatmulSchedule:
    """The dense product's schedule of the same tiles; on a GPU any other one has the same bytes."""
    return MatmulSchedule(
        POINTER, s.block_m, packed_matmul.WEIGHT_ROWS, s.block_k, s.num_warps, s.num_stages, swap=True
    )


def columns_of(form: PackedForm) -> int:
    """A K that no tile's depth divides, if the groups allow that."""
    return 512 if form.group == 256 else 384 if form.group == 128 else 288


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_a_weight_is_unpacked_to_its_numbers(form: PackedForm, dtype: torch.dtype) -> None:
    k = columns_of(form)
    for shape in ((37, k), (2, 5, k)):
        weight, truth = packed(form, *shape, device=DEVICE)
        out = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        assert_bitwise_equal(packed_matmul.unpack(weight, out).cpu(), truth.to(dtype))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_rows_have_the_dense_kernels_bytes(form: PackedForm, dtype: torch.dtype, biased: bool) -> None:
    k, n = columns_of(form), 45
    weight, truth = packed(form, n, k, device=DEVICE)
    dense = truth.to(dtype).to(DEVICE)
    bias = numbers(n, dtype=dtype, seed=1) if biased else None
    whole = numbers(19, k, dtype=dtype, seed=2)
    for schedule in (packed_matmul.choose(19), PackedSchedule(16, 64)):
        expected = matmul.matmul(whole, dense.t(), bias, schedule=of_the_same_depth(schedule))
        assert_bitwise_equal(packed_matmul.fused(whole, weight, bias, None, schedule), expected)
        for rows in (1, 16):
            y = packed_matmul.fused(whole[:rows].contiguous(), weight, bias, None, schedule)
            assert_bitwise_equal(y, expected[:rows])
    assert count_differing(expected, packed_matmul.fused(whole.flip(1), weight, bias, None))


@pytest.mark.parametrize("form", [FORMS[0], FORMS[4]], ids=[IDS[0], IDS[4]])
def test_few_rows_and_many_are_one_product(form: PackedForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the weight is unpacked to memory is schedule; so is a form that was excluded."""
    k, n = columns_of(form), 40
    weight, truth = packed(form, n, k, device=DEVICE)
    x, scratch = numbers(packed_matmul.FEW + 3, k, dtype=torch.float32, seed=3), torch.empty(n * k + 8, device=DEVICE)
    many = packed_matmul.linear(x, weight, None, scratch)
    assert_bitwise_equal(many, matmul.linear(x, truth.to(DEVICE)))
    torch.testing.assert_close(packed_matmul.linear(x[:9], weight, None, scratch), many[:9])
    scratch.fill_(torch.nan)
    packed_matmul.linear(x[:9], weight, None, scratch)
    assert scratch.isnan().all(), "few rows write no weight to memory"
    monkeypatch.setattr(packed_matmul, "excluded", {form})
    assert_bitwise_equal(packed_matmul.linear(x[:9], weight, None, scratch), matmul.linear(x[:9], truth.to(DEVICE)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[5]], ids=[IDS[0], IDS[2], IDS[5]])
def test_experts_rows_have_the_dense_experts_bytes(form: PackedForm, dtype: torch.dtype) -> None:
    """Sorted into tiles and each pair alone, rows shared by experts and one a pair; experts without rows may be
    anything."""
    k, n = columns_of(form), 37
    for tokens, experts, chosen in ((23, 6, 3), (2, 40, 5)):
        ids = ids_of(tokens, experts, chosen)
        weight, truth = packed(form, experts, n, k, device=DEVICE)
        dense, bias = truth.to(dtype).to(DEVICE), numbers(experts, n, dtype=dtype, seed=5)
        groups = group(ids, experts, 16)
        schedule = of_the_same_depth(packed_matmul.choose(16))
        poisoned = [part.clone() for part in weight.tensors]
        poisoned[0][-1] = 0x7F
        weight = PackedRows(poisoned[0], *weight[1:])
        for x in (numbers(tokens, k, dtype=dtype, seed=6), numbers(tokens, chosen, k, dtype=dtype, seed=7)):
            expected = expert_matmul.expert_linear(x, dense, bias, groups, schedule)
            assert_bitwise_equal(packed_matmul.fused(x, weight, bias, groups), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_every_schedule_is_a_chain_of_wgmma(form: PackedForm, dtype: torch.dtype) -> None:
    """By bytes, in a product long enough for another order of K to show, and by the instruction that was compiled."""
    weight, truth = packed(form, 384, 2048, device=DEVICE)
    x = numbers(256, 2048, dtype=dtype, seed=2)
    expected = matmul.matmul(x, truth.to(dtype).to(DEVICE).t(), schedule=matmul.REFERENCE)
    for schedule in {packed_matmul.choose(rows) for rows in range(1, packed_matmul.FEW + 1)}:
        assert_bitwise_equal(packed_matmul.fused(x, weight, None, None, schedule), expected)
    variants = [v for key, v in launch._variants.items() if key[0] is packed_matmul._packed_kernel]
    assert variants and all("wgmma" in variant.compiled.asm["ptx"] for variant in variants)


@pytest.mark.gpu
def test_a_tile_of_fewer_weight_rows_has_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse: with 32 rows the product is an mma.sync over K in another order, which the comparison finds."""
    form = next(form for form in FORMS if form.kind == "int4")
    weight, truth = packed(form, 384, 2048, device=DEVICE)
    x = numbers(64, 2048, dtype=torch.bfloat16, seed=2)
    expected = matmul.matmul(x, truth.to(torch.bfloat16).to(DEVICE).t(), schedule=matmul.REFERENCE)
    monkeypatch.setattr(packed_matmul, "WEIGHT_ROWS", 32)
    monkeypatch.setattr(packed_matmul, "_launches", {})
    assert count_differing(packed_matmul.fused(x, weight, None, None, PackedSchedule(64, 128)), expected)


@pytest.mark.parametrize(("block_m", "warps"), [(16, 1), (16, 2), (16, 8), (32, 8), (64, 16)])
def test_a_schedule_cannot_express_another_instruction(block_m: int, warps: int) -> None:
    with pytest.raises(AssertionError, match="64 weight rows"):
        PackedSchedule(block_m, 128, num_warps=warps)


def test_what_is_counted_is_what_lies_in_memory() -> None:
    for form in FORMS:
        weight = packed(form, 3, 7, 512)[0]
        empty = PackedRows.empty(form, weight.shape, torch.device("cpu"))
        assert weight.shape == empty.shape == (3, 7, 512)
        assert [x.shape for x in weight.tensors] == [x.shape for x in empty.tensors]
        assert sum(x.nbytes for x in weight.tensors) == 21 * form.row_bytes(512)
