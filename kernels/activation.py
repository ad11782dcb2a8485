"""SiLU, GELU and a squared ReLU, alone and times the up projection, rounded where transformers' code rounds; xIELU.

    T tokens, I intermediate size.

Rounding points (`native`): the activation in fp32, rounded to the model dtype, then times up, rounded. silu is
x / (1 + exp(-x)) with CUDA's expf and an IEEE division, as in torch's CUDA kernel. In float16 the division is a
reciprocal and a Newton step, in bfloat16 both functions are approximate. The bytes are torch's (tested on an H200).
gelu_tanh is the same with exp(-2 u), 2 u = fma(x x x, 0.044715, x) 2 sqrt(2 / pi), equal to x (1 + tanh u) / 2; gelu is
x 0.5 (1 + erf(x sqrt(1/2))) with CUDA's own erff, torch's formula; relu2 is max(x, 0)^2. xIELU is computed in fp32 and
rounded once (transformers' eager code rounds each of its operations).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import Replay, cache_launch, launch, operand_key
from evalengine.kernels.row_variants import Xielu

_launches: dict[tuple, Replay] = {}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
BLOCK = 1024  # elements of a program: with 4 warps a thread moves 8 bf16 values, 16 bytes, of each operand
WARPS = 4


@triton.jit
def times_sigmoid(x, z, dtype: tl.constexpr):
    """float32 x holding `dtype` values, and z -> x sigmoid(z) in float32.

    The compiler's IEEE division branches for each element, which makes a kernel wait for arithmetic, not for memory.
    For 16-bit dtypes the quotient is one Newton correction instead, x and the divisor scaled by 1/4 so that the
    reciprocal stays a normal number: within 2^-46 of the true quotient before its rounding, and IEEE division's bytes
    for x = z and each of the 2^16 inputs (tested). Where the remainder is 0 (x = -0: a correction would give +0) or NaN
    (x or the divisor infinite), x * reciprocal is right as it is.
    """
    exponential = device_math.exp(z * -1.0)  # a sign of the operand; `-z` would be 0 - z, an addition
    if dtype == tl.float32:
        result = tl.div_rn(x, 1.0 + exponential)
    else:
        divisor = tl.fma(exponential, 0.25, 0.25)
        dividend = x * 0.25
        reciprocal = device_math.approximate_reciprocal(divisor)
        quotient = dividend * reciprocal
        remainder = tl.fma(divisor * -1.0, quotient, dividend)
        corrected = tl.fma(remainder, reciprocal, quotient)
        result = tl.where(tl.abs(remainder) > 0, corrected, quotient)
    return result


@triton.jit
def rounded_times_sigmoid(x, z, dtype: tl.constexpr):
    """`times_sigmoid`, rounded to `dtype`.

    To bfloat16, by the approximate exponential and reciprocal alone: half the instructions, and the same bytes for
    SiLU, GELU and sigmoid of each of the 2^16 inputs (tested on an H200). In float16, the bytes of some would differ.
    """
    if dtype == tl.bfloat16:
        divisor = tl.fma(device_math.approximate_exp2(z * -1.4426950408889634), 0.25, 0.25)
        result = x * 0.25 * device_math.approximate_reciprocal(divisor)
    else:
        result = times_sigmoid(x, z, dtype)
    return result.to(dtype)


@triton.jit
def activate(x, dtype: tl.constexpr, ACT: tl.constexpr):
    """float32 holding `dtype` values -> the activation in fp32, rounded to `dtype`."""
    if ACT == "silu":
        result = rounded_times_sigmoid(x, x, dtype)
    elif ACT == "gelu_tanh":
        result = rounded_times_sigmoid(x, tl.fma(x * x * x, 0.044715, x) * 1.5957691216057308, dtype)
    elif ACT == "relu2":
        positive = tl.where(x < 0, 0.0, x)  # a NaN stays
        result = (positive * positive).to(dtype)
    else:
        result = (x * 0.5 * (1.0 + device_math.erf(x * 0.7071067811865476))).to(dtype)
    return result


@triton.jit
def times_activation(gate, up, dtype: tl.constexpr, ACT: tl.constexpr):
    """float32 holding `dtype` values -> ACT(gate), rounded to `dtype`, times up, rounded to `dtype`."""
    return (activate(gate, dtype, ACT).to(tl.float32) * up).to(dtype)


@triton.jit
def _gated_kernel(gate_up_ptr, out_ptr, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr):
    device_math.after_previous_kernel()
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // parts).to(tl.int64)
    columns = (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    dtype = out_ptr.dtype.element_ty
    source = gate_up_ptr + token * row_stride + columns
    # `up` is loaded first; otherwise its load would be issued after the activation's arithmetic.
    up = tl.load(source + WIDTH, mask, other=0.0).to(tl.float32)
    gate = tl.load(source, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + columns, times_activation(gate, up, dtype, ACT), mask)


@triton.jit
def _activation_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, ACT: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    x = tl.load(x_ptr + index, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, activate(x, out_ptr.dtype.element_ty, ACT), mask)


@triton.jit
def _xielu_kernel(x_ptr, out_ptr, n, alpha_p, alpha_n, beta, eps, BLOCK: tl.constexpr):
    device_math.after_previous_kernel()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    x = tl.load(x_ptr + index, mask, other=0.0).to(tl.float32)
    low = tl.minimum(x, eps)
    series = tl.full((BLOCK,), 1.0, tl.float32)
    for i in tl.static_range(10):  # 1 + low / 3 (1 + low / 4 (... (1 + low / 12)))
        series = tl.fma(low * (1.0 / (12 - i)), series, 1.0)
    # e^low - 1 - low: near 0, where the sum cancels, by its series
    curve = tl.where(low > -1.0, low * low * 0.5 * series, device_math.exp(low) - 1.0 - low)
    line = beta * x
    value = tl.where(x > 0, tl.fma(alpha_p * x, x, line), tl.fma(curve + (low - x), alpha_n, line))
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask)


def gated(gate_up: Tensor, act: str = "silu") -> Tensor:
    """[T, 2 I] (any row stride) -> [T, I], contiguous: act(first half) * second half; act: one of `ACTIVATIONS`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    key = (operand_key(gate_up), act)
    if replayer := _launches.get(key):
        out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
        replayer(gate_up, out)
        return out
    assert act in ACTIVATIONS, f"{act} is none of the activations {ACTIVATIONS}"
    assert gate_up.shape[1] == 2 * width, f"{act} takes gate and up side by side, not {gate_up.shape[1]} columns"
    as_given = gate_up.stride(1) == 1
    if not as_given:
        gate_up = gate_up.contiguous()
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens and width:
        grid, args = (tokens * -(-width // BLOCK), 1, 1), (gate_up, out, gate_up.stride(0))
        launched = launch(_gated_kernel, grid, args, (width, BLOCK, act), WARPS, num_stages=1)
        if launched and as_given:
            cache_launch(_launches, key, launched.replayer(0, 1))
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I] (any row stride) -> [T, I], contiguous: silu(first half) * second half."""
    return gated(gate_up)


def activation(x: Tensor, act: str) -> Tensor:
    """Any shape and strides -> act(x), contiguous, in the dtype of x; act: one of `ACTIVATIONS`."""
    assert act in ACTIVATIONS, f"{act} is none of the activations {ACTIVATIONS}"
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        grid = (-(-x.numel() // BLOCK), 1, 1)
        launch(_activation_kernel, grid, (x, out, x.numel()), (BLOCK, act), WARPS, num_stages=1)
    return out


def xielu(x: Tensor, numbers: Xielu) -> Tensor:
    """Any shape and strides -> xIELU of x, contiguous, in the dtype of x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        grid = (-(-x.numel() // BLOCK), 1, 1)
        launch(_xielu_kernel, grid, (x, out, x.numel(), *numbers), (BLOCK,), WARPS, num_stages=1)
    return out


def silu(x: Tensor) -> Tensor:
    """Any shape and strides -> x / (1 + exp(-x)), contiguous, in the dtype of x."""
    return activation(x, "silu")
