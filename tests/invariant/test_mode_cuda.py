"""The mode itself on a GPU: rows of single ops, attention, whole transformers models, the audit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.invariant import CoverageAudit, UncoveredOpError, set_batch_invariant_mode
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.invariant.cuda_operands import DEVICE, ROUNDING, randn
from tests.references import reference

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, weight_like(x)),
    "linear_bias": lambda x: F.linear(x, weight_like(x), randn(1024, seed=2, dtype=x.dtype)),
    "linear_3d": lambda x: F.linear(x[:, None], weight_like(x))[:, 0],
    "linear_strided": lambda x: F.linear(torch.stack((x, x), -1)[..., 0][:, None], weight_like(x))[:, 0],
    "matmul": lambda x: x @ weight_like(x).t(),
    "einsum": lambda x: torch.einsum("mk,nk->mn", x, weight_like(x)),
    "bmm": lambda x: torch.bmm(x[:, None], weight_like(x).t().expand(len(x), -1, -1))[:, 0],
    "baddbmm": lambda x: torch.baddbmm(x[:, None, :1024], x[:, None], weight_like(x).t().expand(len(x), -1, -1))[:, 0],
    "mv": lambda x: torch.mv(x, weight_like(x)[0]),
    "addmv": lambda x: torch.addmv(x[:, 0], x, weight_like(x)[0]),
    "attention": lambda x: F.scaled_dot_product_attention(x.view(len(x), 24, 1, 128), *keys_like(x)).view(len(x), -1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "rms_norm": lambda x: F.rms_norm(x, (3072,), eps=1e-6),
}


def weight_like(x: Tensor) -> Tensor:
    """A weight of 1024 rows, for rows of 3072 numbers, in x's dtype."""
    return randn(1024, 3072, seed=1, dtype=x.dtype)


