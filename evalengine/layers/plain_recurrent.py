"""Recurrences and their convolutions in plain torch: what a level computes that has no form of its own, as `fast`.

Shapes and states are those of `kernels.causal_conv`, `gated_delta`, `mamba2` and `gated_norm`. Products and rounding
are those of transformers' eager code where it computes token by token, in float32 or the activations' wider dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.kernels.exact_recurrent import initial_states, steps
from evalengine.kernels.recurrent_variant import DeltaInputs, GatedDelta, Mamba2, Mamba2Inputs
from evalengine.layers.metadata import AttentionMetadata


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, step: AttentionMetadata, *, silu: bool
) -> Tensor:
    taps, outputs, start = weight.shape[1], [x[:0]], 0
    for n, total, slot in zip(step.query_lens, step.kv_lens, step.slots, strict=True):
        before = torch.zeros_like(state[slot]) if n == total else state[slot]
        whole = torch.cat([before.to(x.dtype), x[start : start + n]])
        out = F.conv1d(whole.t()[None], weight[:, None].to(x.dtype), bias, groups=len(weight))[0].t()
        outputs.append(F.silu(out) if silu else out)
        state[slot] = whole[len(whole) - (taps - 1) :].to(state.dtype)
        start += n
    return torch.cat(outputs)


def gated_delta(inputs: DeltaInputs, state: Tensor, step: AttentionMetadata, variant: GatedDelta) -> Tensor:
    mixed, a, b, a_log, dt_bias = inputs
    heads, values, keys = variant.state_shape
    wide = torch.promote_types(mixed.dtype, torch.float32)
    size = variant.num_key_heads * keys
    q, k, v = mixed.to(wide).split([size, size, heads * values], -1)
    q, k = (x.unflatten(-1, (-1, keys)) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(heads // variant.num_key_heads, 1) for x in (q, k))
    v, q = v.unflatten(-1, (-1, values)), q / keys**0.5
    decay = (-a_log.exp() * F.softplus(a.to(wide) + dt_bias)).exp()
    beta, out = b.sigmoid().to(wide) * variant.beta_scale, torch.empty_like(v)
    states, at = initial_states(state, step.query_lens, step.kv_lens, step.slots)
    states = states.to(wide)
    for active, rows in steps(step.query_lens, mixed.device):
        own, key = states[active] * decay[rows][..., None, None], k[rows][:, :, None]
        delta = (v[rows] - (own * key).sum(-1)) * beta[rows][..., None]
        own = own + delta[..., None] * key
        states[active] = own
        out[rows] = (own * q[rows][:, :, None]).sum(-1)
    state[at] = states.to(state.dtype)
    return out.to(mixed.dtype)


def mamba2(inputs: Mamba2Inputs, state: Tensor, step: AttentionMetadata, variant: Mamba2) -> Tensor:
    mixed, dt, a_log, dt_bias, d = inputs
    heads, width, columns = variant.state_shape
    wide = torch.promote_types(mixed.dtype, torch.float32)
    size = variant.num_groups * columns
    x, b, c = mixed.to(wide).split([heads * width, size, size], -1)
    x = x.unflatten(-1, (-1, width))
    b, c = (y.unflatten(-1, (-1, columns)).repeat_interleave(heads // variant.num_groups, 1) for y in (b, c))
    time = F.softplus(dt.to(wide) + dt_bias).clamp(*variant.dt_limits)
    decay, out = (time * -a_log.exp()).exp(), torch.empty_like(x)
    states, at = initial_states(state, step.query_lens, step.kv_lens, step.slots)
    states = states.to(wide)
    for active, rows in steps(step.query_lens, mixed.device):
        own = states[active] * decay[rows][..., None, None]
        own = own + (time[rows][..., None] * x[rows])[..., None] * b[rows][:, :, None]
        states[active] = own
        out[rows] = (own * c[rows][:, :, None]).sum(-1) + d[:, None] * x[rows]
    state[at] = states.to(state.dtype)
    return out.to(mixed.dtype)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool, rounded_once: bool
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    own, factor = x.to(wide), F.silu(gate.to(wide))
    own = own * factor if gate_first else own
    groups = own.unflatten(-1, (-1, group))
    normed = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    out = weight.repeat(x.shape[1] // len(weight)) * (normed if rounded_once else normed.to(x.dtype))
    return (out if gate_first else out * factor).to(x.dtype)
