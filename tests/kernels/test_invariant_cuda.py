"""The CUDA overrides: their functions under Triton's interpreter against float64, and the mode itself on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.invariant import COVERED_OPS, CoverageAudit, UncoveredOpError, set_batch_invariant_mode
from evalengine.invariant.cuda import CUDAOverrides
from evalengine.kernels import reference
from tests.bitwise import assert_bitwise_equal, count_differing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the functions, called directly, also run on the CPU
KERNELS = CUDAOverrides().kernels()
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of one result, relative


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_rounds(actual: Tensor, truth: Tensor, *, steps: int = 1) -> None:
    """Within `steps` roundings of the dtype; small values within that of the largest, for sums that cancel."""
    tolerance = ROUNDING[actual.dtype] * steps
    torch.testing.assert_close(actual.double(), truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()) / 4)


def test_the_table_lists_the_overrides() -> None:
    on_cuda = {name for name, op in COVERED_OPS.items() if "cuda" in op.devices}
    fused = {name for name in KERNELS if name.endswith(("_attention", "_attention_forward"))}  # refused
    assert set(KERNELS) - fused <= on_cuda and fused.isdisjoint(COVERED_OPS)
    newer_torch = {"_fused_rms_norm", "mm.dtype", "addmm.dtype", "bmm.dtype", "baddbmm.dtype"}
    assert on_cuda - set(KERNELS) <= newer_torch


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_against_float64(dtype: torch.dtype) -> None:
    a, b = randn(5, 37, dtype=dtype), randn(37, 19, seed=1, dtype=dtype)
    bias, full = randn(19, seed=2, dtype=dtype), randn(5, 19, seed=3, dtype=dtype)
    product = reference.linear(a, b.t())
    assert_rounds(KERNELS["mm"](a, b), product)
    assert_rounds(KERNELS["bmm"](a[None], b[None])[0], product)
    assert_rounds(KERNELS["mv"](b.t(), a[0]), product[0])
    assert_rounds(KERNELS["addmm"](bias, a, b), product + bias.double(), steps=2)
    assert_rounds(KERNELS["addmm"](full, a, b, beta=0.5, alpha=2), 2 * product + full.double() / 2, steps=3)
    assert_rounds(KERNELS["baddbmm"](full[None], a[None], b[None])[0], product + full.double(), steps=2)
    assert_rounds(KERNELS["addmv"](bias, b.t(), a[0]), product[0] + bias.double(), steps=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_agree_with_each_other(dtype: torch.dtype) -> None:
    """Which of these F.linear and matmul take depends on strides and shapes, and so on the batch."""
    a, b = randn(5, 37, dtype=dtype), randn(37, 19, seed=1, dtype=dtype)
    bias = randn(19, seed=2, dtype=dtype)
    product = KERNELS["mm"](a, b)
    assert_bitwise_equal(KERNELS["bmm"](a[None], b[None])[0], product)
    assert_bitwise_equal(KERNELS["mv"](b.t(), a[0]), product[0])
    assert_bitwise_equal(KERNELS["addmm"](bias, a, b), product + bias)  # the fused epilogue against two ops
    assert_bitwise_equal(KERNELS["addmm"](bias[None], a, b), product + bias)
    assert_bitwise_equal(KERNELS["addmm_"](product.clone(), a, b, beta=0), product)
    if dtype == torch.float32:
        return
    assert count_differing(product + bias, (KERNELS["mm.dtype"](a, b, torch.float32) + bias).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_products_are_products(dtype: torch.dtype) -> None:
    """One covered mm a group, whichever operand the groups cut; the second group is empty."""
    grouped, mm = KERNELS["_grouped_mm"], KERNELS["mm"]
    ends, cuts = torch.tensor([3, 3, 9], dtype=torch.int32, device=DEVICE), [slice(0, 3), slice(3, 3), slice(3, 9)]
    a, b = randn(9, 37, dtype=dtype), randn(3, 37, 19, seed=1, dtype=dtype)
    out = grouped(a, b, ends)
    assert_bitwise_equal(out, torch.cat([mm(a[0:3], b[0]), mm(a[3:9], b[2])]))
    assert_rounds(out, torch.cat([reference.linear(a[cut], b[g].t()) for g, cut in enumerate(cuts)]))
    left, right = randn(3, 5, 37, dtype=dtype), randn(37, 9, seed=1, dtype=dtype)
    across = grouped(left, right, ends)
    assert_bitwise_equal(across, torch.cat((mm(left[0], right[:, 0:3]), mm(left[2], right[:, 3:9])), 1))
    terms = grouped(a.t(), randn(9, 19, seed=2, dtype=dtype), ends)
    assert terms.shape == (3, 37, 19) and not terms[1].any()
    assert_bitwise_equal(terms[2], mm(a.t()[:, 3:9], randn(9, 19, seed=2, dtype=dtype)[3:9]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wider_results(dtype: torch.dtype) -> None:
    a, b, bias = randn(5, 37, dtype=dtype), randn(37, 19, seed=1, dtype=dtype), randn(5, 19, seed=2, dtype=dtype)
    product = KERNELS["mm.dtype"](a, b, torch.float32)
    assert_rounds(product, reference.linear(a, b.t()))
    assert_bitwise_equal(product.to(dtype), KERNELS["mm"](a, b))
    assert_bitwise_equal(KERNELS["bmm.dtype"](a[None], b[None], torch.float32)[0], product)
    assert_bitwise_equal(KERNELS["addmm.dtype"](bias, a, b, torch.float32), product + bias.float())
    assert_bitwise_equal(
        KERNELS["baddbmm.dtype"](bias[None], a[None], b[None], torch.float32)[0], product + bias.float()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_reductions_against_float64(dtype: torch.dtype) -> None:
    x = randn(3, 5, 37, dtype=dtype)
    for dim in (-1, 1):
        assert_rounds(KERNELS["_softmax"](x, dim, False), reference.softmax(x, dim))
        assert_rounds(KERNELS["_log_softmax"](x, dim, False), reference.log_softmax(x, dim))
        assert_rounds(KERNELS["mean.dim"](x, [dim], True), reference.mean(x, dim, True))
    assert KERNELS["_softmax"](x, 0, dtype != torch.float32).dtype == torch.float32
    assert_rounds(KERNELS["mean.dim"](x, [0, 2]), reference.mean(x, (0, 2)))
    assert_rounds(KERNELS["mean.dim"](x, None, dtype=torch.float32), reference.mean(x, (0, 1, 2)))
    assert_rounds(KERNELS["mean"](x), reference.mean(x, (0, 1, 2)))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_rms_norm(dtype: torch.dtype, weighted: bool) -> None:
    if "_fused_rms_norm" not in KERNELS:
        pytest.skip("F.rms_norm has no kernel of its own in this torch")
    x, weight = randn(5, 37, dtype=dtype), randn(37, seed=1, dtype=dtype) if weighted else None
    normed, scale = KERNELS["_fused_rms_norm"](x, (37,), weight, 1e-6)
    ones = torch.ones(37, device=DEVICE)
    assert_rounds(normed, reference.rms_norm(x, ones if weight is None else weight, 1e-6))
    assert scale.shape == (5, 1) and normed.dtype == dtype
    default, _ = KERNELS["_fused_rms_norm"](x, (37,), weight, None)
    torch.testing.assert_close(default, F.rms_norm(x, (37,), weight), rtol=4 * ROUNDING[dtype], atol=1e-6)


def test_zeros_after_k_and_masked_columns_change_nothing() -> None:
    """What right padding does to attention: on CUDA it is harmless, unlike under the CPU's overrides."""
    a, b = randn(2, 5, 37), randn(2, 37, 19, seed=1)
    wide_a, wide_b = F.pad(a, (0, 91)), F.pad(b, (0, 0, 0, 91), value=3.0)
    assert_bitwise_equal(KERNELS["bmm"](wide_a, wide_b), KERNELS["bmm"](a, b))
    for masked in (-torch.inf, torch.finfo(torch.float32).min):
        padded = KERNELS["_softmax"](F.pad(a, (0, 91), value=masked), -1, False)
        assert_bitwise_equal(padded[..., :37].contiguous(), KERNELS["_softmax"](a, -1, False))
        assert not padded[..., 37:].any()
    assert count_differing(KERNELS["bmm"](a.flip(-1), b.flip(1)), KERNELS["bmm"](a, b))  # the order does matter


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_go_to_torch(dtype: torch.dtype) -> None:
    a, b = randn(6, 6, seed=1).to(dtype), randn(6, 6, seed=2).to(dtype)
    assert_bitwise_equal(KERNELS["mm"](a, b), torch.mm(a, b))
    assert_bitwise_equal(KERNELS["addmm"](a[0], a, b), torch.addmm(a[0], a, b))
    assert_bitwise_equal(KERNELS["mean.dim"](a, [0]), a.mean(0))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        KERNELS["mm"](randn(2, 3), randn(4, 5))
    assert KERNELS["mm"](randn(0, 3), randn(3, 4)).shape == (0, 4) and not KERNELS["mm"](randn(2, 0), randn(0, 4)).any()