def keys_like(x: Tensor) -> list[Tensor]:
    """K and V of 24 heads, the same for every row of x."""
    return [randn(24, 53, 128, seed=seed, dtype=x.dtype).expand(len(x), -1, -1, -1) for seed in (4, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", OPS)
def test_rows_do_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    op, x = OPS[name], randn(300, 3072, dtype=dtype)
    stock = op(x)
    with set_batch_invariant_mode(), torch.no_grad():
        whole = op(x)
        for start, rows in [(0, 1), (3, 2), (10, 17), (5, 65), (40, 129), (299, 1)]:
            assert_bitwise_equal(op(x[start : start + rows]), whole[start : start + rows])
        order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        assert_bitwise_equal(op(x[order]), whole[order])
    assert whole.dtype == stock.dtype
    scale = float(stock.abs().max())
    torch.testing.assert_close(whole, stock, rtol=4 * ROUNDING[dtype], atol=4 * ROUNDING[dtype] * scale)


PRODUCTS = ("linear", "linear_bias", "linear_3d", "linear_strided", "matmul", "einsum", "bmm", "baddbmm")

# Measured on an H200 with torch 2.11: at these shapes attention, softmax, log_softmax and rms_norm do not depend on it.
STOCK_DEPENDS = [
    *((torch.bfloat16, name) for name in PRODUCTS),
    *((torch.float32, name) for name in (*PRODUCTS, "mv", "addmv", "mean")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "name"), STOCK_DEPENDS)
def test_stock_rows_do_depend_on_the_batch(dtype: torch.dtype, name: str) -> None:
    """The inverse: in stock torch the same comparison finds rows that differ, so it can fail."""
    x = randn(300, 3072, dtype=dtype)
    whole = OPS[name](x)
    assert any(count_differing(OPS[name](x[:rows]), whole[:rows]) for rows in (1, 2, 8, 16, 64, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_a_vector_is_the_one_with_a_column(dtype: torch.dtype) -> None:
    """torch takes `mv` or `bmm` for x @ v, by the strides of x and the need of gradients."""
    x, v = randn(64, 3072, dtype=dtype).view(16, 4, 3072), weight_like(randn(1, dtype=dtype))[0]
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    with set_batch_invariant_mode():
        column = (x @ v[:, None])[..., 0]
        assert_bitwise_equal(x @ v, column)
        assert_bitwise_equal(strided @ v, column)
        assert_bitwise_equal(strided[:1] @ v, column[:1])


@pytest.mark.gpu
def test_float32_products_are_ieee_under_allow_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = randn(64, 3072), weight_like(randn(1))
    truth = reference.linear(x, weight)
    with set_batch_invariant_mode():
        without_tf32 = F.linear(x, weight)
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        assert_bitwise_equal(F.linear(x, weight), without_tf32)
    error, with_tf32 = ((y.double() - truth).abs().max() for y in (without_tf32, F.linear(x, weight)))
    assert error * 20 < with_tf32  # The inverse: torch's own product really took TF32.


@pytest.mark.gpu
def test_installs_on_both_devices_nests_and_restores() -> None:
    on_gpu, on_cpu = (randn(64, 3072, device=d) for d in ("cuda", "cpu"))
    cases = [(x, x.t().contiguous()) for x in (on_gpu, on_cpu)]
    stock = [torch.mm(a, b) for a, b in cases]
    with set_batch_invariant_mode():
        covered = [torch.mm(a, b) for a, b in cases]
        assert all(
            count_differing(product, stock_product) for product, stock_product in zip(covered, stock, strict=True)
        )
        with pytest.raises(KeyError), set_batch_invariant_mode(False):
            assert all(not count_differing(torch.mm(*c), y) for c, y in zip(cases, stock, strict=True))
            raise KeyError
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                assert all(not count_differing(torch.mm(*c), y) for c, y in zip(cases, covered, strict=True))
    assert all(not count_differing(torch.mm(*c), y) for c, y in zip(cases, stock, strict=True))


@pytest.mark.gpu
def test_fused_attention_is_refused() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = randn(1, 2, 16, 64, dtype=torch.bfloat16)
    leaves = (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, q, q),
        lambda: torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, False),
        lambda: torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, False),
    )
    with set_batch_invariant_mode(), torch.no_grad():
        for leaf in leaves:
            with pytest.raises(ConfigError, match="math path"):
                leaf()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # attention is the mode's own kernel, whatever is asked for
            chosen = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            with pytest.raises(ConfigError, match="flash"):  # what that kernel does not cover
                F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        with CoverageAudit() as audit:
            assert_bitwise_equal(F.scaled_dot_product_attention(q, q, q, is_causal=True), chosen)
        assert audit.met["scaled_dot_product_attention"] == 1
    leaves[0]()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["causal", "mask", "gqa"])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_scaled_dot_product_attention(dtype: torch.dtype, form: str) -> None:
    q, k, v = (randn(5, 8, 61, 64, seed=s, dtype=dtype) for s in range(3))
    options: dict[str, object] = {"is_causal": form != "mask", "enable_gqa": form == "gqa"}
    if form == "mask":
        options["attn_mask"] = torch.ones(61, 61, device=DEVICE).tril().bool()
    if form == "gqa":
        k, v = k[:, :2], v[:, :2]
    stock = F.scaled_dot_product_attention(q, k, v, **options)
    with set_batch_invariant_mode(), torch.no_grad(), CoverageAudit():
        whole = F.scaled_dot_product_attention(q, k, v, **options)
        for rows in (slice(0, 1), slice(2, 4)):
            assert_bitwise_equal(F.scaled_dot_product_attention(q[rows], k[rows], v[rows], **options), whole[rows])
    torch.testing.assert_close(whole, stock, rtol=8 * ROUNDING[dtype], atol=8 * ROUNDING[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "op", [F.silu, torch.sigmoid, torch.rsqrt, F.gelu, torch.exp, torch.log, torch.cos, torch.sin, torch.tanh]
)
def test_element_wise_ops_do_not_depend_on_length_or_offset(op: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """These ops need no override on CUDA: one formula serves each element, in the vectorised body and in the tail,
    aligned or not."""
    x = randn(4099, dtype=dtype).abs() + 0.01
    whole = op(x)
    for start in range(17):
        for length in (1, 2, 3, 4, 7, 8, 31, 127, 513, 1025, 4099 - start):
            assert_bitwise_equal(op(x[start : start + length]), whole[start : start + length])
    assert_bitwise_equal(op(x[::3]), whole[::3].contiguous())  # This slice is strided.


@pytest.mark.gpu
def test_compiled_functions_run_eagerly_in_the_mode() -> None:
    x, weight = randn(64, 3072, dtype=torch.bfloat16), randn(1024, 3072, seed=1, dtype=torch.bfloat16)
    function = torch.compile(lambda x: F.silu(F.linear(x, weight)).softmax(-1), fullgraph=True)
    with torch.no_grad():
        function(x)  # It is compiled outside the mode.
        with set_batch_invariant_mode():
            whole = function(x)
            assert_bitwise_equal(whole, F.silu(F.linear(x, weight)).softmax(-1))
            assert_bitwise_equal(function(x[:1]), whole[:1])


def random_model(architecture: str, attention: str, dtype: torch.dtype, **sizes: int) -> torch.nn.Module:
    """A model of transformers with random weights, of small odd sizes unless `sizes` names others."""
    import transformers

    shape = {
        "hidden_size": 60, "intermediate_size": 116, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 20, "vocab_size": 211, "max_position_embeddings": 256,
    } | sizes  # fmt: skip
    config = getattr(transformers, f"{architecture}Config")(**shape, attn_implementation=attention)
    torch.manual_seed(0)
    return getattr(transformers, f"{architecture}ForCausalLM")(config).to(DEVICE, dtype).eval()


QWEN3_06B = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 16_411,
}  # fmt: skip  # Layers and tokens are fewer than the real model's; the widths decide which kernels run.

MODELS = [
    ("Llama", {}, torch.float32),
    ("Llama", {}, torch.bfloat16),
    ("Qwen2", {}, torch.bfloat16),
    ("Qwen3", {}, torch.float16),
    ("Qwen3", QWEN3_06B, torch.bfloat16),
]


def token_ids(rows: int, length: int, vocabulary: int) -> Tensor:
    """Random token ids, [rows, length]."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(length)).to(DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("architecture", "sizes", "dtype"), MODELS)
def test_a_transformers_model(architecture: str, sizes: dict[str, int], dtype: torch.dtype, attention: str) -> None:
    """In the mode a row's logits do not depend on the batch; at real widths, stock torch's do."""
    model = random_model(architecture, attention, dtype, **sizes)
    stock_differs = 0
    for length in (1, 7, 61):
        ids = token_ids(33, length, sizes.get("vocab_size", 211))
        order = torch.randperm(33, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        with torch.inference_mode():
            together = model(ids).logits
            stock_differs += sum(count_differing(model(ids[:n]).logits, together[:n]) for n in (1, 2, 8, 17))
            with set_batch_invariant_mode():
                together = model(ids).logits
                for n in (1, 2, 8, 17):
                    assert_bitwise_equal(model(ids[:n]).logits, together[:n])
                assert_bitwise_equal(model(ids[order]).logits, together[order])
        with torch.no_grad(), set_batch_invariant_mode(), CoverageAudit():
            assert_bitwise_equal(model(ids).logits, together)
    if sizes:
        assert stock_differs  # With the mode off, the same comparison finds other bits.


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_on_the_right_changes_nothing(attention: str) -> None:
    model = random_model("Qwen3", attention, torch.bfloat16, **QWEN3_06B)
    ids, padded = token_ids(3, 37, 16_411), torch.zeros(3, 150, dtype=torch.int64, device=DEVICE)
    padded[:, :37] = ids
    mask = (torch.arange(150, device=DEVICE) < 37).expand(3, -1).long()
    with torch.inference_mode():
        stock_differs = count_differing(model(padded, attention_mask=mask).logits[:, :37], model(ids).logits)
        with set_batch_invariant_mode():
            assert_bitwise_equal(model(padded, attention_mask=mask).logits[:, :37], model(ids).logits)
    assert stock_differs


@pytest.mark.gpu
def test_the_audit_names_what_is_not_covered() -> None:
    x = randn(7, 90, dtype=torch.bfloat16)
    for call, name in [
        (lambda: F.group_norm(x, 9), "native_group_norm on cuda"),
        (lambda: x.sum(-1), "sum.dim_IntList on cuda"),
        (lambda: x.double() @ x.double().t(), r"mm on cuda \(float64\)"),
        (
            lambda: torch.zeros(9, 90, device=DEVICE).index_add_(0, torch.arange(7, device=DEVICE), x.float()),
            "index_add_",
        ),
        (lambda: F.conv1d(x[:, None], randn(2, 1, 3, dtype=x.dtype)), "convolution on cuda"),
    ]:
        with torch.no_grad(), set_batch_invariant_mode(), pytest.raises(UncoveredOpError, match=name), CoverageAudit():
            call()


@pytest.mark.gpu
def test_operands_on_another_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = randn(5, 90, device="cuda:1")
    with set_batch_invariant_mode():
        assert_bitwise_equal((x @ x.t()).to("cuda:0"), x.to("cuda:0") @ x.t().to("cuda:0"))
