"""Products that read packed weights have the bytes of the dense kernel's products with the numbers that they stand for.

The interpreter knows no Gluon: without a GPU the product's kernel is compiled, not run.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evalengine.kernels import expert_matmul, matmul, packed_matmul
from evalengine.kernels.expert_groups import group
from evalengine.kernels.packed_matmul import PackedSchedule
from evalengine.kernels.packed_rows import E2M1, PackedForm, PackedRows, fragments_of, rows_of, unpacked_by_torch
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels.compile_gluon import PACKED, compiled_elsewhere
from tests.kernels.packed_weights import FORMS, packed
from tests.kernels.test_attention_hopper import SHARED_BYTES
from tests.kernels.test_expert_matmul import ids_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter computes bf16 wrongly
HALVES = [torch.bfloat16, torch.float16]
IDS = [f"{form.kind}-{form.group}" for form in FORMS]
SCHEDULES = [
    *{packed_matmul.choose(rows, n): None for rows in (1, 32, 64) for n in (4096, 8192, 16384)},
    PackedSchedule(16, 1, 128, 2, num_warps=1),
    PackedSchedule(32, 4, 256, 3),
    PackedSchedule(64, 2, 128, 2, num_warps=8),
    PackedSchedule(64, 1, 256, 2, num_warps=8),
]


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def columns_of(form: PackedForm) -> int:
    """A K that no step divides, nor a fragment if the groups allow that."""
    return 512 + 256 if form.group == 256 else 384 if form.group == 128 else 288


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_fragments_are_the_rows_in_another_order(form: PackedForm) -> None:
    """No number is lost or rounded, whatever the sizes, and each lies where the module says."""
    for shape in ((1, 512), (37, 768), (2, 5, 1024), (3, 16, 256)):
        weight, truth = packed(form, *shape)
        fragments = fragments_of(weight)
        for one, other in zip(rows_of(fragments).tensors, weight.tensors, strict=True):
            assert_bitwise_equal(one, other)
        assert_bitwise_equal(unpacked_by_torch(fragments), truth)
    assert_bitwise_equal(unpacked_by_torch(fragments.of(2)), truth[2])
    for row, column in ((11, 201), (11, 208), (11, 216), (11, 224)):  # column 32 c + 16 b + 8 h + 2 t + e
        c, b, h, t, e = column % form.unit // 32, column // 16 % 2, column // 8 % 2, column // 2 % 4, column % 2
        words = fragments.words[2, row // 8, column // form.unit].view(8, 4, 4)[row % 8, t]
        stored = weight.codes[2, row]
        if not form.halves:
            assert words.view(torch.uint8).view(4, 4)[2 * c + b, 2 * h + e] == stored[column]
            continue
        half, code = int(words[c]) >> 16 * e, int(stored[column // 2]) >> 4 * e & 15
        if form.kind == "int4":
            assert half >> 8 * b + 4 * h & 15 == code
            continue
        last = half >> 4 & 0xC0 | half >> 5 & 0x100 | half << 1 & 0x8000
        bits = (half & 0x81C0, half << 3 & 0x81C0, half << 6 & 0x81C0, last)[2 * b + h]
        number = torch.tensor(bits, dtype=torch.int32).short().view(torch.bfloat16).double()
        assert number * 2.0**126 == E2M1[code] and number.signbit() == (code >= 8)


def test_large_powers_of_two_are_scales_in_float32() -> None:
    """The kernel's scale of e2m1, 2^126 times as much, would be none of a bfloat16's numbers."""
    weight, _ = packed(FORMS[0], 5, 256)
    for largest, scale in ((128, torch.uint8), (129, torch.float32)):
        weight.scales[3, 1] = largest
        fragments = fragments_of(weight)
        assert fragments.form == FORMS[0]._replace(scale=scale)
        assert_bitwise_equal(unpacked_by_torch(fragments), unpacked_by_torch(weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, BF16])
@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_a_weight_is_unpacked_to_its_numbers(form: PackedForm, dtype: torch.dtype) -> None:
    k = columns_of(form)
    for shape in ((37, k), (2, 5, k)):
        weight, truth = packed(form, *shape, device=DEVICE)
        out = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        assert_bitwise_equal(packed_matmul.unpack(fragments_of(weight), out).cpu(), truth.to(dtype))


def test_the_products_kernel_compiles_for_every_form() -> None:
    """To one instruction, as many as a step has, without a contraction, which would round once less."""
    cases = compiled_elsewhere("packed")
    assert len(cases) == len(PACKED) and {case["form"] for case in cases} == {*map(str, FORMS)}
    for case in cases:
        assert case["counts"] == case["expected"] and case["shared_bytes"] <= SHARED_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "biased"), [(torch.bfloat16, False), (torch.float16, True)])
@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_rows_have_the_dense_kernels_bytes(form: PackedForm, dtype: torch.dtype, biased: bool) -> None:
    """Of odd sizes, by the schedule of each number of rows; and by every schedule, in a product long enough for another
    order of K to show."""
    for n, k in ((45, columns_of(form)), (384, 2048)):
        weight, truth = packed(form, n, k, device=DEVICE)
        weight, dense = fragments_of(weight), truth.to(dtype).to(DEVICE)
        bias = numbers(n, dtype=dtype, seed=1) if biased else None
        whole = numbers(67, k, dtype=dtype, seed=2)
        expected = matmul.matmul(whole, dense.t(), bias, schedule=matmul.REFERENCE)
        calls = [(67, schedule) for schedule in SCHEDULES] if n > 45 else [(rows, None) for rows in (1, 7, 16, 33, 67)]
        for rows, schedule in calls:
            y = packed_matmul.fused(whole[:rows].contiguous(), weight, bias, None, schedule)
            assert_bitwise_equal(y, expected[:rows])


@pytest.mark.gpu
def test_another_order_of_k_has_other_bytes() -> None:
    """The inverse: the same numbers, 16 columns after 16 others, are another chain, which the comparison finds."""
    form = next(form for form in FORMS if form.kind == "int4")
    weight, truth = packed(form, 384, 2048, device=DEVICE)
    x = numbers(64, 2048, dtype=torch.bfloat16, seed=2)
    x, dense = (part.view(len(part), -1, 2, 16).flip(2).flatten(1) for part in (x, truth.to(x).contiguous()))
    expected = matmul.matmul(x, dense.t(), schedule=matmul.REFERENCE)
    in_order = x.view(64, -1, 2, 16).flip(2).flatten(1)
    assert count_differing(packed_matmul.fused(in_order, fragments_of(weight), None, None), expected)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[4]], ids=[IDS[0], IDS[4]])
def test_few_rows_and_many_are_one_product(form: PackedForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the weight is unpacked to memory is schedule; so is a form that was excluded."""
    k, n, dtype = columns_of(form), 40, torch.float16
    weight, truth = packed(form, n, k, device=DEVICE)
    weight, dense = fragments_of(weight), truth.to(dtype).to(DEVICE)
    x = numbers(packed_matmul.FEW + 3, k, dtype=dtype, seed=3)
    scratch = torch.full((n * k + 8,), torch.nan, dtype=dtype, device=DEVICE)
    few = packed_matmul.linear(x[:9], weight, None, scratch)
    assert scratch.isnan().all() == packed_matmul.fuses(dtype, form), "few rows write no weight to memory"
    assert_bitwise_equal(few, matmul.linear(x[:9], dense))
    many = packed_matmul.linear(x, weight, None, scratch)
    assert_bitwise_equal(many, matmul.linear(x, dense))
    assert not scratch[: n * k].isnan().any()
    monkeypatch.setattr(packed_matmul, "excluded", {form})
    scratch.fill_(torch.nan)
    assert_bitwise_equal(packed_matmul.linear(x[:9], weight, None, scratch), few)
    assert not scratch[: n * k].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[2], FORMS[5]], ids=[IDS[0], IDS[1], IDS[2], IDS[5]])
