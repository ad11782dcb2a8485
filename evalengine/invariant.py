"""`set_batch_invariant_mode`: the `exact` level's arithmetic under any torch model on CPU, by overriding aten ops.

While it is on, every op of `COVERED_OPS` that gets float32, bf16 or fp16 tensors on the CPU runs the project's exact
kernel and rounds its float32 result to the input's dtype, so that a row's bits no longer depend on how many rows there
are, on the thread count or on the instruction set. float64, integer and complex inputs keep torch's own kernels.

    with set_batch_invariant_mode():
        logits = model(input_ids)

What it does not promise: `bmm` and `baddbmm` depend on what pads K, so attention over a cache padded to another length
may differ (the engine's own paged attention does not). Left to torch: `dot`, `addmv`, `addbmm`, `out=` variants,
`logsumexp`, `layer_norm`, `group_norm`, convolutions, `sum`, `cumsum`, and `gelu` (whose vector body and scalar tail
differ). cos, sin, exp, log, tanh and float32 rsqrt gave equal bits at every length and offset tried, so they need no
override on one machine; across instruction sets they may differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor
from torch.library import Library

from evalengine.kernels import exact
from evalengine.kernels import exact_math as em

_COVERED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MATH_BACKEND = 0  # torch.nn.attention.SDPBackend.MATH


def _covered(*tensors: Tensor) -> bool:
    """Whether the exact kernels take these operands: floats of one covered dtype, none of them empty."""
    dtype = tensors[0].dtype
    return dtype in _COVERED_DTYPES and all(t.dtype == dtype and t.numel() > 0 for t in tensors)


def _stock(overload: Callable[..., Tensor], result: torch.dtype, *args: object, **kwargs: object) -> Tensor:
    """torch's own kernel, by the op's `out=` variant: the plain one would come back to the override."""
    return overload(*args, **kwargs, out=torch.empty(0, dtype=result))


def _float_of(x: Tensor) -> torch.dtype:
    """The dtype torch gives an element-wise float function of x."""
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if not _covered(a, b):
        return _stock(torch.ops.aten.mm.out, a.dtype, a, b)
    return exact.linear(a, exact.quantize_weight(b.t())).to(a.dtype)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if not _covered(a, b):
        return _stock(torch.ops.aten.bmm.out, a.dtype, a, b)
    return exact.bmm(a, b).to(a.dtype)


def _plus_product(bias: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """beta * bias + alpha * product, the product rounded first.

    That is what `F.linear` computes where it takes `matmul` and `add_`, so both its ways give the same bits (which one
    it takes depends on strides, and so on the batch).
    """
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    return product + (bias if beta == 1 else bias * beta)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not _covered(bias, a, b):
        return _stock(torch.ops.aten.addmm.out, a.dtype, bias, a, b, beta=beta, alpha=alpha)
    return _plus_product(bias, _mm(a, b), beta, alpha)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not _covered(bias, a, b):
        return _stock(torch.ops.aten.baddbmm.out, a.dtype, bias, a, b, beta=beta, alpha=alpha)
    return _plus_product(bias, _bmm(a, b), beta, alpha)


def _mv(matrix: Tensor, vector: Tensor) -> Tensor:
    if not _covered(matrix, vector):
        return _stock(torch.ops.aten.mv.out, vector.dtype, matrix, vector)
    return _mm(vector[None], matrix.t())[0]


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if not _covered(x):
        return _stock(torch.ops.aten._softmax.out, x.dtype, x, dim, half_to_float)
    return exact.softmax(x, dim).to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if not _covered(x):
        return _stock(torch.ops.aten._log_softmax.out, x.dtype, x, dim, half_to_float)
    return exact.log_softmax(x, dim).to(x.dtype)


def _mean(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    result = dtype or x.dtype
    if not _covered(x) or result not in _COVERED_DTYPES or x.ndim == 0:
        return _stock(torch.ops.aten.mean.out, result, x, dim, keepdim, dtype=dtype)
    return exact.mean(x, dim or range(x.ndim), keepdim).to(result)


def _silu(x: Tensor) -> Tensor:
    if not _covered(x):
        return _stock(torch.ops.aten.silu.out, _float_of(x), x)
    return exact.silu(x).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    if not _covered(x):
        return _stock(torch.ops.aten.sigmoid.out, _float_of(x), x)
    return exact.elementwise(em.sigmoid, x).to(x.dtype)


def _rsqrt(x: Tensor) -> Tensor:
    if not _covered(x) or x.dtype == torch.float32:  # float32: a square root and a division, both IEEE 754
        return _stock(torch.ops.aten.rsqrt.out, _float_of(x), x)
    return torch.ops.aten.rsqrt.out(x.float(), out=torch.empty(0)).to(x.dtype)


def _fused_sdp_choice(*args: object, **kwargs: object) -> int:
    return _MATH_BACKEND


COVERED_OPS: dict[str, tuple[Callable[..., Tensor | int], str]] = {
    "mm": (_mm, "matmul and F.linear without a bias; left operand in two limbs, right one in one"),
    "addmm": (_addmm, "F.linear with a bias; the product is rounded, then the bias added"),
    "bmm": (_bmm, "matmul, einsum, F.linear on 3-D strided input; same bits as mm, row by row"),
    "baddbmm": (_baddbmm, "bmm, rounded, then added"),
    "mv": (_mv, "matmul with a vector; the vector takes two limbs, as F.linear's input does"),
    "_softmax": (_softmax, "softmax, along any axis up to 2^19 long"),
    "_log_softmax": (_log_softmax, "log_softmax and cross_entropy, along any axis up to 2^19 long"),
    "mean.dim": (_mean, "mean over axes; F.rms_norm and hand-written RMSNorms"),
    "silu": (_silu, "torch's vector body and scalar tail round differently in float32"),
    "sigmoid": (_sigmoid, "likewise"),
    "rsqrt": (_rsqrt, "bf16 and fp16 only, by way of float32: torch's vector body and scalar tail differ there"),
    "_fused_sdp_choice": (_fused_sdp_choice, "scaled_dot_product_attention takes its math path: bmm, _softmax, bmm"),
}
"""aten op -> (CPU kernel, what reaches it and how it is computed)."""

_library: Library | None = None


def _install(enabled: bool) -> None:
    """Puts the overrides in place, or torch's own kernels back. Idempotent."""
    global _library
    if enabled and _library is None:
        library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
            for name, (kernel, _) in COVERED_OPS.items():
                library.impl(name, kernel, "CPU")
        _library = library
    elif not enabled and _library is not None:
        _library._destroy()
        _library = None


def is_batch_invariant_mode() -> bool:
    """Whether the overrides are in place now."""
    return _library is not None


class set_batch_invariant_mode:
    """Turns the mode on (or off) at once, for the whole process, as `torch.set_grad_enabled` does for gradients.

    As a plain call it stays until the next call; as a context manager it restores, on leaving, what was before, also
    after an exception, so calls nest in any way: `set_batch_invariant_mode(False)` inside a `True` turns it off there.
    Meant for inference; under autograd each covered op keeps torch's own gradient formula.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._previous = is_batch_invariant_mode()
        _install(enabled)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _install(self._previous)
