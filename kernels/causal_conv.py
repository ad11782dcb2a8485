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

TOKENS, CHANNELS = 8, 512  # of a tile; a step of one token per sequence has tiles of one


@triton.jit
def _sequence(s, cu_seqlens, seqlens, state_slots):
    """Sequence s -> its slot (-1: padding) and its first token's row, both int64; how many tokens it has in the step,
    and whether these are all of its tokens, so that it begins with zeros, both int32."""
    slot = tl.load(state_slots + s).to(tl.int64)
    first = tl.load(cu_seqlens + s).to(tl.int64)
    n = (tl.load(cu_seqlens + s + 1) - first).to(tl.int32)
    begins = (tl.load(seqlens + s) == n).to(tl.int32)
    return slot, first, n, begins


@triton.jit
def _tile(p, cu_seqlens, sequences, TOKENS: tl.constexpr):
    """Program p of all tiles -> (sequence, tile of its tokens). Sequence s has tiles from s + cu_seqlens[s] // TOKENS
    on: as many as it needs, or one more."""
    low = p * 0
    for level in tl.static_range(3):  # a search of 32 ways, for up to 32,768 sequences
        stride = 1024 >> 5 * level
        if sequences > stride:
            at = low + tl.arange(0, 32) * stride
            real = at < sequences
            first = tl.load(cu_seqlens + at, mask=real, other=0) // TOKENS + at
            low += (tl.sum((real & (first <= p)).to(tl.int32), 0) - 1) * stride
    return low, p - (tl.load(cu_seqlens + low) // TOKENS + low)


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, cu_seqlens, seqlens, state_slots, sequences, channels, stride_x,
    K: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, channels). Each input is read once, and once more by the next tile. The first tile of a
    sequence alone reads its state, and so may write it."""
    device_math.after_previous_kernel()
    s, tile = tl.program_id(0), 0
    if TOKENS > 1:
        s, tile = _tile(tl.program_id(0), cu_seqlens, sequences, TOKENS)
    slot, first, n, begins = _sequence(s, cu_seqlens, seqlens, state_slots)
    start = tile * TOKENS
    if start >= n:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    out_ptr += (first + start) * channels + channel
    if slot < 0:
        for i in tl.static_range(TOKENS):
            tl.store(out_ptr + i * channels, tl.zeros((CHANNELS,), tl.float32), mask=real & (start + i < n))
        return
    own = state_ptr + slot * channels * (K - 1) + channel
    inputs = ()  # [K - 1 + TOKENS] of [CHANNELS], the oldest first
    for i in tl.static_range(K - 1):
        before = tl.load(own + i * channels, mask=real & (tile == 0) & (begins == 0), other=0.0)
        if TOKENS > 1:
            at = first + start - (K - 1) + i
            before = tl.where(tile > 0, tl.load(x_ptr + at * stride_x + channel, mask=real & (tile > 0)), before)
        inputs += (before,)  # type: ignore[assignment]
    for i in tl.static_range(TOKENS):
        at = first + start + i
        inputs += (tl.load(x_ptr + at * stride_x + channel, mask=real & (start + i < n), other=0.0),)  # type: ignore[assignment]
    weights = ()
    for j in tl.static_range(K):
        weights += (tl.load(weight_ptr + channel * K + j, mask=real, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    bias = tl.zeros((CHANNELS,), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + channel, mask=real, other=0.0).to(tl.float32)
    for i in tl.static_range(TOKENS):
        acc = bias
        for j in tl.static_range(K):
            acc = tl.fma(inputs[i + j].to(tl.float32), weights[j], acc)
        out = acc.to(out_ptr.dtype.element_ty)
        if SILU:
            out = activate(out.to(tl.float32), out_ptr.dtype.element_ty, "silu")
        tl.store(out_ptr + i * channels, out, mask=real & (start + i < n))
    if tile == 0:
        _store_state(x_ptr, own, inputs, first, n, channel, channels, real, stride_x, begins, K, TOKENS)


@triton.jit
def _store_state(
    x_ptr, own, inputs, first, n, channel, channels, real, stride_x, begins, K: tl.constexpr, TOKENS: tl.constexpr
):
    """The sequence's last K - 1 inputs become its state; all are read before one is written."""
    last = ()
    for i in tl.static_range(K - 1):
        if TOKENS == 1:
            last += (inputs[i + 1],)  # type: ignore[assignment]
        else:
            at = n - (K - 1) + i  # below 0: of the state
            new = tl.load(x_ptr + (first + at) * stride_x + channel, mask=real & (at >= 0), other=0.0)
            old = tl.load(own + (n + i) * channels, mask=real & (at < 0) & (begins == 0), other=0.0)
            last += (tl.where(at >= 0, new, old),)  # type: ignore[assignment]
    tl.debug_barrier()
    for i in tl.static_range(K - 1):
        tl.store(own + i * channels, last[i], mask=real)


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
    """[T, C] of any row stride, weights [C, K], bias [C] -> [T, C]; the state pool [R, K - 1, C] is brought up to date.

    cu_seqlens_q: int32 [S + 1]; seqlens_k: int32 [S], tokens of each sequence so far, the step's included; state_slots:
    int32 [S], each sequence's slot (-1: padding, whose outputs are 0). Every row belongs to a sequence. A sequence all
    of whose tokens are in this step begins with zeros, whatever its slot holds. max_query_len: the most tokens of a
    sequence.
    """
    channels, taps = weight.shape
    assert x.stride(1) == 1 and state.is_contiguous() and weight.is_contiguous() and 1 < taps <= TOKENS + 1
    out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    tokens, sequences = 1 if max_query_len == 1 else TOKENS, len(state_slots)
    tiles = sequences if tokens == 1 else len(x) // tokens + sequences
    launch(
        _conv_kernel, (tiles, -(-channels // CHANNELS), 1),
        (x, weight, bias, state, out, cu_seqlens_q, seqlens_k, state_slots, sequences, channels, x.stride(0)),
        (taps, silu, tokens, CHANNELS), 8 if tokens == 1 else 4, 1,
    )  # fmt: skip
    return out
