"""The aten overrides: what they cover, how they nest, and a transformers model whose rows ignore the batch."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.invariant import (
    COVERED_OPS,
    CoverageAudit,
    UncoveredOpError,
    is_batch_invariant_mode,
    set_batch_invariant_mode,
)
from evalengine.invariant.audit import REDUCTIONS, UNEVEN_ON_CPU
from evalengine.invariant.cpu import CPUOverrides
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
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_column": lambda x: F.gelu(x[:, :1].contiguous()),
    "gelu_": lambda x: torch.ops.aten.gelu_(x.clone()),
    "silu_": lambda x: F.silu(x.clone(), inplace=True),
    "glu": lambda x: F.glu(x, -1),
    "glu_across": lambda x: F.glu(torch.stack((x, x.flip(1))), 0)[0],
    "sum": lambda x: x.sum(-1),
    "sum_keepdim": lambda x: x.view(-1, 9, 10).sum((1, -1), keepdim=True),
    "sum_across": lambda x: x.t().contiguous().sum(0),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1, correction=0),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, -1, keepdim=True), -1),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, -1, keepdim=True), -1),
    "norm": lambda x: x.norm(dim=-1),
    "norm_1": lambda x: x.norm(1, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer_norm": lambda x: F.layer_norm(x, (90,), randn(90, seed=1, dtype=x.dtype), randn(90, seed=2, dtype=x.dtype)),
    "layer_norm_float32": lambda x: F.layer_norm(x, (90,), randn(90, seed=1)),
    "layer_norm_plain": lambda x: F.layer_norm(x.view(-1, 9, 10), (9, 10)),
    "group_norm": lambda x: F.group_norm(
        x.view(-1, 6, 15), 3, randn(6, seed=1, dtype=x.dtype), randn(6, seed=2, dtype=x.dtype)
    ),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum_across": lambda x: x.t().contiguous().cumsum(0).t(),
    "cumprod": lambda x: x.cumprod(-1),
    "index_add": lambda x: torch.zeros_like(x).index_add_(
        0, torch.arange(len(x)).repeat(3), torch.cat((x, -x / 3, x**2))
    ),
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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, torch.float32)
        for name in ("linear", "silu", "sigmoid", "gelu_column", "gelu_tanh", "mean", "glu_across", "sum_across")
    ]
    + [("gelu", torch.float16), ("rsqrt", torch.bfloat16)],
)
def test_stock_rows_do_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    op, x = OPS[name], randn(67, 90, dtype=dtype)
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
        lambda: torch.addmv(a[0], a, b[0]),
        lambda: a.clone().addmm_(a, b),
        lambda: a[None].clone().baddbmm_(a[None], b[None]),
        lambda: torch.sigmoid(a),
        lambda: torch.mean(a, 0, dtype=torch.complex64 if dtype.is_complex else torch.float64),
        *([lambda: a.softmax(0), lambda: a.log_softmax(0), lambda: F.silu(a)] if dtype == torch.float64 else []),
    ]
    expected = [call() for call in calls]
    with set_batch_invariant_mode():
        for call, stock in zip(calls, expected, strict=True):
            assert_bitwise_equal(call(), stock)


@pytest.mark.parametrize("dim", [2, -3, (0, 0), (1, -1), (0, 5)])
def test_a_dimension_that_there_is_not_is_torchs_error(dim: int | tuple[int, ...]) -> None:
    x = torch.ones(2, 3)
    with pytest.raises((IndexError, RuntimeError)) as stock:
        x.mean(dim)
    with set_batch_invariant_mode(), pytest.raises(stock.type) as ours:
        x.mean(dim)
    assert str(ours.value) == str(stock.value)


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


def test_scaled_dot_product_attention_takes_the_math_path_and_goes_back() -> None:
    q, k, v = (randn(2, 4, 7, 16, seed=s) for s in range(3))
    ours, fused = "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"
    with torch.no_grad():
        for _ in range(2):
            assert met(lambda: F.scaled_dot_product_attention(q, k, v)) & {ours, fused} == {fused}
            with set_batch_invariant_mode():
                assert met(lambda: F.scaled_dot_product_attention(q, k, v)) & {ours, fused} == {ours}


def test_fused_attention_is_refused() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = randn(1, 2, 5, 16)
    with set_batch_invariant_mode():
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            pytest.raises(ConfigError, match=r"math path.*remove sdpa_kernel"),
        ):
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, q, q)


def test_fully_masked_rows_give_zeros() -> None:
    q, k, v = (randn(1, 2, 5, 16, seed=s) for s in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)  # row 0 sees nothing
    with set_batch_invariant_mode(), torch.no_grad():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert not out[:, :, 0].any() and out[:, :, 1:].isfinite().all() and out[:, :, 1:].any()


def test_in_place_products_equal_the_plain_ones() -> None:
    a, b, bias = randn(7, 90), randn(90, 33, seed=1), randn(7, 33, seed=2)
    with set_batch_invariant_mode():
        assert_bitwise_equal(bias.clone().addmm_(a, b, beta=0.5), torch.addmm(bias, a, b, beta=0.5))
        assert_bitwise_equal(bias[None].clone().baddbmm_(a[None], b[None])[0], torch.addmm(bias, a, b))
        assert_bitwise_equal(torch.addmv(bias[:, 0], a, b[:, 0]), torch.addmm(bias[:, 0], b[:, :1].t(), a.t())[0])


def test_shapes_that_do_not_fit_are_torchs_errors() -> None:
    with set_batch_invariant_mode():
        for call in (lambda: torch.zeros(2, 3) @ torch.zeros(4, 5), lambda: torch.zeros(2, 3) @ torch.zeros(4)):
            with pytest.raises(RuntimeError, match=r"cannot be multiplied|size mismatch"):
                call()
        with pytest.raises(RuntimeError):
            torch.addmm(torch.ones(4, 2, 5), torch.ones(2, 3), torch.ones(3, 5))


def test_rows_that_are_too_long_are_refused() -> None:
    with set_batch_invariant_mode(), torch.no_grad():
        for op in (torch.softmax, torch.log_softmax):
            assert op(torch.zeros(1 << 19), 0).isfinite().all()
            with pytest.raises(ConfigError, match=r"softmax over 524289 numbers.*split it"):
                op(torch.zeros((1 << 19) + 1), 0)
        long = torch.zeros(1, 1).expand(1, (1 << 23) + 1)
        with pytest.raises(ConfigError, match=r"product over 8388609 terms.*split it"):
            long @ long.t()


def test_compiled_functions_run_eagerly_in_the_mode() -> None:
    """A compiler would pick its own kernels for `mm`, by shape and timing, and ask no override."""
    compiled_graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        compiled_graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    x, weight = randn(5, 90), randn(33, 90, seed=1)
    function = torch.compile(lambda x: F.linear(x, weight).softmax(-1), backend=backend, fullgraph=True)
    with torch.no_grad():
        with set_batch_invariant_mode():
            assert_bitwise_equal(function(x), F.linear(x, weight).softmax(-1))
            assert_bitwise_equal(function(x[:1]), function(x)[:1])
            assert not compiled_graphs
        function(x)
        assert len(compiled_graphs) == 1  # outside the mode the compiler is back
        with set_batch_invariant_mode():
            assert_bitwise_equal(function(x), F.linear(x, weight).softmax(-1))  # its graph is there, and not used
    assert len(compiled_graphs) == 1


def test_the_mode_cannot_be_entered_inside_a_compiled_function() -> None:
    def function(x: Tensor) -> Tensor:
        with set_batch_invariant_mode():
            return x @ x.t()

    torch._dynamo.reset()
    with pytest.raises(ConfigError, match="enter it outside the compiled function"):
        torch.compile(function, backend="eager")(randn(3, 4))
    assert not is_batch_invariant_mode()


def test_the_cpu_side_needs_no_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; torch.cuda.is_available = lambda: False\n"
        "from evalengine import set_batch_invariant_mode; set_batch_invariant_mode()\n"
        "print((torch.ones(1, 3) @ torch.ones(3, 1)).item(), flush=True)\n"
        "import evalengine.invariant.cuda"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3.0"]
    assert "triton" in done.stderr.splitlines()[-1]  # the CUDA side does need it: it was really out of reach


def test_the_table_lists_the_overrides() -> None:
    assert {"mm", "addmm", "bmm", "baddbmm", "_softmax", "_log_softmax", "mean.dim"} <= set(COVERED_OPS)
    assert all(op.note and op.devices for op in COVERED_OPS.values())
    on_cpu = {name for name, op in COVERED_OPS.items() if "cpu" in op.devices}
    refused = {"_scaled_dot_product_flash_attention_for_cpu"}
    # Covered without an override: torch's kernel already gives a row the same bits in any batch.
    torchs_own = {"cumsum", "cumsum_", "cumprod", "cumprod_", "index_add", "index_add_"}
    assert on_cpu - torchs_own == set(CPUOverrides().kernels()) - refused


def met(call: object) -> set[str]:
    """The ops that a call runs, the covered and the others."""
    audit = CoverageAudit()
    with contextlib.suppress(UncoveredOpError), audit:
        call()
    return set(audit.met)


CAUGHT = {
    "softplus on cpu (float32)": F.softplus,
    "pow.Tensor_Scalar on cpu (float32)": lambda x: x.abs().pow(1.7),
    "pow.Scalar on cpu (float32)": lambda x: torch.pow(2.0, x),
    "elu on cpu (float32)": F.elu,
    "add.Tensor on cpu (bfloat16)": lambda x: torch.add(x.bfloat16(), x.bfloat16(), alpha=0.3),
    "linalg_vector_norm on cpu (float32)": lambda x: x.norm(3, dim=-1),
    "convolution on cpu (float32)": lambda x: F.conv1d(x[:, None], randn(2, 1, 3)),
    "logsumexp on cpu (float64)": lambda x: x.double().logsumexp(-1),
    "sum.dim_IntList on cpu (float64)": lambda x: x.double().sum(-1),
    "prod.dim_int on cpu (float32)": lambda x: x.prod(-1),
    "mean.dim on cpu (float64)": lambda x: x.double().mean(-1),
    "mm.out on cpu (float32)": lambda x: torch.mm(x, x.t(), out=torch.empty(7, 7)),
    "_logcumsumexp on cpu (float32)": lambda x: torch.ops.aten._logcumsumexp(x, -1),
    "_scaled_dot_product_flash_attention_for_cpu on cpu (float32)": lambda x: stock_attention(x[None, None]),
    "mse_loss on cpu (float32)": lambda x: F.mse_loss(x, x),
    "index_put_ on cpu (float32)": lambda x: x.clone().index_put_((torch.tensor([0, 0]),), x[:2], accumulate=True),
    "linalg_matrix_exp on cpu (float32)": lambda x: torch.linalg.matrix_exp(x[:, :7]),
    "multi_margin_loss on cpu (float32)": lambda x: F.multi_margin_loss(x, torch.arange(7)),
}


def stock_attention(x: Tensor) -> Tensor:
    with set_batch_invariant_mode(False):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", CAUGHT)
def test_the_audit_names_what_is_not_covered(name: str, guard: type) -> None:
    with guard(), set_batch_invariant_mode(), pytest.raises(UncoveredOpError) as caught, CoverageAudit():
        CAUGHT[name](randn(7, 90))
    assert list(caught.value.ops) == [f"aten::{name}"] and f"1 x aten::{name}" in str(caught.value)


def test_the_audit_lists_all_at_once_and_leaves_other_errors_alone() -> None:
    x = randn(3, 4)
    with pytest.raises(UncoveredOpError) as caught, CoverageAudit():
        x.prod(0), x.prod(0), x.prod()
    assert caught.value.ops == {"aten::prod.dim_int on cpu (float32)": 2, "aten::prod on cpu (float32)": 1}
    with pytest.raises(KeyError), CoverageAudit():
        x.prod()
        raise KeyError


def test_the_audit_sees_foreign_kernels() -> None:
    @torch.library.custom_op("evalengine_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    with torch.no_grad(), pytest.raises(UncoveredOpError, match="evalengine_tests::double on cpu"), CoverageAudit():
        double(randn(3))


def test_the_audit_passes_what_has_no_order() -> None:
    ids, x = torch.arange(12).view(3, 4), randn(3, 4)
    with torch.no_grad(), set_batch_invariant_mode(), CoverageAudit() as audit:
        ids.sum(), ids.cumsum(-1), x.amax(-1), x.argmax(-1), torch.zeros(0, 3).sum()
        x.norm(torch.inf, dim=-1), x.pow(2), x.sqrt(), torch.add(x, x, alpha=0.3), x.bfloat16() + x.bfloat16()
        F.mse_loss(x, x, reduction="none"), x.clone().index_put_((torch.tensor([0, 1]),), x[:2])
    assert {"sum", "cumsum", "amax", "argmax", "mse_loss", "index_put_"} <= set(audit.met)


@pytest.mark.skipif(not hasattr(torch.Tag, "reduction"), reason="this torch does not tag its reductions")
def test_every_reduction_that_torch_tags_is_known() -> None:
    exact = {"all", "any", "amax", "amin", "aminmax", "argmax", "argmin", "count_nonzero", "max", "min"}
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if not name.startswith("__")]
    tagged = {
        packet.__name__
        for packet in packets
        if hasattr(packet, "overloads")
        for overload in packet.overloads()
        if torch.Tag.reduction in getattr(packet, overload).tags
    }
    assert tagged and tagged - exact <= REDUCTIONS
    assert {name.partition(".")[0] for name in COVERED_OPS} - {"rsqrt", "rsqrt_"} <= REDUCTIONS | UNEVEN_ON_CPU


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
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3"])
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


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3"])
def test_a_transformers_model_meets_no_uncovered_reduction(architecture: str, attention: str, guard: type) -> None:
    model = small_model(architecture, attention, torch.bfloat16)
    ids = torch.randint(0, 211, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with guard(), set_batch_invariant_mode():
        with CoverageAudit() as audit:
            model(ids).logits.log_softmax(-1)
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert {"mm", "bmm", "mean.dim", "silu"} <= set(audit.met)
        assert "_safe_softmax" in audit.met if attention == "sdpa" else "_softmax" in audit.met
        with set_batch_invariant_mode(False), pytest.raises(UncoveredOpError, match="flash"), CoverageAudit():
            model.set_attn_implementation("sdpa")
            model(ids)


def test_a_model_with_layer_norm_and_gelu_is_covered() -> None:
    import transformers

    config = transformers.GPT2Config(
        n_embd=24, n_layer=2, n_head=2, vocab_size=61, n_positions=32, bos_token_id=0, eos_token_id=1
    )
    torch.manual_seed(0)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.arange(35).view(5, 7)
    with torch.no_grad(), set_batch_invariant_mode(), CoverageAudit() as audit:
        together = model(ids).logits
        for row in range(5):
            assert_bitwise_equal(model(ids[row : row + 1]).logits, together[row : row + 1])
    assert {"native_layer_norm", "addmm"} <= set(audit.met)


def test_a_model_with_a_convolution_is_caught() -> None:
    convolution = torch.nn.Conv1d(3, 5, 2)
    caught = pytest.raises(UncoveredOpError, match="1 x aten::convolution on cpu")
    with torch.no_grad(), set_batch_invariant_mode(), caught, CoverageAudit():
        convolution(randn(2, 3, 9))
