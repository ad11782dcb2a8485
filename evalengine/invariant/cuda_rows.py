"""The CUDA side of layer norms and of short sums: torch's formulas over means and element-wise ops, of which each row's
result is its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from evalengine.invariant.overrides import are_dims, aten, covered, otherwise, stock
from evalengine.invariant.table import SHORT_SUM
from evalengine.kernels.mean import mean


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) * rsqrt(mean((x - mean)^2) + eps) * weight + bias in float32, rounded once; the mean, the rsqrt."""
    shape = tuple(shape)
    parameters = [p for p in (weight, bias) if p is not None]
    fits = bool(shape) and x.shape[-len(shape) :] == shape and all(p.shape == shape for p in parameters)
    alike = all(p.dtype in (x.dtype, torch.float32) and p.device == x.device for p in parameters)
    if not (fits and alike and covered(x)):
        return otherwise(aten.native_layer_norm.default, x, shape, weight, bias, eps)
    wide, dims = x.float(), tuple(range(-len(shape), 0))
    middle = mean(wide, dims, True)
    centred = wide - middle
    scale = torch.rsqrt(mean(centred * centred, dims, True) + eps)
    out = centred * scale
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype), middle, scale


def _sum(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """A sum of up to `SHORT_SUM` terms, such as a mixture's weights: one float32 chain over the axes, rounded once."""
    result, dims = dtype or x.dtype, tuple(dim or ())
    short = bool(dims) and are_dims(dims, x.ndim) and 0 < prod(x.shape[axis] for axis in dims) <= SHORT_SUM
    if not (short and covered(x) and result in (x.dtype, torch.float32)):
        return stock(aten.sum.IntList_out, x, result, x, dim, keepdim, dtype=dtype)
    axes = sorted(axis % x.ndim for axis in dims)
    first, *others = x.movedim(axes, list(range(len(axes)))).flatten(0, len(axes) - 1).unbind(0)
    total = first.float()
    for other in others:
        total = total + other
    for axis in axes if keepdim else []:
        total = total.unsqueeze(axis)
    return total.to(result)


KERNELS: dict[str, Callable[..., Any]] = {"native_layer_norm": _layer_norm, "sum.dim_IntList": _sum}
