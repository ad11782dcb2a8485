"""The `exact` level's row-wise ops that some families have instead of Llama's, or in addition to them.

    H hidden size, T tokens, I intermediate size.

As in `exact`: float64 arithmetic of `exact_math`, sums of integers, one rounding to float32; a row's bits depend on
that row alone, and tiles are schedule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels import exact, exact_aten_rows, exact_mixture
from evalengine.kernels import exact_math as em
from evalengine.kernels.row_variants import Xielu


def relu2(x: Tensor) -> Tensor:
    """float64 max(x, 0)^2, in place."""
    return x.clamp_(min=0.0).square_()


_ACTIVATIONS = {
    "silu": exact.wide_silu,
    "gelu": exact_aten_rows.gelu,
    "gelu_tanh": exact_aten_rows.gelu_tanh,
    "relu2": relu2,
}


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """[..., H] -> float32 [..., H]: d * rsqrt(mean(d^2) + eps) * weight + bias, d = x - mean(x).

    weight, bias: [H], or [G, H] for x [..., G, H], of which row [..., g, :] takes their row g.

    The numbers are summed on the grid of 2^(e-44), the squares of their deviations, rounded to float64, on that of
    2^(2e-44), e the exponent of the row's largest magnitude, or deviation. A row with an infinity or a NaN becomes NaN.
    """
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    out = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    wide_weight, wide_bias = em.widen(weight), None if bias is None else em.widen(bias)
    heads = torch.arange(len(rows), device=x.device) % len(weight) if weight.ndim == 2 else None
    for tile in em.tiles(*rows.shape):
        wide = em.widen(rows[tile])
        mean = em.row_sum(wide.clone(), em.grid(em.row_absmax(wide), em.SUM_BITS)).mul_(1.0 / hidden)
        mean_square = em.row_sum_of_squares(wide.sub_(mean)).mul_(1.0 / hidden)
        wide.mul_(em.rsqrt(mean_square.add_(eps))).mul_(wide_weight if heads is None else wide_weight[heads[tile]])
        if wide_bias is not None:
            wide.add_(wide_bias if heads is None else wide_bias[heads[tile]])
        em.store_float32(wide, out[tile])
    return out.view(x.shape)


def fp8_rows(x: Tensor, group: int | None, factor: float | None = None, power: bool = False) -> Tensor:
    """[..., K] -> float32 [..., K]: each number as the nearest e4m3 number times a scale; see `kernels.fp8_rows`.

    s = max(float32(m float64(1 / 448)), 2^-126), if `power` the power of two that is not less, or `factor`;
    t = float32(x times the reciprocal of s), within -448 and 448; the nearest e4m3 number, equals to the even one; its
    product with s, rounded to float32. A group with an infinity or a NaN becomes NaN.
    """
    k = x.shape[-1]
    size = k if group is None else min(group, k)
    rows = torch.nn.functional.pad(x.reshape(-1, k), (0, -k % size))
    groups = rows.view(len(rows), rows.shape[1] // size, size)
    out = torch.empty(groups.shape, dtype=torch.float32, device=x.device)
    for tile in em.tiles(len(groups), rows.shape[1]):
        wide = em.widen(groups[tile])
        if factor is None:
            s = em.widen(em.round_float32(em.row_absmax(wide).mul_(1.0 / 448))).clamp_(min=2.0**-126)
        else:
            s = torch.full_like(wide[..., :1], factor)
        odd = ~(s < torch.inf)
        if power:
            below = em.pow2(em.exponent(s) - 1)
            s = torch.where(below < s, below * 2, below)
        s.masked_fill_(odd, torch.nan)
        wide.masked_fill_(em.magnitude(wide) == torch.inf, torch.nan)
        t = em.widen(em.round_float32(wide.mul_(em.reciprocal(s)))).clamp_(-448.0, 448.0)
        large = em.pow2(em.exponent(em.magnitude(t)).clamp_(min=-5) + 48).mul_(1.5)  # 1.5 * 2^52 steps
        em.store_float32(t.add_(large).sub_(large).mul_(s), out[tile])
    return out.view(rows.shape)[:, :k].reshape(x.shape)


def scale(x: Tensor, factor: float) -> Tensor:
    """Any shape -> float32 x * factor."""
    return exact.elementwise(lambda v: v.mul_(factor), x)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Any shape -> float32 cap * tanh(logits / cap), the quotient by a product with float64(1 / cap)."""
    return exact.elementwise(lambda v: em.tanh(v.mul_(1.0 / cap)).mul_(cap), logits)


def activation(x: Tensor, kind: str, *, gated: bool) -> Tensor:
    """[T, 2 I] -> float32 [T, I], kind(first half) * second half, if gated; else any shape -> kind(x).

    kind: "silu", "gelu" (by erfc), "gelu_tanh" or "relu2"; "clamped_swiglu", always gated. One rounding.
    """
    if kind == "clamped_swiglu":
        return exact_mixture.clamped_swiglu(x)
    function = _ACTIVATIONS[kind]
    return exact.gated(function, x) if gated else exact.elementwise(function, x)


def xielu(x: Tensor, numbers: Xielu) -> Tensor:
    """Any shape -> float32 alpha_p x^2 + beta x for x > 0, else alpha_n (e^min(x, eps) - 1 - x) + beta x."""

    def wide_xielu(v: Tensor) -> Tensor:
        low = v.clamp(max=numbers.eps)
        curve = _exp_less_line(low).add_(low.sub_(v))
        return torch.where(v > 0, v * v * numbers.alpha_p, curve.mul_(numbers.alpha_n)).add_(v.mul_(numbers.beta))

    return exact.elementwise(wide_xielu, x)


def _exp_less_line(x: Tensor) -> Tensor:
    """e^x - 1 - x for x <= 1, float64, relative error below 1e-13: by its series, and below -1 by (e^(x / 64))^64.

    `exact_math.exp` is too coarse: beta x cancels most of this where xIELU is near 0.
    """

    def series(t: Tensor) -> Tensor:
        total = torch.ones_like(t)
        for k in range(20, 2, -1):
            total.mul_(t).mul_(1.0 / k).add_(1.0)
        return total.mul_(t).mul_(t).mul_(0.5)

    root = x.clamp(min=-64.0).mul_(1.0 / 64)
    power = series(root).add_(root).add_(1.0)
    for _ in range(6):
        power.square_()
    return torch.where(x > -1.0, series(x), power.sub_(1.0).sub_(x))