def test_experts_rows_have_the_dense_experts_bytes(form: PackedForm, dtype: torch.dtype) -> None:
    """Sorted into tiles and each pair alone, rows shared by experts and one a pair; experts without rows may be
    anything."""
    k, n = columns_of(form), 37
    for tokens, experts, chosen in ((23, 6, 3), (2, 40, 5)):
        ids = ids_of(tokens, experts, chosen)
        rows, truth = packed(form, experts, n, k, device=DEVICE)
        dense, bias = truth.to(dtype).to(DEVICE), numbers(experts, n, dtype=dtype, seed=5)
        poisoned = [part.clone() for part in rows.tensors]
        poisoned[0][-1] = 0x7F
        weight = fragments_of(PackedRows(poisoned[0], *rows[1:]))
        for height in (16, 32, packed_matmul.TALLEST):
            groups = group(ids, experts, height)
            for x in (numbers(tokens, k, dtype=dtype, seed=6), numbers(tokens, chosen, k, dtype=dtype, seed=7)):
                expected = expert_matmul.expert_linear(x, dense, bias, groups, expert_matmul.plainest(height))
                assert_bitwise_equal(packed_matmul.fused(x, weight, bias, groups), expected)


def test_what_is_counted_is_what_lies_in_memory() -> None:
    for form in FORMS:
        weight = packed(form, 3, 8, 512)[0]
        empty = PackedRows.empty(form, weight.shape, torch.device("cpu"))
        assert weight.shape == empty.shape == (3, 8, 512)
        assert [x.shape for x in weight.tensors] == [x.shape for x in empty.tensors]
        assert sum(x.nbytes for x in fragments_of(weight).tensors) == 24 * form.row_bytes(512)
