"""The mode's scaled_dot_product_attention on the device at hand: torch's arguments, errors and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from evalengine.invariant import CoverageAudit, cuda
from evalengine.invariant.cuda import attend, attend_with_gradients
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


def penalty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The gradient, by q, of the squared norm of attention's gradients by q, k and v: some hundreds."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    first = torch.autograd.grad((out * out).sum(), (q, k, v), create_graph=True)
    (second,) = torch.autograd.grad(sum((g * g).sum() for g in first), q)
    return second


def test_gradients_of_gradients(request: pytest.FixtureRequest) -> None:
    """Also where one tensor is query, key and value at once."""
    with sdpa_kernel(SDPBackend.MATH):
        separate = [x.requires_grad_() for x in operands()]
        same = [separate[0]] * 3
        stock = [penalty(*separate), penalty(*same)]
        request.getfixturevalue("registered")
        for tensors, expected in zip((separate, same), stock, strict=True):
            torch.testing.assert_close(penalty(*tensors), expected, rtol=1e-3, atol=1e-3)


def test_forward_derivatives_and_transforms_are_torch_s(request: pytest.FixtureRequest) -> None:
    q, k, v = operands()
    tangent = randn(*q.shape, seed=9)

    def attend_q(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, k, v)

    def all_of_them() -> list[Tensor]:
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(attend_q(forward_ad.make_dual(q, tangent))).tangent
        assert dual is not None
        return [
            dual,
            torch.func.jvp(attend_q, (q,), (tangent,))[1],
            torch.func.grad(lambda x: attend_q(x).sum())(q),
            torch.func.vmap(lambda x: F.scaled_dot_product_attention(x[None], k[:1], v[:1]))(q),
        ]

    with sdpa_kernel(SDPBackend.MATH):
        stock = all_of_them()
        request.getfixturevalue("registered")
        for ours, theirs in zip(all_of_them(), stock, strict=True):
            assert theirs.abs().max() > 0.01
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("registered")
def test_a_batch_of_one_beside_a_batch() -> None:
    """Queries, keys or masks that a whole batch shares: a row has the bits that it has in a batch of one."""
    q, k, v = operands()
    for shared in ((q[:1], k, v), (q, k[:1], v[:1])):
        whole = F.scaled_dot_product_attention(*shared)
        for row in range(2):
            alone = F.scaled_dot_product_attention(*(x[row : row + 1] if len(x) > 1 else x for x in shared))
            assert_bitwise_equal(whole[row : row + 1], alone)
    three = [x[:, 0] for x in (q, k, v)]  # the first dimension is the batch here
    whole = F.scaled_dot_product_attention(three[0], three[1][:1], three[2][:1], attn_mask=MASK[:, 0])
    assert_bitwise_equal(whole[1:], F.scaled_dot_product_attention(q[1, :1], k[0, :1], v[0, :1], attn_mask=MASK[1]))


COVERED = operands()
NOT_COVERED: dict[str, tuple[Callable[[], tuple[Tensor, ...]], dict[str, Any]]] = {
    "values of another width": (lambda: (COVERED[0], COVERED[1], randn(2, 4, 9, 24)), {}),
    "float64": (lambda: tuple(x.double() for x in COVERED), {}),
    "narrow heads": (lambda: tuple(x[..., :8] for x in COVERED), {}),
    "five dimensions": (lambda: tuple(x[None] for x in COVERED), {}),
    "a scale below 0": (lambda: tuple(COVERED), {"scale": -0.5}),
    "a tiny scale": (lambda: tuple(COVERED), {"scale": 1e-40}),
    "dropout": (lambda: tuple(COVERED), {"dropout_p": 1.0}),
    "no keys": (lambda: (COVERED[0], COVERED[1][:, :, :0], COVERED[2][:, :, :0]), {}),
    "a causal mask besides": (lambda: tuple(COVERED), {"attn_mask": MASK, "is_causal": True}),
}


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("case", NOT_COVERED)
def test_what_the_kernel_does_not_cover_is_torch_s(
    case: str, guard: type, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results, and its errors."""
    make, options = NOT_COVERED[case]
    monkeypatch.setattr(cuda, "dense_attention", lambda *args, **options: pytest.fail("the kernel was called"))

    def outcome() -> Tensor | str:
        try:
            return F.scaled_dot_product_attention(*make(), **options)
        except RuntimeError as error:
            return str(error)

    with guard(), sdpa_kernel(SDPBackend.MATH):
        stock = outcome()
        request.getfixturevalue("registered")
        ours = outcome()
    if isinstance(stock, str):
        assert ours == stock
    else:
        torch.testing.assert_close(ours, stock, equal_nan=True)


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
