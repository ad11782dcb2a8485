"""Float64 truth for each op, plain and short: what the kernels are tested against, never an engine path.

    T tokens, K input features, N output features, I intermediate size, Hq/Hkv heads, D head_dim.

Inputs of any float dtype, outputs float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., K], [N, K], [N] -> [..., N]."""
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K], [B, K, N] -> [B, M, N]."""
    return torch.bmm(a.double(), b.double())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., H], [H] -> [..., H]."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Any shape, along `dim`."""
    return x.double().log_softmax(dim)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Any shape, along `dim`."""
    return x.double().softmax(dim)


def mean(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Any shape, over `dim`."""
    return x.double().mean(dim, keepdim)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate * gate.sigmoid() * up


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D] and [T, D/2] -> [T, heads, D], half-split pairs."""
    x1, x2 = x.double().chunk(2, -1)
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_lens: list[int],
    kv_lens: list[int],
    scale: float,
) -> Tensor:
    """[T, Hq, D] against [B, block, Hkv, D] pools -> [T, Hq, D], causal, one sequence after another."""
    group = q.shape[1] // k_cache.shape[2]
    outputs = [torch.empty(0, *q.shape[1:], dtype=torch.float64)]
    start = 0
    for pages, queries, length in zip(block_table.long(), query_lens, kv_lens, strict=True):
        k, v = (
            cache[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start : start + queries].double(), k) * scale
        hidden = torch.arange(length) > torch.arange(length - queries, length)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += queries
    return torch.cat(outputs)
