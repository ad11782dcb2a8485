"""Gumbel noise on CUDA in one pass: the bits of `sampling.gumbel_noise` written in torch ops.

    n rows, V vocabulary.

Rounding points (NUMERICS.md, `native` as `exact`): Philox4x32-10, counted by (token id, position): Gumbel noise through
own log. u = (first word + 1/2) 2^-32 is exact; then -log(-log u), the float64 arithmetic of `exact_math.log` and
`exact_math.reciprocal` operation by operation: each is rounded, none is fused. Any block gives the same bits.

In torch ops the noise of 256 rows of 151936 tokens takes 200 passes over 311 MB; this kernel writes it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import exact_math
from evalengine.kernels.launching.launch import launch

_BLOCK = 512
_SQRT_HALF_BITS = tl.constexpr(exact_math._SQRT_HALF_BITS)
_RECIPROCAL_SEED = tl.constexpr(exact_math._RECIPROCAL_SEED)
_LN2_HI = tl.constexpr(exact_math._LN2_HI)
_LN2_LO = tl.constexpr(exact_math._LN2_LO)


@triton.jit
def _reciprocal(x):
    """The arithmetic of `exact_math.reciprocal`."""
    y = (-x.to(tl.int64, bitcast=True) + _RECIPROCAL_SEED).to(tl.float64, bitcast=True)
    for _ in tl.static_range(4):
        y = y * (2.0 - x * y)
    return y


@triton.jit
def _log(x):
    """The arithmetic of `exact_math.log`."""
    bits = x.to(tl.int64, bitcast=True)
    k = (bits - _SQRT_HALF_BITS) >> 52
    m = (bits - (k << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) * _reciprocal(m + 1.0)
    square = s * s
    series = square * (1.0 / 19)
    for i in tl.static_range(8):
        series = (series + 1.0 / (17 - 2 * i)) * square
    s = s * 2.0
    series = series * s + s
    power = k.to(tl.float64)
    return (power * _LN2_LO + series) + power * _LN2_HI


@triton.jit
def _gumbel_kernel(key_ptr, position_ptr, out_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    parts: tl.constexpr = (V + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    ids = (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros_like(ids)
    word, _, _, _ = tl.philox(tl.load(key_ptr + row), ids, zero + tl.load(position_ptr + row).to(tl.int32), zero, zero)
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    tl.store(out_ptr + row * V + ids, -_log(-_log(uniform)), ids < V)


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """int64 keys [n] (64 bits), int64 positions [n] below 2^32 -> float64 [n, V] of standard Gumbel noise."""
    out = torch.empty(len(keys), vocab_size, dtype=torch.float64, device=keys.device)
    if out.numel():
        grid = (len(keys) * -(-vocab_size // _BLOCK), 1, 1)
        args = (keys.contiguous(), positions.contiguous(), out)
        launch(_gumbel_kernel, grid, args, (vocab_size, _BLOCK), num_warps=4, num_stages=1)
    return out
