"""RoPE has the bytes of transformers' eager formula, whatever the strides, tiles and neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from evalengine.kernels import rope
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.references import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(0, 4, 64), (1, 1, 48), (7, 3, 80), (3, 9, 64), (2, 17, 96), (5, 5, 128), (2, 3, 256)]


def inputs(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x [tokens, heads, head_dim], and cos and sin [tokens, head_dim / 2] of random angles."""
    generator = torch.Generator().manual_seed(tokens * heads + head_dim)
    x = torch.randn(tokens, heads, head_dim, generator=generator).to(DEVICE, dtype)
    angle = torch.rand(tokens, head_dim // 2, generator=generator) * 100
    return x, angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)


def eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Calls transformers' own function, which takes [batch, heads, tokens, D] and tables of the whole width."""
    tables = (torch.cat((table, table), -1)[None] for table in (cos, sin))
    return apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *tables)[0][0].transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_transformers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The rotation has the bytes of transformers' eager function."""
    x, cos, sin = inputs(*shape, dtype)
    assert_bitwise_equal(rope.rope(x, cos, sin), eager(x, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_of_transformers_with_tables_in_float32(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """With float32 tables the rotation has the bytes of OLMo 2's eager function, which rounds at its end; a row has
    the same bytes alone."""
    x, cos, sin = inputs(*shape, torch.float32)
    x = x.to(dtype)
    rotated = rope.rope(x, cos, sin)
    assert rotated.dtype == dtype
    assert_bitwise_equal(rotated, eager(x, cos, sin).to(dtype))
    assert_bitwise_equal(rope.rope(x[1:2, -1:], cos[1:2], sin[1:2]), rotated[1:2, -1:])
    if dtype != torch.float32 and shape[0] > 1:
        assert count_differing(rope.rope(x, cos.to(dtype), sin.to(dtype)), rotated) > 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype: torch.dtype) -> None:
    """The result is within its roundings of float64."""
    x, cos, sin = inputs(5, 3, 80, dtype)
    error = (rope.rope(x, cos, sin).double() - reference.apply_rope(x, cos, sin)).abs()
    size = x.double().abs().unflatten(-1, (2, -1)).amax(-2).repeat(1, 1, 2)  # bounds |x1 cos| and |x2 sin|
    assert (error <= 2 * torch.finfo(dtype).eps * size).all()  # two rounded products and a rounded sum


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_points_matter(dtype: torch.dtype) -> None:
    """Rounding only the sum gives other bytes, so that equality with eager code can fail."""
    x, cos, sin = inputs(5, 3, 80, dtype)
    assert count_differing(reference.apply_rope(x, cos, sin).to(dtype), rope.rope(x, cos, sin)) > 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype) -> None:
    """Slices of a merged qkv tensor, transposed operands and tables that are views give the same bytes."""
    x, cos, sin = inputs(5, 12, 48, dtype)
    q, expected = x[:, 2:9], eager(x, cos, sin)
    assert_bitwise_equal(rope.rope(q, cos, sin), expected[:, 2:9])
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert_bitwise_equal(rope.rope(by_head, cos, sin), expected[:, 2:9])
    by_element = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert_bitwise_equal(rope.rope(by_element, cos.t().contiguous().t(), sin), expected[:, 2:9])


def test_a_row_depends_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the same bytes alone, beside NaN, and with every tile; another angle gives other bytes."""
    x, cos, sin = inputs(7, 9, 64, torch.float16)
    together = rope.rope(x, cos, sin)
    assert_bitwise_equal(rope.rope(x[3:4, 5:6], cos[3:4], sin[3:4]), together[3:4, 5:6])
    assert count_differing(rope.rope(x[3:4], cos[4:5], sin[4:5]), together[3:4]) > 100
    x[2] = x[:, 4] = torch.nan
    neighbours = [0, 1, 2, 3, 5, 6, 7, 8]
    poisoned = rope.rope(x, cos, sin)
    assert_bitwise_equal(poisoned[3:, neighbours], together[3:, neighbours])
    assert poisoned[2].isnan().all()
    for warps in (1, 2, 8):
        monkeypatch.setattr(rope, "TILE_WARPS", warps)
        assert_bitwise_equal(rope.rope(x, cos, sin)[3:, neighbours], together[3:, neighbours])


def test_tile_shape_covers_a_head() -> None:
    for heads, width, itemsize in [(1, 24, 2), (32, 64, 2), (9, 40, 4), (3, 128, 2), (64, 48, 4)]:
        rows, columns, warps = rope.tile_shape(heads, width, itemsize)
        assert columns >= width and rows & (rows - 1) == 0 and warps in (1, 2, 4, 8)
        assert rows * columns <= 32 * warps * 16 // itemsize or rows == 1


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements() -> None:
    """The last rows of a tensor of more than 2^31 elements are right, and the others stay zero."""
    tokens, heads, head_dim = 2**19 + 3, 32, 128
    if torch.cuda.mem_get_info()[0] < 5 * tokens * heads * head_dim:
        pytest.skip("needs 11 GB of GPU memory")
    x = torch.zeros(tokens, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    tail, cos, sin = inputs(3, heads, head_dim, torch.bfloat16)
    x[-3:] = tail
    table = torch.zeros(tokens, head_dim // 2, dtype=torch.bfloat16, device=DEVICE)
    out = rope.rope(x, torch.cat((table[:-3], cos)), torch.cat((table[:-3], sin)))
    assert_bitwise_equal(out[-3:], eager(tail, cos, sin))
    assert not out[:-3].any()
