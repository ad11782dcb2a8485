"""Attention over whole tensors: right to a rounding, the engine's bytes, and no row depends on what it does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from evalengine.kernels import attention_dense
from evalengine.kernels.attention import CHUNK
from evalengine.kernels.attention_dense import dense_attention
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.kernels.paged_batch import DEVICE, PagedBatch
from tests.references import reference

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # relative to the largest output
SMALL = [  # (dtype, batch, heads, kv_heads, rows, keys, head_dim)
    (torch.float32, 2, 4, 2, 17, 17, 16),
    (torch.float16, 1, 3, 3, 65, 65, 64),
    (torch.float16, 3, 6, 1, 1, 131, 20),
    (torch.float32, 1, 2, 1, 5, 1, 48),
    (torch.float32, 1, 1, 1, 2, CHUNK + 67, 16),
]
LARGE = [
    pytest.param(torch.bfloat16, 3, 16, 8, 333, 333, 128, marks=pytest.mark.gpu),
    pytest.param(torch.float16, 2, 8, 1, 257, 2049, 96, marks=pytest.mark.gpu),
    pytest.param(torch.bfloat16, 2, 4, 2, 1, 3001, 256, marks=pytest.mark.gpu),
    pytest.param(torch.float32, 2, 4, 2, 129, 129, 64, marks=pytest.mark.gpu),
]
FORMS = ["whole", "causal", "boolean", "added"]


def operands(dtype: torch.dtype, batch: int, heads: int, kv_heads: int, rows: int, keys: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((batch, rows, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).transpose(1, 2) for shape in shapes]


def options(form: str, dtype: torch.dtype, batch: int, rows: int, keys: int) -> dict[str, Tensor | bool | float]:
    """The mask that makes a form; the boolean one hides all keys from the first row, and has a size of 1."""
    generator = torch.Generator().manual_seed(keys)
    if form == "boolean":
        seen = torch.rand(batch, 1, rows, keys, generator=generator) < 0.7
        seen[:, :, 0] = False
        return {"mask": seen.to(DEVICE)}
    if form == "added":
        return {"mask": torch.randn(rows, keys, generator=generator).to(DEVICE, dtype), "scale": 0.3}
    return {"is_causal": form == "causal"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "batch", "heads", "kv_heads", "rows", "keys", "dim"), [*SMALL, *LARGE])
def test_against_float64(
    dtype: torch.dtype, batch: int, heads: int, kv_heads: int, rows: int, keys: int, dim: int, form: str
) -> None:
    q, k, v = operands(dtype, batch, heads, kv_heads, rows, keys, dim)
    chosen = options(form, dtype, batch, rows, keys)
    out = dense_attention(q, k, v, **chosen)  # type: ignore[arg-type]
    truth = reference.dense_attention(q, k, v, **chosen)  # type: ignore[arg-type]
    assert out.shape == q.shape and out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    assert (out.double() - truth).abs().max() <= TOLERANCE[dtype] * max(1.0, truth.abs().max().item())


@pytest.mark.parametrize(("dtype", "batch", "heads", "kv_heads", "rows", "keys", "dim"), [*SMALL[:3], *LARGE[:2]])
def test_every_form_of_one_mask_has_the_same_bytes(
    dtype: torch.dtype, batch: int, heads: int, kv_heads: int, rows: int, keys: int, dim: int
) -> None:
    """`is_causal`, a boolean mask and numbers that are added, of any sizes of 1, say the same thing."""
    q, k, v = operands(dtype, batch, heads, kv_heads, rows, keys, dim)
    causal = dense_attention(q, k, v, is_causal=True)
    seen = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE).tril()
    added = torch.zeros(batch, heads, rows, keys, dtype=dtype, device=DEVICE).masked_fill(~seen, torch.finfo(dtype).min)
    for mask in (seen, seen[None].expand(heads, -1, -1), added, added[:, :1]):
        assert_bitwise_equal(dense_attention(q, k, v, mask), causal)
    if rows > 1:
        assert count_differing(dense_attention(q, k, v), causal)


ACROSS_CHUNKS = pytest.param(torch.bfloat16, 2, 4, 2, 1100, 1100, 128, marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    ("dtype", "batch", "heads", "kv_heads", "rows", "keys", "dim"), [*SMALL[:2], LARGE[0], ACROSS_CHUNKS]
)
def test_a_row_depends_on_what_it_sees_alone(
    dtype: torch.dtype, batch: int, heads: int, kv_heads: int, rows: int, keys: int, dim: int
) -> None:
    """Not on its batch, on other rows, on keys after it, on padding or on strides."""
    q, k, v = operands(dtype, batch, heads, kv_heads, rows, keys, dim)
    whole = dense_attention(q, k, v, is_causal=True)
    assert_bitwise_equal(dense_attention(q[:1], k[:1], v[:1], is_causal=True), whole[:1])
    assert_bitwise_equal(dense_attention(*(x.contiguous() for x in (q, k, v)), is_causal=True), whole)
    odd = [torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in (q, k, v)]
    assert_bitwise_equal(dense_attention(*odd, is_causal=True), whole)
    for row in {0, rows // 2, rows - 1}:  # a decode: one query over the keys so far
        part = dense_attention(q[:, :, row : row + 1], k[:, :, : row + 1], v[:, :, : row + 1])
        assert_bitwise_equal(part, whole[:, :, row : row + 1])
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 70), value=3.0) for x in (q, k, v)]
    seen = torch.ones(rows + 70, keys + 70, dtype=torch.bool, device=DEVICE).tril()
    seen[:, keys:] = False
    assert_bitwise_equal(dense_attention(*padded, seen)[:, :, :rows], whole)


@pytest.mark.parametrize(
    ("length", "dim", "dtype"),
    [
        (70, 64, torch.float32),
        pytest.param(2500, 128, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(1000, 64, torch.float16, marks=pytest.mark.gpu),
        pytest.param(1100, 256, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_it_is_the_engine_s_attention(length: int, dim: int, dtype: torch.dtype) -> None:
    batch = PagedBatch.random([(length, length)], 4, 2, dim, 64, dtype)
    pages = torch.tensor(batch.pages[0], device=DEVICE)
    k, v = (x[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (batch.k_cache, batch.v_cache))
    out = dense_attention(batch.q.transpose(0, 1)[None], k, v, is_causal=True)
    assert_bitwise_equal(out[0].transpose(0, 1), batch.run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_that_is_masked_by_the_least_number(dtype: torch.dtype) -> None:
    """All of its keys count alike, as in torch; rows that see one key beside such numbers see that one only."""
    q, k, v = operands(torch.float16 if dtype == torch.float16 else torch.float32, 1, 2, 1, 3, 70, 16)
    mask = torch.full((3, 70), torch.finfo(dtype).min, dtype=dtype, device=DEVICE)
    mask[1, 5] = 0
    mask[2] = -torch.inf
    out = dense_attention(q, k, v, mask.float())
    if dtype != torch.float16:  # -65,504 leaves scores their differences
        torch.testing.assert_close(out[0, :, 0], v.mean(2).expand(1, 2, -1)[0])
    assert_bitwise_equal(out[0, :, 1], v[0, :, 5].expand(2, -1))
    assert not out[0, :, 2].any()


def test_a_remembered_launch_keeps_no_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape that is met is remembered; a tensor kept with each would fill the memory."""
    kept: list[tuple[int, ...]] = []

    class Launched:
        def __init__(self, args: tuple[Any, ...]) -> None:
            self.args = args

        def replayer(self, *varying: int) -> Callable[..., None]:
            kept.extend(x.shape for i, x in enumerate(self.args) if isinstance(x, Tensor) and i not in varying)
            return lambda *tensors: None

    monkeypatch.setattr(attention_dense, "_launches", {})
    monkeypatch.setattr(attention_dense, "launch", lambda kernel, grid, args, *rest: Launched(args))
    q, k, v = operands(torch.float32, 2, 2, 2, 3, 3, 16)
    for mask in (None, torch.ones(3, 3, dtype=torch.bool, device=DEVICE)):
        dense_attention(q, k, v, mask)
        dense_attention(q, k, v, mask)
    assert len(attention_dense._launches) == 2 and not kept


def test_nothing_to_do() -> None:
    q, k, v = operands(torch.float32, 2, 2, 1, 3, 5, 16)
    assert dense_attention(q[:, :, :0], k, v).shape == (2, 2, 0, 16)
    assert not dense_attention(q, k[:, :, :0], v[:, :, :0]).any()


@pytest.mark.gpu
def test_a_repeated_launch_takes_the_new_operands() -> None:
    first, second = ([x * factor for x in operands(torch.bfloat16, 2, 4, 2, 33, 33, 64)] for factor in (1, 2))
    mask = torch.rand(2, 1, 33, 33, device=DEVICE) < 0.5
    for chosen in ({"is_causal": True}, {"mask": mask}):
        results = [dense_attention(*x, **chosen) for x in (first, second, first, second)]  # type: ignore[arg-type]
        assert_bitwise_equal(results[2], results[0])
        assert_bitwise_equal(results[3], results[1])
        assert count_differing(results[0], results[1])
    other = dense_attention(*first, ~mask)
    assert count_differing(other, dense_attention(*first, mask))
