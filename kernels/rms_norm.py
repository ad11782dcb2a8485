"""RMS norm, alone or with the residual stream's sum before it.

    H hidden size (or head_dim, for the norms of queries and keys), rows everything before it.

Rounding points (NUMERICS.md, `native`): the residual stream is the model dtype, the sum is rounded and the rounded
value is normed; x * rsqrt(mean(x^2) + eps) in float32, rounded to the model dtype, then times the weight, rounded.
Not `cast_first` (Gemma, OLMo 2): times the weight, plus the offset, in float32, and one rounding.
The mean is `row_sum.mean_square`, so any tile, any number of warps and any fusion give the same bits.

`gated_norm` is that of a recurrent layer's output (R rows, W columns, normed in groups), gated by SiLU before it
(Mamba-2) or after (gated delta rule). Gate first: x silu(gate) and the norm in float32, rounded to the model's dtype,
times the weight, rounded. Norm first: the norm, rounded, times the weight, rounded, times silu(gate) in float32,
rounded. Falcon-H1's, of either order, is rounded once, at its end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math, row_sum
from evalengine.kernels.activation import times_sigmoid
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key
from evalengine.kernels.limits import MAX_TERMS

GATED_GROUPS = 8  # of 128 numbers, of a program of `gated_norm`

_launches: dict[tuple, Replay] = {}


@triton.jit
def add(x, residual):
    """x and residual of one dtype -> their sum in float32, rounded to it."""
    return (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)


@triton.jit
def normalize(
    x,
    weight,
    n,
    eps,
    DTYPE: tl.constexpr,
    axis: tl.constexpr = 1,
    OFFSET: tl.constexpr = 0.0,
    CAST_FIRST: tl.constexpr = True,
):
    """float32 tile x [rows, columns] (masked columns 0), weight that broadcasts to it, n columns -> DTYPE tile.

    x * rsqrt(mean(x^2) + eps) in float32, rounded to DTYPE if CAST_FIRST, then times OFFSET + weight, rounded.
    """
    rstd = device_math.rsqrt(row_sum.mean_square(x, n, axis) + eps)
    normed = x * tl.expand_dims(rstd, axis)
    if CAST_FIRST:
        normed = normed.to(DTYPE).to(tl.float32)
    factor = weight.to(tl.float32)
    if OFFSET != 0.0:  # 0 + -0 would be +0
        factor = factor + OFFSET
    return (normed * factor).to(DTYPE)


@triton.jit
def load_rows(
    x_ptr, residual_ptr, sum_ptr, rows, x_stride, x_inner_stride, residual_stride, residual_inner_stride,
    H: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """This program's ROWS rows of x, if ADD of x's sum with the residual, which is stored: the tile [ROWS, BLOCK], its
    offsets in a contiguous output, its columns, and which elements there are.

    INNER: rows within one outer stride: the number of heads, or 1.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < H)[None, :]
    x_row = row // INNER * x_stride + row % INNER * x_inner_stride
    x = tl.load(x_ptr + x_row[:, None] + column[None, :], mask, 0.0)
    out = row[:, None] * H + column[None, :]
    if ADD:
        residual_row = row // INNER * residual_stride + row % INNER * residual_inner_stride
        residual = tl.load(residual_ptr + residual_row[:, None] + column[None, :], mask, 0.0)
        x = add(x, residual)
        tl.store(sum_ptr + out, x, mask)
    return x, out, column, mask


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, rows, x_stride, x_inner_stride, residual_stride,
    residual_inner_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    device_math.after_previous_kernel()
    x, out, column, mask = load_rows(
        x_ptr, residual_ptr, sum_ptr, rows, x_stride, x_inner_stride, residual_stride, residual_inner_stride,
        H, BLOCK, INNER, ROWS, ADD,
    )  # fmt: skip
    weight = tl.load(weight_ptr + column, column < H, 0.0)
    tl.store(out_ptr + out, normalize(x.to(tl.float32), weight[None, :], H, eps, x.dtype, 1, OFFSET, CAST_FIRST), mask)


