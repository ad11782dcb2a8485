"""The mode's scaled_dot_product_attention on the device at hand: torch's arguments, errors and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from evalengine.invariant import CoverageAudit
from evalengine.invariant.attention import attend, attend_with_gradients
from evalengine.kernels.attention_dense import dense_attention
from tests.bitwise import assert_bitwise_equal
from tests.invariant.cuda_operands import DEVICE, randn


@pytest.fixture
def registered() -> Iterator[None]:
    """The mode's two kernels, as the mode registers them for CUDA, and nothing else of it."""
    library = Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attend, DEVICE.upper())
    library.impl("scaled_dot_product_attention", attend_with_gradients, f"Autograd{DEVICE.upper()}")
    yield
    library._destroy()


def operands(heads: int = 4, kv_heads: int = 4) -> list[Tensor]:
    return [randn(2, count, 9, 16, seed=seed) for seed, count in enumerate((heads, kv_heads, kv_heads))]


MASK = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.6
CALLS = {
    "whole": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": MASK},
    "added": {"attn_mask": MASK.float() * 2 - 1},
    "scaled": {"scale": 0.1, "is_causal": True},
}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("call", CALLS)
def test_torch_s_arguments_reach_the_kernel(call: str, guard: type) -> None:
    q, k, v = operands()
    options = dict(CALLS[call])
    with guard():
        out = F.scaled_dot_product_attention(q, k, v, **options)
        given = options.get("attn_mask"), 0.0, options.get("is_causal", False)
        positional = F.scaled_dot_product_attention(q, k, v, *given, scale=options.get("scale"))
    mask = options.pop("attn_mask", None)
    expected = dense_attention(q, k, v, mask, **options)
    assert_bitwise_equal(out, expected)
    assert_bitwise_equal(positional, expected)


@pytest.mark.usefixtures("registered")
def test_the_audit_sees_one_op() -> None:
    for guard in (torch.no_grad, torch.inference_mode):
        with guard(), CoverageAudit() as audit:
            F.scaled_dot_product_attention(*operands(), is_causal=True)
            audit.uncovered.clear()  # it is CUDA that has the kernel
        assert audit.met["scaled_dot_product_attention"] == 1 and "bmm" not in audit.met


@pytest.mark.usefixtures("registered")
def test_grouped_heads_and_three_dimensions() -> None:
    q, k, v = operands(4, 2)
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_bitwise_equal(out, dense_attention(q, k, v))
    assert_bitwise_equal(F.scaled_dot_product_attention(q[0], k[0], v[0], enable_gqa=True), out[0])


@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_torch_s_own(call: str, request: pytest.FixtureRequest) -> None:
    """The result is the kernel's with gradients, too, and its gradients are those of torch."""
    options = dict(CALLS[call])
    if call == "added":
        options["attn_mask"] = options["attn_mask"].clone().requires_grad_()  # type: ignore[attr-defined]
    leaves = [*(x.requires_grad_() for x in operands()), *([options["attn_mask"]] if call == "added" else [])]
    weights = randn(2, 4, 9, 16, seed=7)
    stock = torch.autograd.grad((F.scaled_dot_product_attention(*leaves[:3], **options) * weights).sum(), leaves)
    request.getfixturevalue("registered")
    out = F.scaled_dot_product_attention(*leaves[:3], **options)
    with torch.no_grad():
        assert_bitwise_equal(out, F.scaled_dot_product_attention(*leaves[:3], **options))
    for ours, theirs in zip(torch.autograd.grad((out * weights).sum(), leaves), stock, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    q_alone = [leaves[0].detach().requires_grad_(), *(x.detach() for x in leaves[1:3])]
    (of_q,) = torch.autograd.grad((F.scaled_dot_product_attention(*q_alone, **options) * weights).sum(), q_alone[:1])
    torch.testing.assert_close(of_q, stock[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_the_kernel_does_not_cover_is_torch_s(guard: type, request: pytest.FixtureRequest) -> None:
    """Values of another width, float64, narrow heads, five dimensions, a scale below 0: torch's own result."""
    q, k, v = operands()
    cases = [
        ((q, k, randn(2, 4, 9, 24)), {}),
        ((q.double(), k.double(), v.double()), {}),
        ((q[..., :8], k[..., :8], v[..., :8]), {}),
        ((q[None], k[None], v[None]), {}),
        ((q, k, v), {"scale": -0.5}),
        ((q, k[:1], v[:1]), {}),
        ((q, k[:, :, :0], v[:, :, :0]), {}),
    ]
    stock = [F.scaled_dot_product_attention(*tensors, **options) for tensors, options in cases]
    request.getfixturevalue("registered")
    with guard():
        for (tensors, options), expected in zip(cases, stock, strict=True):
            torch.testing.assert_close(F.scaled_dot_product_attention(*tensors, **options), expected, equal_nan=True)


@pytest.mark.usefixtures("registered")
def test_errors_are_torch_s() -> None:
    q, k, v = operands()
    for wrong in (
        {"attn_mask": MASK.to(torch.int32)},
        {"attn_mask": MASK[:, :, :5]},
    ):
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, v, **wrong)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[..., :8], v)
