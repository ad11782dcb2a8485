"""The rows of a mixture of experts, except its products: the weighted sum, the shared expert's gate, gpt-oss's SwiGLU.
The gate also applies to attention's output.

    T tokens, k experts of each, H hidden, I intermediate size.

Rounding points (`native`), in float32 unless it says otherwise:

* combine: `acc = 0`, then in order of rank `acc = acc + weight * row`, product and sum rounded to float32; one rounding
  to the dtype, after the last.
* gate: 1 / (1 + exp(-logit)), rounded to the dtype, times x, rounded.
* clamped SwiGLU, where transformers' eager code rounds: gate at most 7; 1.702 gate, the sigmoid of that, its product
  with gate, up (within -7 and 7) + 1, and the product of these two are each rounded to the dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.activation import rounded_times_sigmoid
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key

BLOCK = 1024  # elements of a program
WARPS = 4
_launches: dict[tuple, Replay] = {}


@triton.jit
def _place(WIDTH, BLOCK: tl.constexpr):
    """The row and the columns of this program, BLOCK of WIDTH, and which of them there are."""
    parts = tl.cdiv(WIDTH, BLOCK)
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    return (tl.program_id(0) // parts).to(tl.int64), column, column < WIDTH


@triton.jit
def _combine_kernel(x_ptr, weights_ptr, out_ptr, H, K: tl.constexpr, BLOCK: tl.constexpr):
    device_math.after_previous_kernel()
    token, column, mask = _place(H, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(K):
        weight = tl.load(weights_ptr + token * K + rank)
        row = tl.load(x_ptr + (token * K + rank) * H + column, mask, other=0.0).to(tl.float32)
        acc = acc + row * weight
    tl.store(out_ptr + token * H + column, acc.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _gate_kernel(x_ptr, logits_ptr, out_ptr, H, logits_stride, OF_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """OF_ROW: one logit per row."""
    device_math.after_previous_kernel()
    token, column, mask = _place(H, BLOCK)
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * H + column, mask, other=0.0).to(tl.float32)
    if OF_ROW:
        logit = tl.broadcast_to(tl.load(logits_ptr + token * logits_stride).to(tl.float32), (BLOCK,))
    else:
        logit = tl.load(logits_ptr + token * logits_stride + column, mask, other=0.0).to(tl.float32)
    sigmoid = rounded_times_sigmoid(tl.full((BLOCK,), 1.0, tl.float32), logit, dtype)
    tl.store(out_ptr + token * H + column, (sigmoid.to(tl.float32) * x).to(dtype), mask)


@triton.jit
def _clamped(x, low, high):
    """x within low and high; NaN stays NaN."""
    x = tl.where(x > high, high, x)
    return tl.where(x < low, low, x)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, row_stride, WIDTH, BLOCK: tl.constexpr):
    device_math.after_previous_kernel()
    row, column, mask = _place(WIDTH, BLOCK)
    dtype = out_ptr.dtype.element_ty
    gate = _clamped(tl.load(x_ptr + row * row_stride + column, mask, other=0.0).to(tl.float32), float("-inf"), 7.0)
    up = _clamped(tl.load(x_ptr + row * row_stride + WIDTH + column, mask, other=0.0).to(tl.float32), -7.0, 7.0)
    sigmoid = device_math.sigmoid((gate * 1.702).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    glu = (gate * sigmoid).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, ((up + 1.0).to(dtype).to(tl.float32) * glu).to(dtype), mask)


def combine(x: Tensor, weights: Tensor) -> Tensor:
    """[T, k, H], float32 [T, k], both contiguous -> [T, H] in the dtype of x."""
    tokens, chosen, hidden = x.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    grid = (tokens * -(-hidden // BLOCK), 1, 1)
    _launch(_combine_kernel, grid, (x, weights), out, (hidden,), (chosen, BLOCK))
    return out


def gate(x: Tensor, logits: Tensor) -> Tensor:
    """[T, H], contiguous, and [T, 1] or [T, H] of any row stride, of one dtype -> [T, H]: x * sigmoid(logit)."""
    (tokens, width), of_row = x.shape, logits.shape[1] == 1
    assert x.is_contiguous() and logits.shape == (tokens, 1 if of_row else width)
    assert of_row or logits.stride(1) == 1
    out, grid = torch.empty_like(x), (tokens * -(-width // BLOCK), 1, 1)
    _launch(_gate_kernel, grid, (x, logits), out, (width, logits.stride(0)), (of_row, BLOCK))
    return out


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 I] of any row stride -> [T, I]: (up + 1) * gate * sigmoid(1.702 gate), both clamped."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.stride(1) == 1
    grid = (tokens * -(-width // BLOCK), 1, 1)
    _launch(_swiglu_kernel, grid, (gate_up,), out, (gate_up.stride(0), width), (BLOCK,))
    return out


def _launch(
    kernel: triton.JITFunction, grid: tuple[int, int, int], inputs: tuple[Tensor, ...], out: Tensor, sizes: tuple,
    constants: tuple,
) -> None:  # fmt: skip
    """Runs a kernel whose parameters are its inputs, its output, sizes and constants; a launch of the same kind is
    repeated as it was."""
    key = (kernel, *map(operand_key, inputs), constants)
    if replayer := _launches.get(key):
        replayer(*inputs, out)
        return
    if launched := launch(kernel, grid, (*inputs, out, *sizes), constants, WARPS, num_stages=1):
        cache_launch(_launches, key, launched.replayer(*range(len(inputs) + 1)))
