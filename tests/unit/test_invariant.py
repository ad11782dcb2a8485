"""The aten overrides: what they cover, how they nest, and a transformers model whose rows ignore the batch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.invariant import COVERED_OPS, is_batch_invariant_mode, set_batch_invariant_mode
from tests.bitwise import assert_bitwise_equal, count_differing


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differs_from_stock() -> bool:
    """Whether the overrides are live: a float32 product whose exact value stock torch misses somewhere."""
    a, b = randn(64, 900), randn(900, 64, seed=1)
    return not torch.equal(torch.mm(a, b), torch.mm(a, b, out=torch.empty(64, 64)))


def test_plain_call_context_nesting_and_exceptions() -> None:
    assert not differs_from_stock()
    with set_batch_invariant_mode():
        assert differs_from_stock()
        with set_batch_invariant_mode(False):
            assert not differs_from_stock()
            with set_batch_invariant_mode(True):
                assert differs_from_stock()
            assert not differs_from_stock()
        assert differs_from_stock()
        with pytest.raises(KeyError), set_batch_invariant_mode(False):
            raise KeyError
        assert differs_from_stock()
    assert not differs_from_stock()
    set_batch_invariant_mode(True)
    assert differs_from_stock() and is_batch_invariant_mode()
    set_batch_invariant_mode(False)
    assert not differs_from_stock() and not is_batch_invariant_mode()


def test_installing_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with set_batch_invariant_mode():
            pass


OPS = {
    "linear": lambda x: F.linear(x, randn(33, 90, seed=1, dtype=x.dtype)),
    "linear_bias": lambda x: F.linear(x, randn(33, 90, seed=1, dtype=x.dtype), randn(33, seed=2, dtype=x.dtype)),
    "linear_3d": lambda x: F.linear(x[:, None], randn(33, 90, seed=1, dtype=x.dtype))[:, 0],
    "matmul": lambda x: x @ randn(90, 33, seed=1, dtype=x.dtype),
    "einsum": lambda x: torch.einsum("mk,nk->mn", x, randn(33, 90, seed=1, dtype=x.dtype)),
    "bmm": lambda x: torch.bmm(x[:, None], randn(1, 90, 33, seed=1, dtype=x.dtype).expand(len(x), -1, -1))[:, 0],
    "baddbmm": lambda x: torch.baddbmm(
        x[:, None, :33], x[:, None], randn(1, 90, 33, seed=1, dtype=x.dtype).expand(len(x), -1, -1), beta=0.5, alpha=2
    )[:, 0],
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "rms_norm": lambda x: F.rms_norm(x, (90,), eps=1e-6),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPS)
def test_rows_do_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    x = randn(67, 90, dtype=dtype)
    stock = op(x)
    with set_batch_invariant_mode(), torch.no_grad():
        whole = op(x)
        for start, rows in [(0, 1), (3, 2), (10, 17), (66, 1)]:
            assert_bitwise_equal(op(x[start : start + rows]), whole[start : start + rows])
    assert whole.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(whole, stock, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("name", ["linear", "silu", "sigmoid", "mean"])
def test_stock_rows_do_depend_on_the_batch(name: str) -> None:
    op, x = OPS[name], randn(67, 90)
    whole = op(x)
    slices = [(start, rows) for start in range(40) for rows in range(1, 27)]
    if name == "mean":  # stock reduces one long row in another order than many
        x = randn(600, 90)
        whole, slices = x.T.mean(-1), [(0, rows) for rows in range(1, 90)]
        assert any(not torch.equal(x.T[a : a + n].mean(-1), whole[a : a + n]) for a, n in slices)
        return
    assert any(not torch.equal(op(x[a : a + n]), whole[a : a + n]) for a, n in slices)


def test_strided_linear_equals_contiguous_linear() -> None:
    """A 3-D strided input reaches bmm (and add) instead of mm or addmm, by strides that depend on the batch."""
    x, weight, bias = randn(7, 5, 90), randn(33, 90, seed=1), randn(33, seed=2)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    with set_batch_invariant_mode(), torch.no_grad():
        for b in (None, bias):
            assert_bitwise_equal(F.linear(strided, weight, b), F.linear(x, weight, b))
            assert_bitwise_equal(F.linear(strided[:1], weight, b), F.linear(x, weight, b)[:1])
        assert_bitwise_equal(F.linear(x[0, 0], weight), F.linear(x, weight)[0, 0])


def test_scaled_dot_product_attention_is_covered() -> None:
    q, k, v = (randn(5, 4, 37, 16, seed=s) for s in range(3))
    with set_batch_invariant_mode(), torch.no_grad():
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert_bitwise_equal(F.scaled_dot_product_attention(q[2:3], k[2:3], v[2:3], is_causal=True), whole[2:3])
        exact_way = ((q * 0.25) @ k.transpose(-1, -2)).masked_fill(~torch.ones(37, 37).tril().bool(), -torch.inf)
        torch.testing.assert_close(whole, exact_way.softmax(-1) @ v, rtol=1e-5, atol=1e-6)
        assert count_differing(whole, F.scaled_dot_product_attention(q, k, v, is_causal=True)) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_other_dtypes_keep_torchs_kernels(dtype: torch.dtype) -> None:
    a, b = (randn(6, 6, seed=1) * 5).to(dtype), (randn(6, 6, seed=2) * 5).to(dtype)
    calls = [
        lambda: torch.mm(a, b),
        lambda: torch.addmm(a, a, b, beta=2),
        lambda: torch.bmm(a[None], b[None]),
        lambda: torch.baddbmm(a[None], a[None], b[None]),
        lambda: torch.mv(a, b[0]),
        lambda: torch.dot(a[0], b[0]),
        lambda: torch.sigmoid(a),
        lambda: torch.mean(a, 0, dtype=torch.complex64 if dtype.is_complex else torch.float64),
        *([lambda: a.softmax(0), lambda: a.log_softmax(0), lambda: F.silu(a)] if dtype == torch.float64 else []),
    ]
    expected = [call() for call in calls]
    with set_batch_invariant_mode():
        for call, stock in zip(calls, expected, strict=True):
            assert_bitwise_equal(call(), stock)


def test_empty_and_scalar_inputs() -> None:
    with set_batch_invariant_mode():
        assert torch.mm(torch.zeros(0, 3), torch.zeros(3, 4)).shape == (0, 4)
        assert_bitwise_equal(torch.mm(torch.zeros(2, 0), torch.zeros(0, 4)), torch.zeros(2, 4))
        assert torch.zeros(0, 5).softmax(-1).shape == (0, 5)
        assert torch.tensor(2.0).softmax(0) == 1 and torch.tensor(2.0).mean() == 2
        assert (
            torch.zeros(3, 4).mean() == 0 and torch.mean(torch.ones(2, 2).bfloat16(), 0, dtype=torch.float32).sum() == 2
        )


def test_autocast_and_gradients_pass_through() -> None:
    x, weight = randn(5, 90), randn(33, 90, seed=1).requires_grad_()
    with set_batch_invariant_mode():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            whole = F.linear(x, weight)
            assert whole.dtype == torch.bfloat16
            assert_bitwise_equal(F.linear(x[:1], weight), whole[:1])
        F.linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(33, -1))


def test_every_covered_op_is_documented() -> None:
    assert {"mm", "addmm", "bmm", "baddbmm", "_softmax", "_log_softmax", "mean.dim"} <= set(COVERED_OPS)
    assert all(note for _, note in COVERED_OPS.values())


def small_model(architecture: str, attention: str, dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        hidden_size=60, intermediate_size=116, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=20, vocab_size=211, max_position_embeddings=64, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_a_transformers_model(architecture: str, attention: str, dtype: torch.dtype) -> None:
    model = small_model(architecture, attention, dtype)
    stock_differs = 0
    for length in (1, 7, 23):
        ids = torch.randint(0, 211, (5, length), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            together = model(ids).logits
            stock_differs += sum(count_differing(model(ids[i : i + 1]).logits, together[i : i + 1]) for i in range(5))
            with set_batch_invariant_mode():
                together = model(ids).logits
                for i in range(5):
                    assert_bitwise_equal(model(ids[i : i + 1]).logits, together[i : i + 1])
                assert_bitwise_equal(model(ids[[3, 1]]).logits, together[[3, 1]])
    if dtype == torch.float32:
        assert stock_differs
