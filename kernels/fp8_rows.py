"""Activations as numbers of FP8 (e4m3) times a scale, as checkpoints with quantised activations ask for.

    T tokens, K features; a group is all K features of a token, or so many in a row, at absolute multiples.

Rounding points (`native`), in float32: `s = max(m / 448, 2^-126)`, m the group's largest magnitude, or the checkpoint's
constant (an s that is made is rounded up to a power of two where the checkpoint says so); `t = x / s`, within -448 and
448; `q` the nearest e4m3 number, equals to the even one; `q * s`, rounded to the
dtype. Both quotients are IEEE's. An infinity becomes NaN, and so does the whole group where it has its own scale.

So a group's result depends on that group alone: never on the other tokens of a step, as a scale of the whole tensor
would. The product that follows is the contract's, of these numbers in the run's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key

BLOCK = 2048  # elements of a program's tile, at most
WARPS = 4
_launches: dict[tuple, Replay] = {}


@triton.jit
def nearest_e4m3(t):
    """float32 within -448 and 448 -> the nearest e4m3 number, equals to the even one; NaN stays NaN.

    Adding and subtracting 1.5 * 2^23 steps rounds to a multiple of a step: 2^-3 of the number's power of two, at least
    2^-9. Not by a conversion, which Triton's interpreter rounds otherwise.
    """
    exponent = (t.to(tl.int32, bitcast=True) >> 23) & 255
    large = ((tl.maximum(exponent, 121) + 20) << 23 | 0x400000).to(tl.float32, bitcast=True)
    return tl.where(exponent == 255, t, (t + large) - large)


@triton.jit(do_not_specialize=["items"])
def _fp8_rows_kernel(
    x_ptr, out_ptr, stride, K, items, scale, GROUP, BLOCK: tl.constexpr, ROWS: tl.constexpr, STATIC: tl.constexpr,
    POWER: tl.constexpr,
):  # fmt: skip
    """Program: ROWS groups, of the `items` in all."""
    device_math.after_previous_kernel()
    groups = tl.cdiv(K, GROUP)
    item = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (item % groups * GROUP)[:, None]
    last = tl.minimum(first + GROUP, tl.where(item < items, K, 0)[:, None])
    row = (item // groups)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    largest = tl.zeros((ROWS,), tl.int32)
    if not STATIC:
        for start in range(0, GROUP, BLOCK):
            column = first + start + place
            x = tl.load(x_ptr + row * stride + column, mask=column < last, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
        size = largest.to(tl.float32, bitcast=True)
        s = tl.maximum(tl.div_rn(size, tl.full((ROWS,), 448.0, tl.float32)), 1.1754943508222875e-38)
        if POWER:
            s = ((s.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        s = tl.where(largest >= 0x7F800000, float("nan"), s)[:, None]
    else:
        s = tl.full((ROWS, 1), scale, tl.float32)
    for start in range(0, GROUP, BLOCK):
        column = first + start + place
        x = tl.load(x_ptr + row * stride + column, mask=column < last, other=0.0).to(tl.float32)
        t = tl.div_rn(x, tl.broadcast_to(s, x.shape))
        t = tl.where(t > 448.0, 448.0, tl.where(t < -448.0, -448.0, t))
        t = tl.where(tl.abs(x) == float("inf"), float("nan"), t)
        q = nearest_e4m3(t) * s
        tl.store(out_ptr + row * K + column, q.to(out_ptr.dtype.element_ty), mask=column < last)


def fp8_rows(x: Tensor, group: int | None, scale: float | None = None, power: bool = False) -> Tensor:
    """[..., K], contiguous along K -> the same shape, contiguous, in the dtype of x.

    group: features that share a scale; None: all of a token's. scale: of all numbers, in place of the groups' own.
    power: whether those are powers of two.
    """
    k = x.shape[-1]
    size = k if group is None else min(group, k)
    rows = x.reshape(-1, k)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    key = (operand_key(rows), size, scale, power)
    if replayer := _launches.get(key):
        replayer(rows, out)
    elif out.numel():
        assert rows.stride(1) == 1
        block = min(BLOCK, triton.next_power_of_2(size))
        together, items = BLOCK // block, len(rows) * -(-k // size)
        args = (rows, out, rows.stride(0), k, items, 0.0 if scale is None else scale, size)
        constants = (block, together, scale is not None, power)
        launched = launch(_fp8_rows_kernel, (-(-items // together), 1, 1), args, constants, WARPS, num_stages=1)
        if launched:
            cache_launch(_launches, key, launched.replayer(0, 1))
    return out.view(x.shape)
