"""The CUDA side of the mode: the `native` Triton kernels. Imported only where there is a CUDA device.

Products are one float32 chain over ascending K (IEEE for float32 operands, whatever `allow_tf32` says), rounded once to
the result's dtype. Row reductions cut a row at absolute columns. So zeros after the end of K, and columns of -inf after
the end of a softmax, change no bit (except the sign of a zero).

Each schedule of a product is compared with the reference schedule before its first use. The engine has `verify` do
this for a model's shapes when it starts; the mode meets its shapes one by one. The first time a schedule is chosen, and
again for each way of running it (masked rows, strides, a bias, ...), the schedule and the reference schedule multiply
random numbers of the operands' shapes. A schedule whose result differs, or that does not run, is dropped, for the
engine too. On a GPU whose small and large tiles take different instructions this keeps the promise. The row kernels
need no comparison: none of their schedules adds numbers in another order.

torch has no kernel of scaled_dot_product_attention: it picks a fused one, or its math path, by shape, mask and device.
While the mode is on, CUDA has one (`kernels.attention_dense`), for the operands that it covers; others take the math
path. Which of the two depends on nothing that a batch changes: dtypes, head_dim, numbers of heads, dropout and scale.
The kernel gives no gradients. Where they are wanted, the result is still the kernel's, and the backward pass computes
the math path again, with torch's own gradients. Forward-mode derivatives and torch.func's transforms take that path.

Layer norms and short sums are torch's formulas over means and element-wise ops, of which each row's result is its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor

from evalengine.invariant.overrides import (
    COVERED_DTYPES,
    Kernel,
    Overrides,
    are_dims,
    aten,
    covered,
    otherwise,
    plus_product,
    refused,
    stock,
)
from evalengine.invariant.table import SHORT_SUM
from evalengine.kernels import log_softmax, matmul, mean, softmax
from evalengine.kernels import matmul as products
from evalengine.kernels.attention_dense import SCALES, dense_attention
from evalengine.kernels.launching.launch import MAX_CACHED_LAUNCHES, operand_key
from evalengine.kernels.limits import HEAD_DIMS
from evalengine.kernels.matmul_device import gpu_of
from evalengine.kernels.torch_private import below_autograd, by_key, current_device, schema_of, transformed
from evalengine.verification.comparisons import MAX_ROWS
from evalengine.verification.verdict import KernelsVerdict

_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)


class CUDAOverrides(Overrides):
    """CUDA's kernels for the covered ops."""

    device = "cuda"

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return multiply(partial(matmul.matmul, out_dtype=dtype), a, b)

    def batched_product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return multiply(partial(matmul.bmm, out_dtype=dtype), a, b)

    def matrix_vector(self, matrix: Tensor, vector: Tensor) -> Tensor:
        # The chain of products over K is the same either way round, and few rows have their own schedules.
        return self._mm(vector[None], matrix.t())[0]

    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return softmax.softmax(x, dim, dtype)

    def log_softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return log_softmax.log_softmax(x, dim, dtype)

    def mean(self, x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
        return mean.mean(x, dims, keepdim, dtype)

    def kernels(self) -> dict[str, Kernel]:
        kernels = super().kernels() | {op: refused(op) for op in _FUSED_ATTENTION if hasattr(aten, op)}
        kernels |= {"scaled_dot_product_attention": attend, **ROWS}
        for op, kernel in (
            ("mm.dtype", self._mm_dtype),
            ("addmm.dtype", self._addmm_dtype),
            ("bmm.dtype", self._bmm_dtype),
            ("baddbmm.dtype", self._baddbmm_dtype),
        ):
            if "dtype" in getattr(aten, op.split(".")[0]).overloads():
                kernels[op] = kernel
        if len(schema_of(aten._fused_rms_norm.default).returns) == 2:  # before torch 2.9 the op is another, for Metal
            kernels["_fused_rms_norm"] = _fused_rms_norm
        return {op: _on_its_device(kernel) for op, kernel in kernels.items()}

    def autograd_kernels(self) -> dict[str, Kernel]:
        return {"scaled_dot_product_attention": attend_with_gradients}

    def _addmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        plain = beta == alpha == 1 and bias.ndim == 1 and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]
        if plain and bias.shape == b.shape[1:] and covered(bias, a, b):
            product = partial(matmul.matmul, round_product=True)  # the kernel's epilogue does what `plus_product` does
            return multiply(product, a, b, bias)
        return super()._addmm(bias, a, b, beta=beta, alpha=alpha)

    def _mm_dtype(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        if not (_widens(a, b, out_dtype) and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]):
            return stock(aten.mm.dtype_out, a, out_dtype, a, b, out_dtype)
        return self.product(a, b, out_dtype)

    def _bmm_dtype(self, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        fits = a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
        if not (_widens(a, b, out_dtype) and fits):
            return stock(aten.bmm.dtype_out, a, out_dtype, a, b, out_dtype)
        return self.batched_product(a, b, out_dtype)

    def _addmm_dtype(
        self, bias: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        return plus_product(bias.to(out_dtype), self._mm_dtype(a, b, out_dtype), beta, alpha)

    def _baddbmm_dtype(
        self, bias: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        return plus_product(bias.to(out_dtype), self._bmm_dtype(a, b, out_dtype), beta, alpha)


def _widens(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    return covered(a, b) and out_dtype in (a.dtype, torch.float32)


def _fused_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """`F.rms_norm` on CUDA: (normed, 1 / rms), by torch's own formula in float32, rounded once at the end.

    normed = x * rsqrt(mean(x^2) + eps) * weight; eps None stands for the accumulation dtype's epsilon.
    """
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    dims = tuple(range(-len(normalized_shape), 0))
    scale = torch.rsqrt((wide * wide).mean(dims, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps))
    normed = wide * scale
    return (normed if weight is None else normed * weight).to(x.dtype), scale


def _on_its_device(kernel: Callable[..., Any]) -> Kernel:
    """Makes the operands' device current while a kernel runs: Triton launches on the current device, torch's own
    kernels on their operands'."""

    @wraps(kernel)
    def launch(first: Tensor, *args: object, **kwargs: object) -> Any:
        if not first.is_cuda or first.get_device() == current_device():
            return kernel(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return kernel(first, *args, **kwargs)

    return launch


logger = logging.getLogger(__name__)

_compared: set[tuple] = set()  # ways (see `_way`) that have been compared
_unproved: set[tuple] = set()  # ways for whose comparison there was no memory: the reference schedule runs instead
_known: set[tuple] = set()  # kinds of operands whose way is compared, so that it is not worked out again


def multiply(product: partial[Tensor], *operands: Tensor) -> Tensor:
    """`product(a, b)` or `product(a, b, bias)` of `kernels.matmul`; on CUDA by a schedule that was compared."""
    return checked(product, *operands) if operands[0].is_cuda else product(*operands)


def checked(product: partial[Tensor], *operands: Tensor) -> Tensor:
    """`product` of the operands by a schedule that was compared, or by the reference schedule where no comparison is
    possible at the moment."""
    a, b, *_ = operands
    options = tuple(product.keywords.values())
    kinds = (*map(operand_key, operands), *options)
    if kinds in _known or 0 in a.shape or 0 in b.shape:
        return product(*operands)
    plain = len(operands) == 2 and not product.keywords.get("round_product")
    schedule = products.schedule_for(a, b, product.keywords.get("out_dtype"), plain)
    way = (*_way(schedule, a, b), len(operands), *options)
    if schedule != products.REFERENCE and way not in _compared:
        capturing = a.is_cuda and torch.cuda.is_current_stream_capturing()  # nothing can be read before the graph runs
        if capturing or way in _unproved:
            return product(*operands, schedule=products.REFERENCE)
        try:
            _compare(product, schedule, operands)
        except torch.OutOfMemoryError:
            logger.warning("no memory to compare the schedule %s: products take the reference schedule", schedule)
            _unproved.add(way)
            return product(*operands, schedule=products.REFERENCE)
        _compared.add(way)
    if len(_known) >= MAX_CACHED_LAUNCHES:
        _known.clear()
    _known.add(kinds)
    return product(*operands)


def _way(schedule: products.MatmulSchedule, a: Tensor, b: Tensor) -> tuple:
    """A key of everything that makes a schedule compile to another kernel, and of whether a persistent kernel loops."""
    device = a.get_device()
    loops = schedule.loops(a.shape[-2], b.shape[-1], gpu_of(device).multiprocessors)
    even_k = a.shape[-1] % schedule.block_k == 0
    k_strides = (a.stride(-1) == 1, b.stride(-2) == 1)
    return (schedule, schedule.masks_rows(a.shape[-2]), loops, even_k, k_strides, a.ndim, a.dtype, device)


def _compare(product: partial[Tensor], schedule: products.MatmulSchedule, operands: tuple[Tensor, ...]) -> None:
    """Compares a schedule with the reference on random numbers: a program's own first operands may well be zeros, which
    prove nothing."""
    a, b, *bias = operands
    rows = min(a.shape[-2], MAX_ROWS)
    if schedule.loops(a.shape[-2], b.shape[-1], gpu_of(a.get_device()).multiprocessors):
        rows = a.shape[-2]
    left, right = a[..., :rows, :], b
    if a.ndim == 3:
        left, right = left[:2], right[:2]
    generator = torch.Generator(a.device).manual_seed(0)
    random = [_random_like(x, generator) for x in (left, right, *bias)]
    where = f"{list(left.shape)} by {list(right.shape)} {a.dtype}, before its first use"
    run = partial(product, *random)
    KernelsVerdict().compare(
        "matmul", schedule, where, partial(run, schedule=schedule), run(schedule=products.REFERENCE)
    )


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Normal random numbers in the shape of x, contiguous along the same dimension, with rows that a tensor descriptor
    can address."""
    across = x.ndim > 1 and x.stride(-1) != 1
    *outer, width = x.mT.shape if across else x.shape
    numbers = torch.randn(*outer, -(-width // 8) * 8, generator=generator, device=x.device, dtype=x.dtype)[..., :width]
    return numbers.mT if across else numbers


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
    middle = mean.mean(wide, dims, True)
    centred = wide - middle
    scale = torch.rsqrt(mean.mean(centred * centred, dims, True) + eps)
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


ROWS: dict[str, Callable[..., Any]] = {"native_layer_norm": _layer_norm, "sum.dim_IntList": _sum}
