"""The selective state space of Mamba-2, token after token, over ragged sequences with a state each.

    T tokens, S sequences, H heads, P head_dim, G groups, N state_dim, R slots of the state pool.

As `gated_delta`: one loop over one float32 state serves prefill and decode, so no schedule can change a bit. The time
step is clamped to its limits in both (transformers does so in prefill only).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import launch
from evalengine.kernels.recurrent_variant import Mamba2
from evalengine.kernels.sequence_of_step import sequence_of_step

# These two are part of the arithmetic: the order of a sum over N follows from a tile's shape and number of warps.
ROWS = 32  # of the state a program
WARPS = 4


@triton.jit
def _mamba2_kernel(
    mixed_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, d_ptr, state_ptr, out_ptr, cu_seqlens, seqlens, state_slots, dt_least,
    dt_most, stride_mixed, stride_dt,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (rows of the state, head, sequence)."""
    device_math.after_previous_kernel()
    head, s = tl.program_id(1), tl.program_id(2)
    slot, first, n, begins = sequence_of_step(s, cu_seqlens, seqlens, state_slots)
    if (slot < 0) | (n == 0):
        return
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, NP)
    real_row, real_column = row < P, column < N
    at = state_ptr + ((slot * H + head) * P + row)[:, None] * N + column[None, :]
    real = real_row[:, None] & real_column[None, :]
    state = tl.load(at, mask=real & (begins == 0), other=0.0)
    decay_rate = -device_math.exp(tl.load(a_log_ptr + head))
    dt_bias, d = tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    x_at = mixed_ptr + first * stride_mixed + head * P + row
    b_at = mixed_ptr + first * stride_mixed + H * P + head // (H // G) * N + column
    for t in range(n):
        x = tl.load(x_at, mask=real_row, other=0.0).to(tl.float32)
        b = tl.load(b_at, mask=real_column, other=0.0).to(tl.float32)
        c = tl.load(b_at + G * N, mask=real_column, other=0.0).to(tl.float32)
        dt = device_math.softplus(tl.load(dt_ptr + (first + t) * stride_dt + head).to(tl.float32) + dt_bias)
        dt = tl.minimum(tl.maximum(dt, dt_least), dt_most)
        state = state * device_math.exp(decay_rate * dt)
        state = tl.fma(tl.zeros_like(state) + (dt * x)[:, None], tl.zeros_like(state) + b[None, :], state)
        out = tl.fma(x, tl.zeros_like(x) + d, tl.sum(state * c[None, :], 1)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ((first + t) * H + head) * P + row, out, mask=real_row)
        x_at += stride_mixed
        b_at += stride_mixed
    tl.store(at, state, mask=real)


def mamba2(
    mixed: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    state: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    variant: Mamba2,
) -> Tensor:
    """x, B and C side by side after the convolution, [T, H P + 2 G N], dt [T, H] of any row stride, float32 a_log,
    dt_bias and d [H] -> [T, H, P]; the state pool, float32 [R, H, P, N], is brought up to date.

    The sequences are described as for `causal_conv`.
    """
    heads, rows, columns = variant.state_shape
    assert mixed.stride(1) == dt.stride(1) == 1 and state.is_contiguous()
    assert state.shape[1:] == variant.state_shape and state.dtype == torch.float32
    least, most = variant.dt_limits
    out = torch.zeros((len(mixed), heads, rows), dtype=mixed.dtype, device=mixed.device)
    launch(
        _mamba2_kernel, (-(-rows // ROWS), heads, len(state_slots)),
        (mixed, dt, a_log, dt_bias, d, state, out, cu_seqlens_q, seqlens_k, state_slots, float(least),
         float("inf") if most is None else float(most), mixed.stride(0), dt.stride(0)),
        (heads, rows, variant.num_groups, columns, triton.next_power_of_2(columns), ROWS), WARPS, 1,
    )  # fmt: skip
    return out
