"""scaled_dot_product_attention on CUDA: one kernel, the engine's own arithmetic, in place of torch's choice of four.

torch has no kernel of this op: it picks a fused one, or its math path, by shape, mask and device. While the mode is on,
CUDA has one (`kernels.attention_dense`), for the operands that it covers; others take the math path. Which of the two
depends on nothing that a batch changes: dtypes, head_dim, dropout and scale.

The kernel gives no gradients. Where they are wanted, the result is still the kernel's, and the backward pass computes
the math path again, with torch's own gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from evalengine.invariant.overrides import COVERED_DTYPES, aten
from evalengine.kernels.attention_dense import dense_attention
from evalengine.kernels.limits import HEAD_DIMS

_op = aten.scaled_dot_product_attention.default


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The device's kernel: torch's arguments, [..., H, L, D] and so on."""
    if not _fits(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        return by_math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if q.ndim == 4:
        return dense_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)
    return dense_attention(q[None], k[None], v[None], attn_mask, is_causal=is_causal, scale=scale)[0]


def attend_with_gradients(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    """The kernel above autograd. Operands that no kernel covers take the math path here, which has its gradients."""
    names = ("attn_mask", "dropout_p", "is_causal")
    chosen = dict(zip(names, (None, 0.0, False), strict=True)) | dict(zip(names, args, strict=False)) | options
    scale, enable_gqa = chosen.get("scale"), chosen.get("enable_gqa", False)
    mask, dropout_p, is_causal = (chosen[name] for name in names)
    if not _fits(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa):
        return by_math(q, k, v, *args, **options)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mask)):
        result: Tensor = _Attention.apply(q, k, v, mask, is_causal, scale, enable_gqa)
        return result
    with torch._C._AutoDispatchBelowAutograd():  # through the dispatcher, so that `CoverageAudit` sees the op
        return _op(q, k, v, *args, **options)


def by_math(*args: Any, **options: Any) -> Tensor:
    """torch's own composite of the op, which takes the math path while the mode is on."""
    result: Tensor = _op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **options)
    return result


def _fits(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> bool:  # fmt: skip
    """Whether the kernel covers the operands; torch raises the errors of those that fit nowhere."""
    if q.is_nested or k.is_nested or v.is_nested or q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        return False
    smallest, largest = HEAD_DIMS
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and k.shape == v.shape
    if not alike or q.dtype not in COVERED_DTYPES or q.shape[-1] != k.shape[-1] or 0 in q.shape or 0 in k.shape:
        return False
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if q.shape[:-3] != k.shape[:-3] or (heads % kv_heads if enable_gqa else heads != kv_heads):
        return False
    if not smallest <= q.shape[-1] <= largest or dropout_p or (scale is not None and not 0 < scale < math.inf):
        return False
    if mask is None:
        return True
    places = (*q.shape[:-1], k.shape[-2])
    broadcasts = mask.ndim <= len(places) and all(
        size in (1, whole) for size, whole in zip(mask.shape[::-1], places[::-1], strict=False)
    )
    kinds = (torch.bool, torch.float32, q.dtype)
    return not is_causal and broadcasts and mask.dtype in kinds and mask.device == q.device and not mask.is_nested


class _Attention(torch.autograd.Function):
    """The kernel's result, and the math path's gradients."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
    ) -> Tensor:
        return _op(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.options = inputs[4:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        is_causal, scale, enable_gqa = ctx.options
        wanted = ctx.needs_input_grad[:4]
        saved = zip(ctx.saved_tensors, wanted, strict=True)
        tensors = [None if x is None else x.detach().requires_grad_(w) for x, w in saved]
        with torch.enable_grad():
            out = by_math(*tensors, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        leaves = [x for x in tensors if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(out, leaves, gradients))
        return (*(next(found) if w else None for w in wanted), None, None, None)