# --- on the GPU: the mode itself ---------------------------------------------------------------------------------


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
# measured on an H200 with torch 2.11: attention, softmax, log_softmax and rms_norm do not at these shapes
STOCK_DEPENDS = [
    *((torch.bfloat16, name) for name in PRODUCTS),
    *((torch.float32, name) for name in (*PRODUCTS, "mv", "addmv", "mean")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "name"), STOCK_DEPENDS)
def test_stock_rows_do_depend_on_the_batch(dtype: torch.dtype, name: str) -> None:
    x = randn(300, 3072, dtype=dtype)
    whole = OPS[name](x)
    assert any(count_differing(OPS[name](x[:rows]), whole[:rows]) for rows in (1, 2, 8, 16, 64, 128))


@pytest.mark.gpu
def test_float32_products_are_ieee_under_allow_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = randn(64, 3072), weight_like(randn(1))
    truth = reference.linear(x, weight)
    with set_batch_invariant_mode():
        before = F.linear(x, weight)
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        assert_bitwise_equal(F.linear(x, weight), before)
    error, with_tf32 = ((y.double() - truth).abs().max() for y in (before, F.linear(x, weight)))
    assert error * 20 < with_tf32  # the inverse: torch's own product really took TF32


@pytest.mark.gpu
def test_installs_on_both_devices_nests_and_restores() -> None:
    on_gpu, on_cpu = (randn(64, 3072, device=d) for d in ("cuda", "cpu"))
    cases = [(x, x.t().contiguous()) for x in (on_gpu, on_cpu)]
    stock = [torch.mm(a, b) for a, b in cases]
    with set_batch_invariant_mode():
        ours = [torch.mm(a, b) for a, b in cases]
        assert all(count_differing(mine, theirs) for mine, theirs in zip(ours, stock, strict=True))
        with pytest.raises(KeyError), set_batch_invariant_mode(False):
            assert all(not count_differing(torch.mm(*c), y) for c, y in zip(cases, stock, strict=True))
            raise KeyError
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                assert all(not count_differing(torch.mm(*c), y) for c, y in zip(cases, ours, strict=True))
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
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(ConfigError, match="flash"):
            F.scaled_dot_product_attention(q, q, q)
        with CoverageAudit():
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
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
    """One formula an element on CUDA, in the vectorised body as in the tail, aligned or not: these need no override."""
    x = randn(4099, dtype=dtype).abs() + 0.01
    whole = op(x)
    for start in range(17):
        for length in (1, 2, 3, 4, 7, 8, 31, 127, 513, 1025, 4099 - start):
            assert_bitwise_equal(op(x[start : start + length]), whole[start : start + length])
    assert_bitwise_equal(op(x[::3]), whole[::3].contiguous())  # strided