def _schedule_for(block: int) -> tuple[int, int]:
    """Rows and warps of a program, for a tile of `block` columns: 16 to 32 elements a thread."""
    if block <= 1024:
        return max(1, 2048 // block), 4
    return 1, max(4, min(16, block // 1024))


def _by_rows(x: Tensor, inner: int) -> Tensor:
    """[..., H] -> [rows / inner, inner, H] with a contiguous last dimension; a view where the strides allow one."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x.reshape(-1, inner, x.shape[-1])


def norm_rows(
    kernel: Any,
    x: Tensor,
    residual: Tensor | None,
    vectors: tuple[Tensor, ...],
    eps: float,
    schedule: tuple[int, int] | None,
    constants: tuple,
    *,
    by_head: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Launches a norm's kernel: x, the residual, vectors [H] in, the normed rows and the sum out -> those two.

    constants: the kernel's constexprs after ADD. by_head: vectors are [G, H] for x [..., G, H], a row for each head.
    """
    key = (kernel, operand_key(x), operand_key(residual), *map(operand_key, vectors), eps, schedule, constants)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    other = x if residual is None else residual
    if replayer := _launches.get(key):
        replayer(x, other, *vectors, out, total)
        return out, total
    _check(kernel.__name__.strip("_").removesuffix("_kernel"), x, residual, vectors, by_head)
    if out.numel() == 0:
        return out, total
    hidden = x.shape[-1]
    flat = x.ndim < 3 or (x.is_contiguous() and other.is_contiguous())
    inner = 1 if flat else x.shape[-2]  # Heads keep their own stride, so a view of a merged qkv is not copied.
    used = (_by_rows(x, inner), _by_rows(other, inner), *(vector.contiguous() for vector in vectors))
    block = triton.next_power_of_2(hidden)
    rows_per_program, warps = schedule or _schedule_for(block)
    rows = out.numel() // hidden
    launched = launch(
        kernel,
        (triton.cdiv(rows, rows_per_program), 1, 1),
        (*used, out, total, rows, *used[0].stride()[:2], *used[1].stride()[:2], eps),
        (hidden, block, inner, rows_per_program, residual is not None, *constants),
        warps, 3, **options,
    )  # fmt: skip
    given = (x, other, *vectors)
    if launched and all(one.data_ptr() == two.data_ptr() for one, two in zip(given, used, strict=True)):
        cache_launch(_launches, key, launched.replayer(*range(len(given) + 2)))
    return out, total


def _check(name: str, x: Tensor, residual: Tensor | None, vectors: tuple[Tensor, ...], by_head: bool) -> None:
    hidden, expected = x.shape[-1], x.shape[-2:] if by_head else x.shape[-1:]
    if hidden > MAX_TERMS:
        raise ValueError(f"{name} over {hidden} numbers: at most {MAX_TERMS}")
    for what, vector in zip(("weight", "bias"), vectors, strict=False):
        if vector.shape != expected or vector.dtype != x.dtype:
            raise ValueError(
                f"{name} of {x.dtype} {list(x.shape)} needs a {what} of {x.dtype} {list(expected)}, "
                f"not {vector.dtype} {list(vector.shape)}"
            )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"x and residual must agree: {x.dtype} {list(x.shape)} against {residual.dtype} {list(residual.shape)}"
        )


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
    schedule: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    # With 80 registers, not 90, an SM runs 6 blocks of 128 threads, not 5.
    options: dict[str, Any] = {"maxnreg": 80 if x.element_size() == 2 else None}
    return norm_rows(_rms_norm_kernel, x, residual, (weight,), eps, schedule, (offset, cast_first), **options)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, cast_first: bool = True,
    _schedule: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """x [..., H] of any leading strides, weight [H] of x's dtype -> contiguous [..., H].

    The weight counts with `offset` added to it; `cast_first` says whether the normed row is rounded before it is
    multiplied. A row that holds an infinity or a NaN becomes NaN as a whole; one whose mean of squares is beyond
    float32 becomes zeros, as in eager code. H is at most 16384 (`limits.MAX_TERMS`), else ValueError. `_schedule` is
    (rows a program, warps), for tests and verify: it cannot change a bit.
    """
    return _launch(x, None, weight, eps, offset, cast_first, _schedule)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, cast_first: bool = True,
    _schedule: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x, residual [..., H] -> (rms_norm of their sum, the sum), the sum rounded to the dtype and normed as rounded."""
    return _launch(x, residual, weight, eps, offset, cast_first, _schedule)


@triton.jit
def _sum_of_128(x, ROWS: tl.constexpr):
    """[ROWS, 128] -> [ROWS]: halves of 32 numbers are added until one is left, then halves of these four. So four warps
    of one number a thread add them up; spelt out, a program's rows and warps do not matter."""
    x = x.reshape(ROWS * 4, 32)
    for level in tl.static_range(5):
        x = tl.sum(x.reshape(ROWS * 4, 2, 16 >> level), 1)
    x = tl.sum(x.reshape(ROWS, 2, 2), 1)
    return tl.sum(x, 1)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, eps, stride_x, stride_gate, rows, groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, GATE_FIRST: tl.constexpr, REPEATED: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """Program: so many groups of all rows'. REPEATED: every group has the same weights [GROUP]."""
    device_math.after_previous_kernel()
    number = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS))[:, None]
    row, group, i = (number // groups).to(tl.int64), number % groups, tl.arange(0, BLOCK)[None, :]
    keep, column = (i < GROUP) & (row < rows), group * GROUP + i
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + column, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=keep, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + (i + 0 * group if REPEATED else column), mask=keep, other=0.0).to(tl.float32)
    factor = times_sigmoid(gate, gate, dtype)
    if GATE_FIRST:
        x = x * factor
    squares = _sum_of_128(x * x, GROUPS) if BLOCK == 128 else tl.sum(x * x, 1)
    normed = x * device_math.rsqrt(squares / GROUP + eps)[:, None]
    if not ONCE:
        normed = normed.to(dtype).to(tl.float32)
    out = weight * normed
    if not ONCE:
        out = out.to(dtype).to(tl.float32)
    if not GATE_FIRST:
        out = out * factor
    tl.store(out_ptr + row * groups * GROUP + column, out.to(dtype), mask=keep)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool, rounded_once: bool = False
) -> Tensor:
    """[R, W] twice, of any row stride; weight [W], or [group] of which every group has the same -> [R, W].

    Each `group` of numbers is normalised separately. gate_first: x is multiplied with silu(gate) before; else the norm
    is. rounded_once: at its end only.
    """
    rows, width = x.shape
    assert width % group == 0 and len(weight) in (group, width) and x.stride(1) == gate.stride(1) == 1
    assert gate.dtype == x.dtype
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(group)
    several = GATED_GROUPS if block == 128 else 1
    launch(
        _gated_norm_kernel, (-(-rows * (width // group) // several), 1, 1),
        (x, gate, weight, out, eps, x.stride(0), gate.stride(0), rows, width // group),
        (group, block, several, gate_first, len(weight) < width, rounded_once), 4 if block <= 2048 else 8, 1,
    )  # fmt: skip
    return out
