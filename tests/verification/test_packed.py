"""The comparison of packed weights at loading: what differs or does not run is found, and its weights are unpacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels import expert_matmul, matmul, packed_matmul
from evalengine.kernels.packed_rows import PackedForm, PackedFragments, PackedRows, unpacked_by_torch
from evalengine.verification import packed
from tests.bitwise import assert_bitwise_equal
from tests.kernels.packed_weights import FORMS
from tests.kernels.packed_weights import packed as random_packed
from tests.verification.verify_double import DEVICE
from tests.verification.verify_double import alone as alone  # The fixture is used by every test here.

FORM = PackedForm("e2m1", 32, torch.uint8)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (packed, "_compared", {}),
        (packed, "_unreadable", set()),
        (packed_matmul, "excluded", set()),
    ):
        monkeypatch.setattr(module, name, value)
    if DEVICE.type == "cpu":  # the interpreter's time
        monkeypatch.setattr(packed, "DENSE_ROWS", (1, 17))
        monkeypatch.setattr(packed, "HEIGHTS", (16,))
        monkeypatch.setattr(packed_matmul, "GLUON", True)
        monkeypatch.setattr(packed_matmul, "fused", unpacked_first)


def unpacked_first(x: Tensor, weight: PackedFragments, bias: Tensor | None, groups: Any) -> Tensor:
    """In place of the product's kernel, which the interpreter cannot run: what the kernel is compared with."""
    dense = packed_matmul.unpack(weight, torch.empty(weight.shape, dtype=x.dtype, device=x.device))
    if groups is None:
        return matmul.matmul(x, dense.t(), bias, schedule=matmul.REFERENCE)
    return expert_matmul.expert_linear(x, dense, bias, groups, expert_matmul.plainest(groups.block_m))


def weight_of(*shape: int) -> tuple[PackedRows, Tensor]:
    """With scales of 1; and room to unpack it."""
    weight = random_packed(FORM, *shape, device=str(DEVICE))[0]
    weight.scales.fill_(127)
    return weight, torch.empty(weight.shape.numel(), dtype=torch.float16, device=DEVICE)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_torch_unpacks_to_the_same_numbers(form: PackedForm) -> None:
    weight, truth = random_packed(form, 5, 512)
    assert_bitwise_equal(unpacked_by_torch(weight), truth)


@pytest.mark.parametrize("shape", [(37, 128), (3, 20, 64)])
def test_what_is_right_stays_packed(shape: tuple[int, ...]) -> None:
    """A product with biases is another kernel, so it is compared, too."""
    weight, scratch = weight_of(*shape)
    for biased in (False, True):
        fragments = packed.verified(weight, scratch, biased)
        assert isinstance(fragments, PackedFragments)
        assert_bitwise_equal(unpacked_by_torch(fragments), unpacked_by_torch(weight))
    assert packed.packed_verdict() == {"compared": 2, "dropped": []} and not packed_matmul.excluded


@pytest.mark.parametrize("shape", [(37, 128), (3, 20, 64)])
def test_a_wrong_bias_is_found(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    real = packed_matmul.fused
    monkeypatch.setattr(packed_matmul, "fused", lambda x, weight, bias, *rest: real(x, weight, None, *rest))
    weight, scratch = weight_of(*shape)
    assert isinstance(packed.verified(weight, scratch), PackedFragments) and not packed_matmul.excluded
    packed.verified(weight, scratch, biased=True)
    assert weight.form in packed_matmul.excluded


@pytest.mark.parametrize("shape", [(37, 128), (3, 20, 64)])
@pytest.mark.parametrize("fault", ["differs", "does not run"])
def test_a_product_that_is_wrong_is_found(
    shape: tuple[int, ...], fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = packed_matmul.fused

    def fused(*args: Any) -> Tensor:
        if fault == "does not run":
            raise RuntimeError("no room for this tile")
        y = real(*args)
        y.view(-1)[-1] += 1
        return y

    monkeypatch.setattr(packed_matmul, "fused", fused)
    weight, scratch = weight_of(*shape)
    assert isinstance(packed.verified(weight, scratch), PackedFragments) and packed_matmul.excluded == {FORM}
    (sentence,) = packed.packed_verdict()["dropped"]
    assert ("no room" in sentence) == (fault == "does not run") and sentence in caplog.text


def test_a_weight_that_is_unpacked_wrongly_is_unpacked_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packed_matmul.unpack
    monkeypatch.setattr(packed_matmul, "unpack", lambda weight, out: real(weight, out).add_(1))
    weight, scratch = weight_of(9, 64)
    for _ in range(2):  # the verdict on a form holds for every weight
        found = packed.verified(weight, scratch)
        assert isinstance(found, Tensor)
        assert_bitwise_equal(found.cpu(), unpacked_by_torch(weight).to(found.dtype).cpu())
    assert "unpacking differs" in packed.packed_verdict()["dropped"][0]