@pytest.mark.gpu
def test_compiled_functions_run_eagerly_in_the_mode() -> None:
    x, weight = randn(64, 3072, dtype=torch.bfloat16), randn(1024, 3072, seed=1, dtype=torch.bfloat16)
    function = torch.compile(lambda x: F.silu(F.linear(x, weight)).softmax(-1), fullgraph=True)
    with torch.no_grad():
        function(x)  # compiled outside the mode
        with set_batch_invariant_mode():
            whole = function(x)
            assert_bitwise_equal(whole, F.silu(F.linear(x, weight)).softmax(-1))
            assert_bitwise_equal(function(x[:1]), whole[:1])


def random_model(architecture: str, attention: str, dtype: torch.dtype, **sizes: int) -> torch.nn.Module:
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
}  # fmt: skip  # fewer layers and tokens than the real one: the widths decide which kernels run
MODELS = [
    ("Llama", {}, torch.float32),
    ("Llama", {}, torch.bfloat16),
    ("Qwen2", {}, torch.bfloat16),
    ("Qwen3", {}, torch.float16),
    ("Qwen3", QWEN3_06B, torch.bfloat16),
]


def token_ids(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(length)).to(DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("architecture", "sizes", "dtype"), MODELS)
def test_a_transformers_model(architecture: str, sizes: dict[str, int], dtype: torch.dtype, attention: str) -> None:
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
        assert stock_differs  # with the mode off the same comparison finds different bits


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
        (lambda: F.layer_norm(x, (90,)), "native_layer_norm on cuda"),
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
