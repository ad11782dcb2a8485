"""Attention through flash-attn: how the package is called (against its double), and what it gives (on a GPU)."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.layers import attention_backends, flash_attention
from evalengine.layers.attention import PagedAttention
from evalengine.layers.fast import FastOps
from evalengine.layers.metadata import AttentionMetadata
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference
from tests.unit.flash_attn_double import FlashAttnDouble

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
# A sequence is (new tokens, all its tokens); decodes come first.
DECODES = [(1, 1), (1, 255), (1, 256), (1, 257)]
PREFILLS = [(1, 1), (256, 256), (257, 257)]  # a first sequence of one row is a decode
CHUNKS = [(17, 300), (2, 2), (3, 515)]  # chunks start inside a page, at a page's start, in the third page
PREFIXED = [(44, 300), (5, 261)]  # a cached prefix of 256 tokens stands before the new ones
BATCHES = {
    "decode": DECODES,
    "prefill": PREFILLS,
    "prefill alone": [(3, 3)],
    "chunked": CHUNKS,
    "prefix-cached": PREFIXED,
    "mixed": [*DECODES, *CHUNKS, *PREFIXED, (1, 77)],
    "a sequence without rows": [(1, 9), (0, 5), (1, 8)],
}


def batch(
    lens: list[tuple[int, int]],
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 24,
    block_size: int = 256,
    device: torch.device = CPU,
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    """q, the two pools (layers of one tensor, NaN where no token lies) and the metadata, pages in shuffled order."""
    generator = torch.Generator().manual_seed(7)
    counts = [-(-length // block_size) for _, length in lens]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    pages = [[order.pop() for _ in range(count)] for count in counts]
    pools = torch.full((2, sum(counts) + 2, block_size, heads[1], head_dim), float("nan"))
    for table, (_, length) in zip(pages, lens, strict=True):
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(length)])
        pools.flatten(1, 2)[:, slots] = torch.randn(2, length, heads[1], head_dim, generator=generator)
    q = torch.randn(sum(n for n, _ in lens), heads[0], head_dim, generator=generator)
    k_cache, v_cache = pools.to(device, dtype)
    metadata = AttentionMetadata.build([n for n, _ in lens], [n for _, n in lens], pages, block_size, device)
    return q.to(device, dtype), k_cache, v_cache, metadata


def truth(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """The attention in float64."""
    tensors = (x.cpu() for x in (q, k_cache, v_cache, metadata.block_table))
    return reference.paged_attention(*tensors, metadata.query_lens, metadata.kv_lens, AttentionVariant(scale))


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> FlashAttnDouble:
    double = FlashAttnDouble()
    monkeypatch.setattr(flash_attention, "package", lambda: double)
    return double


# -- the calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [256, 512])
@pytest.mark.parametrize("name", BATCHES)
def test_calls_keep_to_the_package_and_give_the_rows_in_order(
    name: str, block_size: int, double: FlashAttnDouble
) -> None:
    q, k_cache, v_cache, metadata = batch(BATCHES[name], block_size=block_size)
    output = flash_attention.paged_attention(q, (k_cache, v_cache), metadata, AttentionVariant(0.17))
    assert_bitwise_equal(output, truth(q, k_cache, v_cache, metadata, 0.17).to(q.dtype))
    decodes = metadata.num_decodes
    expected = [("flash_attn_with_kvcache", (decodes, 1, *q.shape[1:]))] if decodes else []
    if decodes < len(metadata.query_lens):
        expected.append(("flash_attn_varlen_func", (len(q) - decodes, *q.shape[1:])))
    assert [call[:2] for call in double.calls] == expected


@pytest.mark.parametrize(
    "variant", [{"window": 100}, {"window": 1}, {"softcap": 30.0}, {"window": 300, "softcap": 2.0}]
)
def test_windows_and_softcaps_reach_the_package(variant: dict, double: FlashAttnDouble) -> None:
    q, k_cache, v_cache, metadata = batch(BATCHES["mixed"])
    form = AttentionVariant(0.17, **variant)
    tensors = q, k_cache, v_cache, metadata.block_table
    expected = reference.paged_attention(*tensors, metadata.query_lens, metadata.kv_lens, form).to(q.dtype)
    assert_bitwise_equal(flash_attention.paged_attention(q, (k_cache, v_cache), metadata, form), expected)
    assert count_differing(expected, truth(q, k_cache, v_cache, metadata, 0.17).to(q.dtype)) > 0


def test_sinks_are_refused_by_the_package_and_go_to_another_backend() -> None:
    sinks = AttentionVariant(0.17, window=128, sinks=True)
    (problem,) = attention_backends.variant_problems("flash_attn", sinks)
    assert "sinks" in problem and "take triton" in problem
    for backend, variant in (("flash_attn", AttentionVariant(0.17, 128, 50.0)), ("triton", sinks), ("sdpa", sinks)):
        assert attention_backends.variant_problems(backend, variant) == []
    with pytest.raises(ConfigError, match=r"engine.attention_backend=flash_attn: flash-attn knows no attention sinks"):
        PagedAttention(FastOps(torch.bfloat16, CPU, "flash_attn"), sinks, 4)
    PagedAttention(FastOps(torch.bfloat16, CPU), sinks, 4)


@pytest.mark.gpu
def test_a_model_with_sinks_is_not_given_to_the_package(installed: None) -> None:
    plain, sinks = (AttentionVariant(0.17, sinks=which) for which in (False, True))
    served = [
        attention_backends.possible_backends(CUDA, torch.bfloat16, 128, None, variants)
        for variants in ([plain], [plain, sinks])
    ]
    assert "flash_attn" in served[0] and "flash_attn" not in served[1] and "triton" in served[1]


# What a variant needs -> the name that the package's error has for it.
FEATURES = {"window": "local attention", "softcap": "softcap"}


@contextmanager
def skip_if_not_built(variant: dict[str, Any]) -> Iterator[None]:
    """Skip the test if the package answers that it was built without what the variant needs. Every other error is
    raised."""
    try:
        yield
    except RuntimeError as error:
        answer = re.search(r"This flash attention build does not support ([^.]+)\.", str(error))
        if answer is None or answer[1] not in [FEATURES[name] for name in variant]:
            raise
        pytest.skip(f"needs a flash-attn build with {answer[1]}")


@pytest.mark.parametrize(
    ("variant", "error", "skipped"),
    [
        ({"window": 100}, "This flash attention build does not support local attention.", True),
        ({"window": 300, "softcap": 2.0}, "This flash attention build does not support softcap.", True),
        ({"softcap": 2.0}, "This flash attention build does not support local attention.", False),
        ({"window": 100}, "This flash attention build does not support alibi.", False),
        ({"window": 100}, "CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_only_a_build_without_the_feature_is_skipped(variant: dict, error: str, skipped: bool) -> None:
    expected: Any = pytest.skip.Exception if skipped else RuntimeError
    with pytest.raises(expected), skip_if_not_built(variant):
        raise RuntimeError(error)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [{"window": 100}, {"softcap": 30.0}, {"window": 300, "softcap": 2.0}])
def test_the_package_computes_windows_and_softcaps(variant: dict, installed: None) -> None:
    """Within the rounding of bfloat16's weights and output; another window is farther away."""
    q, k_cache, v_cache, metadata = batch(BATCHES["mixed"], heads=(8, 2), head_dim=64, device=CUDA)
    form = AttentionVariant(64**-0.5, **variant)
    tensors = [x.cpu() for x in (q, k_cache, v_cache, v_cache.abs(), metadata.block_table)]

    def float64(v: Tensor, form: AttentionVariant) -> Tensor:
        lens = metadata.query_lens, metadata.kv_lens
        return reference.paged_attention(*tensors[:2], v, tensors[4], *lens, form)

    with skip_if_not_built(variant):
        output = flash_attention.paged_attention(q, (k_cache, v_cache), metadata, form).cpu().double()
    bound = 1.1 * 2**-7 * float64(tensors[3], form) + 2**-9
    assert ((output - float64(tensors[2], form)).abs() <= bound).all()
    wrong = float64(tensors[2], AttentionVariant(64**-0.5, 50, variant.get("softcap")))
    assert ((output - wrong).abs() > bound).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_q_may_be_a_view_of_qkv(dtype: torch.dtype, double: FlashAttnDouble) -> None:
    q, k_cache, v_cache, metadata = batch(BATCHES["mixed"], dtype)
    view = torch.cat((q, q), dim=1)[:, : q.shape[1]]
    assert not view.is_contiguous()
    outputs = [
        flash_attention.paged_attention(x, (k_cache, v_cache), metadata, AttentionVariant(0.17)) for x in (q, view)
    ]
    assert_bitwise_equal(outputs[1], outputs[0])


