"""A depthwise causal convolution over ragged sequences, whose state is a ring of each sequence's last inputs.

    T tokens, S sequences, C channels, K taps, R slots of the pool, P rows of a ring (`recurrent_variant.ring_rows`).

An output is one chain of fused multiply-adds over the K taps, the oldest input first, starting with the bias, rounded
to the model's dtype; then SiLU in float32, rounded. So it depends on K inputs and nothing else, and how many tokens of
a sequence a step has changes no bit.

The input of position p is in row p % P of its sequence's ring. A step reads the K - 1 inputs before its first token,
and zeros for positions below 0. A short step, of at most P - K + 1 tokens, writes its inputs to rows that it does not
read: it may run again, its last tokens may be dropped, and its tiles need no order. A longer one leaves its last K - 1
inputs, which may fall on rows that it reads: its first tile, the only one that reads them, writes them afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.activation import activate
from evalengine.kernels.launching.launch import launch

CHANNELS, WARPS = 512, 4
TOKENS, ROWS = 32, 8  # of a tile; ROWS of them are loaded while those before them are computed


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
def _load_weights(weight_ptr, bias_ptr, channel, real, channel_stride, tap_stride, K: tl.constexpr):
    """float32: each tap's weights, and the bias or zeros, all [channels]."""
    weights = ()
    for j in tl.static_range(K):
        at = weight_ptr + channel * channel_stride + j * tap_stride
        weights += (tl.load(at, mask=real, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    bias = tl.zeros(channel.shape, tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + channel, mask=real, other=0.0).to(tl.float32)
    return weights, bias


@triton.jit
def _load_rows(x_ptr, stride: tl.constexpr, real, n, ROWS: tl.constexpr):
    """[ROWS] of [channels], of which the first n are read."""
    rows = ()
    for i in tl.static_range(ROWS):
        rows += (tl.load(x_ptr + i * stride, mask=real & (i < n), other=0.0),)  # type: ignore[assignment]
    return rows


@triton.jit
def _wide(rows):
    """Each as float32."""
    result = ()
    for i in tl.static_range(len(rows)):
        result += (rows[i].to(tl.float32),)
    return result


@triton.jit
def _output(acc, dtype: tl.constexpr, SILU: tl.constexpr):
    return activate(device_math.rounded(acc, dtype), dtype, "silu") if SILU else acc.to(dtype)


@triton.jit
def _conv_decode_kernel(
    x_ptr, weight_ptr, bias_ptr, ring_ptr, out_ptr, cu_seqlens, seqlens, state_slots,
    stride_x: tl.constexpr, channel_stride: tl.constexpr, tap_stride: tl.constexpr, channels: tl.constexpr,
    K: tl.constexpr, SILU: tl.constexpr, P: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (sequence of one token, or none; channels)."""
    device_math.after_previous_kernel()
    s, channel = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels if channels % CHANNELS else channel >= 0
    token, slot = tl.load(cu_seqlens + s).to(tl.int64), tl.load(state_slots + s).to(tl.int64)
    if tl.load(cu_seqlens + s + 1) == token:
        return
    out_ptr += token * channels + channel
    if slot < 0:
        tl.store(out_ptr, tl.zeros((CHANNELS,), tl.float32), mask=real)
        return
    position, own = tl.load(seqlens + s) - 1, ring_ptr + slot * P * channels + channel
    inputs = ()  # [K] of [CHANNELS], the oldest first
    for j in tl.static_range(K - 1):
        at = position - (K - 1) + j
        inputs += (tl.load(own + (at & (P - 1)) * channels, mask=real & (at >= 0), other=0.0),)  # type: ignore[assignment]
    inputs += (tl.load(x_ptr + token * stride_x + channel, mask=real, other=0.0),)  # type: ignore[assignment]
    weights, acc = _load_weights(weight_ptr, bias_ptr, channel, real, channel_stride, tap_stride, K)
    for j in tl.static_range(K):
        acc = tl.fma(inputs[j].to(tl.float32), weights[j], acc)
    tl.store(out_ptr, _output(acc, out_ptr.dtype.element_ty, SILU), mask=real)
    tl.store(own + (position & (P - 1)) * channels, inputs[K - 1], mask=real)


@triton.jit
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, ring_ptr, out_ptr, cu_seqlens, seqlens, state_slots, start_slots,
    sequences, stride_x: tl.constexpr, channel_stride: tl.constexpr, tap_stride: tl.constexpr, channels: tl.constexpr,
    K: tl.constexpr, SILU: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, channels). Each input is read once, and K - 1 of a tile once more by the next one."""
    device_math.after_previous_kernel()
    s, tile = _tile(tl.program_id(0), cu_seqlens, sequences, TOKENS)
    slot, start_slot = tl.load(state_slots + s).to(tl.int64), tl.load(start_slots + s).to(tl.int64)
    first = tl.load(cu_seqlens + s).to(tl.int64)
    n = (tl.load(cu_seqlens + s + 1) - first).to(tl.int32)
    length = tl.load(seqlens + s)
    start = tile * TOKENS
    if start >= n:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels if channels % CHANNELS else channel >= 0
    own_x = x_ptr + first * stride_x + channel
    x_ptr = own_x + start.to(tl.int64) * stride_x
    out_ptr += (first + start) * channels + channel
    position, end = length - n + start, tl.minimum(n - start, TOKENS)  # of the tile's first token; its tokens
    if slot < 0:
        for i in range(end):
            tl.store(out_ptr + i * channels, tl.zeros((CHANNELS,), tl.float32), mask=real)
        return
    own = ring_ptr + slot * P * channels + channel
    before = ()  # [K - 1] of [CHANNELS], the oldest first
    for i in tl.static_range(K - 1):
        one = tl.load(x_ptr + (i - (K - 1)) * stride_x, mask=real & (tile > 0), other=0.0)
        if tile == 0:
            at = position - (K - 1) + i
            start_at = ring_ptr + (start_slot * P + (at & (P - 1))) * channels + channel
            one = tl.load(start_at, mask=real & (at >= 0), other=0.0)
        before += (one,)  # type: ignore[assignment]
    rows = _load_rows(x_ptr, stride_x, real, end, ROWS)
    weights, bias = _load_weights(weight_ptr, bias_ptr, channel, real, channel_stride, tap_stride, K)
    inputs = _wide(before) + _wide(rows)
    for _ in range((end + ROWS - 1) // ROWS):
        x_ptr += ROWS * stride_x
        following = _load_rows(x_ptr, stride_x, real, end - ROWS, ROWS)
        for i in tl.static_range(ROWS):
            acc = bias
            for j in tl.static_range(K):
                acc = tl.fma(inputs[i + j], weights[j], acc)
            tl.store(out_ptr + i * channels, _output(acc, out_ptr.dtype.element_ty, SILU), mask=real & (i < end))
        if n <= P - K + 1:
            for i in tl.static_range(ROWS):
                tl.store(own + ((position + i) & (P - 1)) * channels, inputs[K - 1 + i], mask=real & (i < end))
        out_ptr += ROWS * channels
        position += ROWS
        end -= ROWS
        inputs = inputs[ROWS:] + _wide(following)
    if tile == 0 and n > P - K + 1:
        tl.debug_barrier()  # all that the tile reads of the ring is read
        for i in tl.static_range(K - 1):
            at = n - (K - 1) + i
            last = tl.load(own_x + at.to(tl.int64) * stride_x, mask=real, other=0.0)
            tl.store(own + ((length - n + at) & (P - 1)) * channels, last, mask=real)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    state_slots: Tensor,
    max_query_len: int,
    start_slots: Tensor | None = None,
    *,
    silu: bool,
) -> Tensor:
    """[T, C] of any row stride, weights [C, K], bias [C] -> [T, C]; the pool of rings [R, P, C] takes the inputs.

    Weights of any strides; those of a tap are loaded fastest if they are contiguous. cu_seqlens_q: int32 [S + 1];
    seqlens_k: int32 [S], tokens of each sequence so far, the step's included; state_slots: int32 [S], each sequence's
    slot (-1: padding, whose outputs are 0). Every row belongs to a sequence. max_query_len: the most tokens of a
    sequence. start_slots: int32 [S], where the inputs before the step are (None: in each sequence's slot); not used
    where all sequences have one token.
    """
    (channels, taps), rows = weight.shape, ring.shape[1]
    assert x.stride(1) == 1 and ring.is_contiguous() and ring.dtype == x.dtype
    assert 1 < taps <= TOKENS + 1 and rows >= 2 * taps and rows & (rows - 1) == 0
    out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    sequences, programs = len(state_slots), -(-channels // CHANNELS)
    operands = x, weight, bias, ring, out, cu_seqlens_q, seqlens_k, state_slots
    fixed = x.stride(0), *weight.stride(), channels, taps, silu, rows
    if max_query_len == 1:
        launch(_conv_decode_kernel, (sequences, programs, 1), operands, (*fixed, CHANNELS), WARPS, 1)
    else:
        grid = len(x) // TOKENS + sequences, programs, 1
        starts = state_slots if start_slots is None else start_slots
        launch(_conv_kernel, grid, (*operands, starts, sequences), (*fixed, TOKENS, ROWS, CHANNELS), WARPS, 1)
    return out
