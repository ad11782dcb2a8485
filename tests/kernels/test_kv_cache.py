"""Writing KV stores exactly the values, in exactly the slots named, whatever the strides of sources and pools."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evalengine.kernels import kv_cache, rope
from evalengine.layers import attention as plain
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def new_kv(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns k and v [tokens, heads, head_dim] as views of one merged tensor, as a qkv projection leaves them."""
    generator = torch.Generator().manual_seed(tokens + heads + head_dim)
    merged = torch.randn(tokens, 3 * heads * head_dim, generator=generator).to(DEVICE, dtype)
    k, v = merged[:, heads * head_dim :].chunk(2, -1)
    return k.unflatten(-1, (heads, head_dim)), v.unflatten(-1, (heads, head_dim))


def slots_for(tokens: int, pages: int, page: int) -> Tensor:
    """Returns distinct slots in random order, every third of them replaced by -1 (not stored)."""
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(tokens))[:tokens]
    slots[1::3] = -1
    return slots.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens_heads_dim", [(0, 2, 64), (1, 1, 48), (17, 3, 80), (7, 2, 96), (3, 17, 128), (2, 1, 256)]
)
@pytest.mark.parametrize("page", [1, 16, 24, 256])
def test_bytes_of_the_reference(tokens_heads_dim: tuple[int, int, int], page: int, dtype: torch.dtype) -> None:
    """The kernel and the plain layers' op store the reference's bytes, and leave the pools' NaN everywhere else."""
    tokens, heads, head_dim = tokens_heads_dim
    k, v = new_kv(tokens, heads, head_dim, dtype)
    pages = 3 + tokens // page
    slots = slots_for(tokens, pages, page)
    shape = (pages, page, heads, head_dim)
    stored, by_torch = (torch.full((2, *shape), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    expected = torch.stack(reference.store_kv(k, v, *stored, slots))
    kv_cache.store_kv(k, v, *stored, slots)
    assert_bitwise_equal(stored, expected)
    plain.store_kv(k, v, *by_torch, slots)
    assert_bitwise_equal(by_torch, expected)
    assert int(stored.isnan().sum()) == stored.numel() - 2 * int((slots >= 0).sum()) * heads * head_dim


def test_strided_pools_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools and sources may be strided along any axis, and tiles may have any size: the bytes are the same."""
    k, v = new_kv(11, 3, 48, torch.float16)
    slots = slots_for(11, 3, 16)

    def pools(*shape: int, order: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float16, device=DEVICE).permute(order)

    expected = torch.stack(reference.store_kv(k, v, *pools(2, 3, 16, 3, 48, order=(0, 1, 2, 3, 4)), slots))
    layouts = [
        pools(3, 2, 16, 3, 48, order=(1, 0, 2, 3, 4)),  # page, K/V, position, head
        pools(3, 3, 2, 16, 48, order=(2, 0, 3, 1, 4)),  # page, head, K/V, position
        pools(2, 16, 3, 3, 50, order=(0, 2, 1, 3, 4))[..., :48],  # K/V, position, page, head, padding
    ]
    for warps, stored in zip((4, 1, 8), layouts, strict=True):
        monkeypatch.setattr(rope, "TILE_WARPS", warps)
        kv_cache.store_kv(k, v, *stored, slots)
        assert_bitwise_equal(stored, expected)
    by_head, by_element = k.transpose(0, 1).contiguous().transpose(0, 1), v.mT.contiguous().mT
    again = torch.zeros_like(expected)
    kv_cache.store_kv(by_head, by_element, *again, slots)
    assert_bitwise_equal(again, expected)


def test_rounds_to_the_pools_dtype() -> None:
    """Values of another dtype are rounded to the pool's as the reference rounds them."""
    k, v = new_kv(3, 2, 64, torch.float32)
    stored = torch.zeros(2, 1, 16, 2, 64, dtype=torch.float16, device=DEVICE)
    slots = torch.tensor([5, 0, 15], device=DEVICE)
    expected = torch.stack(reference.store_kv(k, v, *stored, slots))
    kv_cache.store_kv(k, v, *stored, slots)
    assert_bitwise_equal(stored, expected)


def test_another_slot_gives_another_pool() -> None:
    k, v = new_kv(3, 2, 64, torch.float16)
    first, second = (torch.zeros(2, 1, 16, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    kv_cache.store_kv(k, v, *first, torch.tensor([0, 1, 2], device=DEVICE))
    kv_cache.store_kv(k, v, *second, torch.tensor([0, 2, 1], device=DEVICE))
    assert count_differing(first, second) > 400


@pytest.mark.gpu
def test_pools_beyond_two_to_the_31_elements() -> None:
    pages, page, heads, head_dim = 2**15 + 1, 64, 8, 128
    if torch.cuda.mem_get_info()[0] < 5 * pages * page * heads * head_dim:
        pytest.skip("needs 11 GB of GPU memory")
    k, v = new_kv(3, heads, head_dim, torch.bfloat16)
    stored = torch.zeros(2, pages, page, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.tensor([pages * page - 1, (pages - 1) * page, 7], device=DEVICE)
    kv_cache.store_kv(k, v, *stored, slots)
    flat = stored.view(2, -1, heads, head_dim)
    assert_bitwise_equal(flat[:, slots], torch.stack((k, v)))
    flat[:, slots] = 0
    assert not flat.any()