def test_running_lengths_are_made_once_a_step(double: FlashAttnDouble) -> None:
    q, k_cache, v_cache, metadata = batch(CHUNKS)
    for _layer in range(3):
        flash_attention.paged_attention(q, (k_cache, v_cache), metadata, AttentionVariant(0.17))
    assert len(double.calls) == 3 and all(call[2] is double.calls[0][2] for call in double.calls)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 64}, "divisible by 256"),
        ({"dtype": torch.float32}, "only support fp16 and bf16"),
        ({"head_dim": 20}, "multiple of 8"),
        ({"head_dim": 264}, "at most 256"),
    ],
)
@pytest.mark.parametrize("name", ["decode", "chunked"])
def test_the_double_refuses_what_the_package_refuses(
    name: str, changes: dict, words: str, double: FlashAttnDouble
) -> None:
    q, k_cache, v_cache, metadata = batch(BATCHES[name], **changes)
    with pytest.raises(RuntimeError, match=words):
        flash_attention.paged_attention(q, (k_cache, v_cache), metadata, AttentionVariant(0.17))
    # The same problem is found at start.
    dtype, head_dim, block_size = q.dtype, q.shape[-1], k_cache.shape[1]
    assert len(flash_attention.shape_problems(dtype, head_dim, block_size)) == 1
    assert attention_backends.attention_function("flash_attn") is flash_attention.paged_attention


