"""The `exact` level's layers with a state: convolutions and recurrences in float64, rounded to float32 once a token.

    T tokens, S sequences, R slots of a state pool.

All arithmetic is element by element in a fixed order, and a sum over a dimension is a tree of additions by halves, so
every row's bits depend on that sequence's tokens alone. A state is rounded to float32 after every token: so a step may
end anywhere. Tokens are taken one after another, those at the same place of all sequences together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from evalengine.kernels import exact
from evalengine.kernels import exact_math as em
from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2


def fold(x: Tensor) -> Tensor:
    """float64 [..., n] -> [...]: the sum, by halves: x[i] + x[i + n / 2], until one is left (n padded with zeros)."""
    width = 1 << max(0, x.shape[-1] - 1).bit_length()
    if width > x.shape[-1]:
        x = F.pad(x, (0, width - x.shape[-1]))
    while x.shape[-1] > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x[..., 0]


def softplus(x: Tensor) -> Tensor:
    """float64 log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)); below 2^-12 the log1p is e - e^2 / 2 + e^3 / 3."""
    e = em.exp(x.abs().neg_())
    small = e * (1.0 - e * (0.5 - e * (1.0 / 3.0)))
    return x.clamp(min=0.0) + torch.where(e < 2.0**-12, small, em.log(e + 1.0))


def push_inputs(ring: Tensor, new: Tensor, length: int, taps: int) -> Tensor:
    """Puts a sequence's new inputs [n, C] into its ring [P, C]; returns them behind the K - 1 before, [K - 1 + n, C].

    length: the sequence's tokens so far, the new ones included. Inputs before position 0 are zeros.
    """
    rows, first = len(ring), length - len(new)
    places = torch.arange(first - (taps - 1), first, device=ring.device)
    before = torch.where((places >= 0)[:, None], ring[places % rows], 0.0).to(new.dtype)
    last = new[-rows:]
    ring[torch.arange(length - len(last), length, device=ring.device) % rows] = last.to(ring.dtype)
    return torch.cat([before, new])


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring: Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    slots: Sequence[int],
    *,
    silu: bool,
) -> Tensor:
    """As `kernels.causal_conv`: [T, C] -> float32 [T, C], and the pool of rings [R, P, C] takes the inputs."""
    taps, out = weight.shape[1], torch.empty(x.shape, dtype=torch.float32, device=x.device)
    wide_weight, start = em.widen(weight), 0
    for n, total, slot in zip(query_lens, kv_lens, slots, strict=True):
        wide = em.widen(push_inputs(ring[slot], x[start : start + n], total, taps))
        total_of = wide[:n] * wide_weight[:, 0]
        for j in range(1, taps):
            total_of += wide[j : j + n] * wide_weight[:, j]
        if bias is not None:
            total_of += em.widen(bias)
        em.store_float32(exact.wide_silu(total_of) if silu else total_of, out[start : start + n])
        start += n
    return out


def steps(query_lens: list[int], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """For each place in the step: the sequences that have a token there, and the tokens' rows, both int64."""
    lengths = torch.tensor(query_lens)
    starts = lengths.cumsum(0) - lengths
    for t in range(max(query_lens, default=0)):
        active = (lengths > t).nonzero().flatten()
        yield active.to(device), (starts[active] + t).to(device)


def initial_states(
    state: Tensor, query_lens: list[int], kv_lens: list[int], slots: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The sequences' states, zeros where one begins, and their slots, int64 [S]."""
    at = torch.tensor(slots, device=state.device)
    fresh = torch.tensor([n == total for n, total in zip(query_lens, kv_lens, strict=True)], device=state.device)
    return torch.where(fresh[:, None, None, None], 0.0, state[at]), at


def gated_delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    slots: Sequence[int],
    variant: GatedDelta,
) -> Tensor:
    """As `kernels.gated_delta`: -> float32 [T, Hv, V], and the pool [R, Hv, V, K] is brought up to date."""
    heads, values, keys = variant.state_shape
    size = variant.num_key_heads * keys
    q, k, v = em.widen(mixed).split([size, size, heads * values], -1)
    group = heads // variant.num_key_heads
    q, k = (
        (x * em.rsqrt(fold(x * x) + 1e-6)[..., None]).repeat_interleave(group, 1)
        for x in (y.unflatten(-1, (-1, keys)) for y in (q, k))
    )
    v, q = v.unflatten(-1, (-1, values)), q * keys**-0.5
    g = softplus(em.widen(a) + em.widen(dt_bias)) * -em.exp(em.widen(a_log))
    decay, beta = em.exp(g), em.sigmoid(em.widen(b)) * variant.beta_scale
    out = torch.empty(v.shape, dtype=torch.float32, device=mixed.device)
    states, at = initial_states(state, query_lens, kv_lens, slots)
    for active, rows in steps(query_lens, mixed.device):
        wide, key = em.widen(states[active]) * decay[rows][..., None, None], k[rows][:, :, None]
        delta = (v[rows] - fold(wide * key)) * beta[rows][..., None]
        new = em.round_float32(wide + delta[..., None] * key)
        states[active] = new
        out[rows] = em.round_float32(fold(em.widen(new) * q[rows][:, :, None]))
    state[at] = states
    return out


def mamba2(
    mixed: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    state: Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    slots: Sequence[int],
    variant: Mamba2,
) -> Tensor:
    """As `kernels.mamba2`: -> float32 [T, H, P], and the pool [R, H, P, N] is brought up to date."""
    heads, rows_of, columns = variant.state_shape
    size = variant.num_groups * columns
    x, b, c = em.widen(mixed).split([heads * rows_of, size, size], -1)
    group = heads // variant.num_groups
    x = x.unflatten(-1, (-1, rows_of))
    b, c = (y.unflatten(-1, (-1, columns)).repeat_interleave(group, 1) for y in (b, c))
    step = softplus(em.widen(dt) + em.widen(dt_bias)).clamp(*variant.dt_limits)
    decay = em.exp(step * -em.exp(em.widen(a_log)))
    out = torch.empty(x.shape, dtype=torch.float32, device=mixed.device)
    states, at = initial_states(state, query_lens, kv_lens, slots)
    for active, rows in steps(query_lens, mixed.device):
        wide = em.widen(states[active]) * decay[rows][..., None, None]
        new = em.round_float32(wide + (step[rows][..., None] * x[rows])[..., None] * b[rows][:, :, None])
        states[active] = new
        total = fold(em.widen(new) * c[rows][:, :, None]) + em.widen(d)[:, None] * x[rows]
        out[rows] = em.round_float32(total)
    state[at] = states
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool) -> Tensor:
    """As `kernels.rms_norm.gated_norm`: -> float32 [R, W], rounded once."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    wide_weight = em.widen(weight).repeat(x.shape[1] // len(weight))
    for tile in em.tiles(*x.shape):
        wide, factor = em.widen(x[tile]), exact.wide_silu(em.widen(gate[tile]))
        wide = wide * factor if gate_first else wide
        groups = wide.unflatten(-1, (-1, group))
        mean = em.row_sum_of_squares(groups.clone()) * (1.0 / group)
        normed = (groups * em.rsqrt(mean + eps)).flatten(-2) * wide_weight
        em.store_float32(normed if gate_first else normed * factor, out[tile])
    return out


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Any shape -> float32 x * y."""
    return exact.elementwise(Tensor.mul_, x, y)
