"""The recurrences of `reference`, in float64 by chunks: another way to the same numbers, for tests of the kernels.

    n tokens, C of a chunk, H heads, S a state [H, rows, columns], L_ij = exp(sum of g from j + 1 to i) for j <= i.

Within a chunk everything is a product of matrices; the state goes from chunk to chunk. Prefills of other engines take
this form, and their bits depend on where chunks begin; the kernels here take `reference`'s, token after token.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    beta_scale: float = 1.0, chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `reference.gated_delta`, by the UT transform (Yang et al. 2024, arXiv 2412.06464, section 3.3).

    What token i adds to the state is u_i k_i^T, u_i = beta_i (v_i - exp(g_i) S_(i-1) k_i). So U solves the unit lower
    triangular (I + A) U = beta (V - exp(G) K S^T), A_ij = beta_i L_ij k_i k_j for j < i, G_i = g_1 + .. + g_i;
    o = (exp(G) Q S^T + (L * Q K^T) U) K^-0.5; the chunk's end has S = exp(G_C) S + sum_j L_Cj u_j k_j^T.
    """
    q, k, v, a, b, state = (x.double() for x in (q, k, v, a, b, state))
    group, scale = v.shape[1] // q.shape[1], k.shape[-1] ** -0.5
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(group, 1) for x in (q, k))
    g = -a_log.double().exp() * torch.nn.functional.softplus(a + dt_bias.double())
    beta, outputs = beta_scale * b.sigmoid(), []
    for i in range(0, len(v), chunk):
        keys, queries, values = (x[i : i + chunk].transpose(0, 1) for x in (k, q, v))  # [H, C, ..]
        total, decays = _decays(g[i : i + chunk])
        own = beta[i : i + chunk].t()[..., None]  # [H, C, 1]
        lower = (own * decays * (keys @ keys.mT)).tril(-1)
        right = own * (values - total.exp()[..., None] * (keys @ state.mT))
        added = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        out = total.exp()[..., None] * (queries @ state.mT) + (decays * (queries @ keys.mT)) @ added
        outputs.append(out.transpose(0, 1) * scale)
        state = total[:, -1, None, None].exp() * state + (decays[:, -1, :, None] * added).mT @ keys
    return torch.cat(outputs), state


def mamba2(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, state: Tensor,
    dt_limits: tuple[float, float | None], chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `reference.mamba2`, by state space duality (Dao and Gu 2024, arXiv 2405.21060, section 6).

    With g = -dt exp(a_log) and G as above: y = exp(G) C S^T + (L * C B^T) (dt x) + d x; S = exp(G_C) S
    + sum_j L_Cj dt_j x_j b_j^T.
    """
    x, b, c, state = x.double(), b.double(), c.double(), state.double()
    group = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
    dt = torch.nn.functional.softplus(dt.double() + dt_bias.double()).clamp(*dt_limits)
    g, added, outputs = -dt * a_log.double().exp(), dt[..., None] * x, []
    for i in range(0, len(x), chunk):
        inputs, columns, reads = (y[i : i + chunk].transpose(0, 1) for y in (added, b, c))  # [H, C, ..]
        total, decays = _decays(g[i : i + chunk])
        out = total.exp()[..., None] * (reads @ state.mT) + (decays * (reads @ columns.mT)) @ inputs
        outputs.append(out.transpose(0, 1))
        state = total[:, -1, None, None].exp() * state + (decays[:, -1, :, None] * inputs).mT @ columns
    return torch.cat(outputs) + d.double()[:, None] * x, state


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of each token's decay [C, H] -> G [H, C], and L [H, C, C], zero above the diagonal."""
    total = g.t().cumsum(-1)
    differences = total[..., :, None] - total[..., None, :]
    return total, differences.tril().exp().tril()
