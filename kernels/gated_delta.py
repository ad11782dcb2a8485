"""The gated delta rule, token after token, over ragged sequences with a state each.

    T tokens, S sequences, Hk/Hv key and value heads, K/V their dimensions, R slots of the state pool.

Prefill, chunked prefill and decode are one loop over the same float32 state, which is in registers within a step and in
its slot between two, so no choice of the schedule can change a bit: nothing is computed by chunks whose borders would
have to be fixed. Rows of the state (a value's dimension each) do not depend on each other, and their sums over K are of
a fixed shape. Reading q, k and v of the next token does not wait for the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import launch
from evalengine.kernels.recurrent_variant import GatedDelta
from evalengine.kernels.sequence_of_step import sequence_of_step

# These two are part of the arithmetic: the order of a sum over K follows from a tile's shape and number of warps.
ROWS = 32  # of the state a program
WARPS = 4


@triton.jit
def _normed(x):
    return x * device_math.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _gated_delta_kernel(
    mixed_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr, cu_seqlens, seqlens, state_slots, scale,
    beta_scale, stride_mixed, stride_a, stride_b,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (rows of the state, value head, sequence)."""
    device_math.after_previous_kernel()
    head, s = tl.program_id(1), tl.program_id(2)
    slot, first, n, begins = sequence_of_step(s, cu_seqlens, seqlens, state_slots)
    if (slot < 0) | (n == 0):
        return
    row, key = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, KP)
    real_row, real_key = row < V, key < K
    at = state_ptr + ((slot * HV + head) * V + row)[:, None] * K + key[None, :]
    real = real_row[:, None] & real_key[None, :]
    state = tl.load(at, mask=real & (begins == 0), other=0.0)
    decay_rate = -device_math.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    q_at = mixed_ptr + first * stride_mixed + head // (HV // HK) * K + key
    v_at = mixed_ptr + first * stride_mixed + 2 * HK * K + head * V + row
    for t in range(n):
        q = _normed(tl.load(q_at, mask=real_key, other=0.0).to(tl.float32)) * scale
        k = _normed(tl.load(q_at + HK * K, mask=real_key, other=0.0).to(tl.float32))
        v = tl.load(v_at, mask=real_row, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + (first + t) * stride_a + head).to(tl.float32)
        beta = device_math.sigmoid(tl.load(b_ptr + (first + t) * stride_b + head).to(tl.float32))
        beta = beta.to(dtype).to(tl.float32) * beta_scale
        state = state * device_math.exp(decay_rate * device_math.softplus(a + dt_bias))
        delta = (v - tl.sum(state * k[None, :], 1)) * beta
        state = tl.fma(tl.zeros_like(state) + delta[:, None], tl.zeros_like(state) + k[None, :], state)
        out = tl.sum(state * q[None, :], 1).to(dtype)
        tl.store(out_ptr + ((first + t) * HV + head) * V + row, out, mask=real_row)
        q_at += stride_mixed
        v_at += stride_mixed
    tl.store(at, state, mask=real)


def gated_delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    variant: GatedDelta,
) -> Tensor:
    """q, k and v side by side after the convolution, [T, 2 Hk K + Hv V], a and b [T, Hv] of any row stride, float32
    a_log and dt_bias [Hv] -> [T, Hv, V]; the state pool, float32 [R, Hv, V, K], is brought up to date.

    The sequences are described as for `causal_conv`.
    """
    heads, values, keys = variant.state_shape
    assert mixed.stride(1) == a.stride(1) == b.stride(1) == 1 and state.is_contiguous()
    assert state.shape[1:] == variant.state_shape and state.dtype == torch.float32
    out = torch.zeros((len(mixed), heads, values), dtype=mixed.dtype, device=mixed.device)
    launch(
        _gated_delta_kernel, (-(-values // ROWS), heads, len(state_slots)),
        (mixed, a, b, a_log, dt_bias, state, out, cu_seqlens_q, seqlens_k, state_slots, keys**-0.5, variant.beta_scale,
         mixed.stride(0), a.stride(0), b.stride(0)),
        (variant.num_key_heads, heads, keys, triton.next_power_of_2(keys), values, ROWS), WARPS, 1,
    )  # fmt: skip
    return out
