"""scaled_dot_product_attention on CUDA: one kernel, the engine's own arithmetic, in place of torch's choice of four.

torch has no kernel of this op: it picks a fused one, or its math path, by shape, mask and device. While the mode is on,
CUDA has one (`kernels.attention_dense`), for the operands that it covers; others take the math path. Which of the two
depends on nothing that a batch changes: dtypes, head_dim, numbers of heads, dropout and scale.

The kernel gives no gradients. Where they are wanted, the result is still the kernel's, and the backward pass computes
the math path again, with torch's own gradients. Forward-mode derivatives and torch.func's transforms take that path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evalengine.invariant.overrides import COVERED_DTYPES, aten
from evalengine.kernels.attention_dense import SCALES, dense_attention
from evalengine.kernels.limits import HEAD_DIMS
from evalengine.kernels.torch_private import below_autograd, by_key, transformed

_op = aten.scaled_dot_product_attention.default


def attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The device's kernel: torch's arguments, q [..., L, D], k and v [..., S, D]."""
    covered = _covered(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if covered is None:
        return by_math(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    *tensors, mask = covered
    batch = max(map(len, tensors))  # some may have the size 1
    queries, keys, values = (x.expand(batch, -1, -1, -1) for x in tensors)
    out = dense_attention(queries, keys, values, mask, is_causal=is_causal, scale=scale)
    return out if q.ndim == 4 else out.squeeze(_new_dimension(enable_gqa))


def attend_with_gradients(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel above autograd. Operands that no kernel covers take the math path here, which has its gradients."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if transformed() or _covered(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa) is None:
        return by_math(q, k, v, attn_mask, dropout_p, is_causal, **options)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, attn_mask)):
        result: Tensor = _Attention.apply(q, k, v, attn_mask, is_causal, scale, enable_gqa)
        return result
    with below_autograd():  # through the dispatcher, so that `CoverageAudit` sees the op
        return _op(q, k, v, attn_mask, dropout_p, is_causal, **options)


def by_math(*args: Any, **options: Any) -> Tensor:
    """torch's own composite of the op, which takes the math path while the mode is on."""
    result: Tensor = by_key(_op, "CompositeImplicitAutograd", *args, **options)
    return result


def _new_dimension(enable_gqa: bool) -> int:
    """The dimension that three-dimensional operands lack: their first one is the heads if these are grouped, else the
    batch."""
    return 0 if enable_gqa else 1


def _covered(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:  # fmt: skip
    """Views of four dimensions of operands that the kernel covers; None for others, whose errors torch raises."""
    if any(x.is_nested or x.ndim not in (3, 4) or x.ndim != q.ndim for x in (q, k, v)):
        return None
    if mask is not None and (mask.is_nested or mask.ndim > q.ndim):
        return None
    if q.ndim == 3:
        at = _new_dimension(enable_gqa)
        q, k, v = q.unsqueeze(at), k.unsqueeze(at), v.unsqueeze(at)
        mask = mask.unsqueeze(at) if mask is not None and mask.ndim == 3 else mask
    fits = _fits(q, k, v, dropout_p, scale, enable_gqa) and (mask is None or _masks(mask, is_causal, q, k, v))
    return (q, k, v, mask) if fits else None


def _fits(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float | None, enable_gqa: bool) -> bool:
    """Whether the kernel covers q, k and v [B, H, ...]."""
    tensors, (smallest, largest) = (q, k, v), HEAD_DIMS
    if any(x.dtype != q.dtype or x.device != q.device or x.shape[3] != q.shape[3] or 0 in x.shape for x in tensors):
        return False
    if q.dtype not in COVERED_DTYPES or not smallest <= q.shape[3] <= largest or k.shape[1:] != v.shape[1:]:
        return False
    if q.shape[1] % k.shape[1] if enable_gqa else q.shape[1] != k.shape[1]:
        return False
    if dropout_p or (scale is not None and not SCALES[0] <= scale <= SCALES[1]):
        return False
    return len({*map(len, tensors)} - {1}) <= 1


def _masks(mask: Tensor, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel covers the mask of q, k and v [B, H, ...]."""
    whole = (max(map(len, (q, k, v))), *q.shape[1:3], k.shape[2])[4 - mask.ndim :]
    broadcasts = all(size in (1, full) for size, full in zip(mask.shape, whole, strict=True))
    kinds = (torch.bool, torch.float32, q.dtype)
    return not is_causal and broadcasts and mask.dtype in kinds and mask.device == q.device


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
        create_graph = torch.is_grad_enabled()  # whether gradients of these gradients are wanted
        with torch.enable_grad():
            tensors = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
            if not create_graph:
                tensors = [None if x is None else x.detach() for x in tensors]
                for x, of_x in zip(tensors, wanted, strict=True):
                    if x is not None and of_x:
                        x.requires_grad_()
            out = by_math(*tensors, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        leaves = [x for x, of_x in zip(tensors, wanted, strict=True) if x is not None and of_x]
        found = iter(torch.autograd.grad(out, leaves, gradients, create_graph=create_graph))
        return (*(next(found) if of_x else None for of_x in wanted), None, None, None)
