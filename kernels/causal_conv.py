"""A depthwise causal convolution over ragged sequences, whose state is each sequence's last inputs.

    T tokens, S sequences, C channels, K taps, R slots of the state pool.

An output is one chain of fused multiply-adds over the K taps, the oldest input first, begun with the bias, rounded to
the model's dtype; then SiLU in float32, rounded. So it depends on K inputs and nothing else, and how many tokens of a
sequence a step has changes no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.activation import activate
from evalengine.kernels.launching.launch import launch
from evalengine.kernels.sequence_of_step import sequence_of_step

TOKENS, CHANNELS = 32, 128  # of a program's tile


@triton.jit
def _inputs(x_ptr, state_ptr, first, at, channel, stride_x, begins, K: tl.constexpr, keep):
    """The inputs `at` [tokens] of the sequence's present ones, in float32; below 0 those of the state."""
    new = tl.load(
        x_ptr + (first + at)[:, None] * stride_x + channel[None, :], mask=keep & (at >= 0)[:, None], other=0.0
    )
    old = tl.load(
        state_ptr + channel[None, :] * (K - 1) + (K - 1 + at)[:, None],
        mask=keep & ((at < 0) & (at >= 1 - K) & (begins == 0))[:, None],
        other=0.0,
    )
    return tl.where((at >= 0)[:, None], new, old).to(tl.float32)


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, cu_seqlens, seqlens, state_slots, channels, stride_x,
    K: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Program (channels, sequence, tokens). STORE: one program has all of a sequence's tokens and stores its state."""
    device_math.after_previous_kernel()
    s, block = tl.program_id(1), tl.program_id(2)
    slot, first, n, begins = sequence_of_step(s, cu_seqlens, seqlens, state_slots)
    if (slot < 0) | (block * TOKENS >= n):
        return
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    own = state_ptr + slot * channels * (K - 1)
    t = block * TOKENS + tl.arange(0, TOKENS)
    keep = (t < n)[:, None] & real[None, :]
    dtype = out_ptr.dtype.element_ty
    acc = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(K):
        w = tl.load(weight_ptr + channel * K + j, mask=real, other=0.0).to(tl.float32)
        x = _inputs(x_ptr, own, first, t - (K - 1) + j, channel, stride_x, begins, K, keep)
        acc = tl.fma(x, tl.zeros_like(x) + w[None, :], acc)
    out = acc.to(dtype)
    if SILU:
        out = activate(out.to(tl.float32), dtype, "silu")
    tl.store(out_ptr + (first + t)[:, None] * channels + channel[None, :], out, mask=keep)
    if STORE:
        _store_state(x_ptr, own, first, n, channel, real, stride_x, begins, K)


@triton.jit
def _store_state(x_ptr, own, first, n, channel, real, stride_x, begins, K: tl.constexpr):
    """The sequence's last K - 1 inputs become its state; all are read before one is written."""
    KP: tl.constexpr = triton.next_power_of_2(K - 1)
    i = tl.arange(0, KP)
    keep = (i < K - 1)[:, None] & real[None, :]
    last = _inputs(x_ptr, own, first, n - (K - 1) + i, channel, stride_x, begins, K, keep)
    tl.debug_barrier()
    tl.store(own + channel[None, :] * (K - 1) + i[:, None], last.to(own.dtype.element_ty), mask=keep)


@triton.jit
def _state_kernel(
    x_ptr, state_ptr, cu_seqlens, seqlens, state_slots, channels, stride_x, K: tl.constexpr, CHANNELS: tl.constexpr
):
    device_math.after_previous_kernel()
    s = tl.program_id(1)
    slot, first, n, begins = sequence_of_step(s, cu_seqlens, seqlens, state_slots)
    if (slot < 0) | (n == 0):
        return
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    _store_state(
        x_ptr, state_ptr + slot * channels * (K - 1), first, n, channel, channel < channels, stride_x, begins, K
    )  # fmt: skip


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    max_query_len: int,
    *,
    silu: bool,
) -> Tensor:
    """[T, C] of any row stride, weights [C, K], bias [C] -> [T, C]; the state pool [R, C, K - 1] is brought up to date.

    cu_seqlens_q: int32 [S + 1]; seqlens_k: int32 [S], tokens of each sequence so far, the step's included; state_slots:
    int32 [S], each sequence's slot (-1: padding, whose outputs are left as they are). A sequence of which all tokens
    are in this step begins with zeros, whatever its slot holds. max_query_len: the most tokens of a sequence.
    """
    channels, taps = weight.shape
    assert x.stride(1) == 1 and state.is_contiguous() and weight.is_contiguous() and taps > 1
    out = torch.zeros((len(x), channels), dtype=x.dtype, device=x.device)
    blocks, parts, sequences = -(-channels // CHANNELS), -(-max_query_len // TOKENS), len(state_slots)
    where = cu_seqlens_q, seqlens_k, state_slots, channels, x.stride(0)
    launch(
        _conv_kernel, (blocks, sequences, parts), (x, weight, bias, state, out, *where),
        (taps, silu, TOKENS, CHANNELS, parts == 1), 4, 1,
    )  # fmt: skip
    if parts > 1:
        launch(_state_kernel, (blocks, sequences, 1), (x, state, *where), (taps, CHANNELS), 4, 1)
    return out