# -- the package -----------------------------------------------------------------------------------------------------


def test_an_absent_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")

    def broken() -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    old = types.SimpleNamespace(flash_attn_varlen_func=lambda q, k, v: q, flash_attn_with_kvcache=lambda q: q)
    for package, words in (
        (absent, "the flash-attn package is not installed: pip install 'evalengine[flash]'"),
        (broken, "cannot be imported (undefined symbol: _ZN3c10): pip install 'evalengine[flash]'"),
        (lambda: types.SimpleNamespace(), "cannot be imported"),
        (lambda: old, "too old to read a paged KV cache: pip install 'evalengine[flash]'"),
    ):
        monkeypatch.setattr(flash_attention, "package", package)
        (problem,) = flash_attention.installation_problems()
        assert words in problem
    monkeypatch.setattr(flash_attention, "package", FlashAttnDouble)
    assert flash_attention.installation_problems() == []


@pytest.fixture
def installed() -> None:
    if flash_attention.installation_problems():
        pytest.skip("needs flash-attn")


@pytest.mark.gpu
def test_the_double_has_the_packages_parameters(installed: None) -> None:
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        real, ours = (
            [(p.name, p.default) for p in inspect.signature(getattr(owner, name)).parameters.values()]
            for owner in (flash_attention.package(), FlashAttnDouble())
        )
        assert ours == real


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("name", BATCHES)
def test_the_package_is_within_rounding_of_float64(
    name: str, heads: tuple[int, int], head_dim: int, installed: None
) -> None:
    """bfloat16: the weights and the output are rounded (2^-8 each, relative), the scores are float32's."""
    q, k_cache, v_cache, metadata = batch(BATCHES[name], heads=heads, head_dim=head_dim, device=CUDA)
    scale = head_dim**-0.5
    error = flash_attention.paged_attention(
        q, (k_cache, v_cache), metadata, AttentionVariant(scale)
    ).cpu().double() - truth(q, k_cache, v_cache, metadata, scale)
    bound = 1.1 * 2**-7 * truth(q, k_cache, v_cache.abs(), metadata, scale)  # sum of weight * |v|
    assert (error.abs() <= bound).all(), (error.abs() / bound).max()
    # The same bound finds a wrong scale: it is not too wide to see a fault.
    wrong = truth(q, k_cache, v_cache, metadata, scale * 1.1) - truth(q, k_cache, v_cache, metadata, scale)
    assert len(q) < 4 or (wrong.abs() > bound).any()
