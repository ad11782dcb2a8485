"""Builds aten kernels from five reductions, which a device supplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.kernels.torch_private import by_key

aten = torch.ops.aten
COVERED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Kernel = Callable[..., Any]


def covered(*tensors: Tensor) -> bool:
    """Whether our kernels take these operands: one device, one covered float dtype, none of them empty."""
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in COVERED_DTYPES:
        return False
    for tensor in tensors:  # noqa: SIM110  # a generator takes the host three times as long, in each of a model's products
        if tensor.dtype != dtype or tensor.device != device or not tensor.numel():
            return False
    return True


def stock(overload: Kernel, like: Tensor, dtype: torch.dtype, /, *args: object, **kwargs: object) -> Tensor:
    """The result of torch's own kernel, by the op's `out=` variant: the plain variant would call the override again."""
    return overload(*args, **kwargs, out=torch.empty(0, dtype=dtype, device=like.device))


def otherwise(overload: Any, /, *args: object) -> Any:
    """The result of torch's composite kernel, for an op whose `out=` variant would call the override again."""
    return by_key(overload, "CompositeExplicitAutograd", *args)


def refused(op: str) -> Kernel:
    """A kernel that raises `ConfigError`, for a fused attention: its split of the KV range depends on the batch."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(
            f"aten::{op} is not batch-invariant: inside set_batch_invariant_mode() call scaled_dot_product_attention, "
            "for which the mode selects a kernel or the math path; remove sdpa_kernel(...), "
            "enable_flash_sdp(True) and the like from inside it"
        )

    return refuse


class Overrides(ABC):
    """One device's kernels for the covered ops, with the aten ops' own shapes and errors.

    Operands that `covered` refuses, and shapes that do not fit, go to torch's own kernel, which may raise an error.
    """

    device: str  # the dispatch key, in torch.device's spelling

    @abstractmethod
    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """[M, K] by [K, N] -> [M, N], rounded once to `dtype`."""

    @abstractmethod
    def batched_product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, M, K] by [B, K, N] -> [B, M, N], rounded once to `dtype`."""

    def matrix_vector(self, matrix: Tensor, vector: Tensor) -> Tensor:
        """[M, K] by [K] -> [M], the product with a column: `matmul` takes `mv` or `bmm` by strides and gradients."""
        return self._mm(matrix, vector[:, None])[:, 0]

    @abstractmethod
    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def log_softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def mean(self, x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor: ...

    def kernels(self) -> dict[str, Kernel]:
        """aten op -> the kernel to register for this device."""
        return {
            "mm": self._mm,
            "addmm": self._addmm,
            "addmm_": self._addmm_,
            "bmm": self._bmm,
            "baddbmm": self._baddbmm,
            "baddbmm_": self._baddbmm_,
            "mv": self._mv,
            "addmv": self._addmv,
            "_softmax": self._softmax,
            "_safe_softmax": self._safe_softmax,
            "_log_softmax": self._log_softmax,
            "mean": self._mean_of_all,
            "mean.dim": self._mean_dim,
            **({"_grouped_mm": self._grouped_mm} if hasattr(aten, "_grouped_mm") else {}),
        }

    def autograd_kernels(self) -> dict[str, Kernel]:
        """aten op -> the kernel to register above autograd, for an op that torch has no gradient formula of."""
        return {}

    def _mm(self, a: Tensor, b: Tensor) -> Tensor:
        if not (covered(a, b) and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]):
            return stock(aten.mm.out, a, a.dtype, a, b)
        return self.product(a, b, a.dtype)

    def _bmm(self, a: Tensor, b: Tensor) -> Tensor:
        fits = a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
        if not (covered(a, b) and fits):
            return stock(aten.bmm.out, a, a.dtype, a, b)
        return self.batched_product(a, b, a.dtype)

    def _addmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not covered(bias, a, b):
            return stock(aten.addmm.out, a, a.dtype, bias, a, b, beta=beta, alpha=alpha)
        return plus_product(bias, self._mm(a, b), beta, alpha)

    def _baddbmm(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not covered(bias, a, b):
            return stock(aten.baddbmm.out, a, a.dtype, bias, a, b, beta=beta, alpha=alpha)
        return plus_product(bias, self._bmm(a, b), beta, alpha)

    def _addmm_(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not covered(bias, a, b):
            return aten.addmm.out(bias, a, b, beta=beta, alpha=alpha, out=bias)
        return bias.copy_(self._addmm(bias, a, b, beta=beta, alpha=alpha))

    def _baddbmm_(self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not covered(bias, a, b):
            return aten.baddbmm.out(bias, a, b, beta=beta, alpha=alpha, out=bias)
        return bias.copy_(self._baddbmm(bias, a, b, beta=beta, alpha=alpha))

    def _grouped_mm(
        self,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """One `mm` for each group (an expert of an MoE), so that a row's bits are those of its own product.

        `offs` holds the groups' ends along the one axis that is not a batch axis of both: rows of a, columns of b, or
        K. The ends are read on the host. Rows and columns past the last end are 0; torch leaves them uninitialised.
        """
        fits = bias is None and out_dtype in (None, a.dtype) and a.dtype == b.dtype and a.dtype in COVERED_DTYPES
        fits = fits and {a.ndim, b.ndim} <= {2, 3} and a.shape[-1] == b.shape[-2] and a.device == b.device
        if not fits or (offs is None) != (a.ndim == b.ndim == 3) or (offs is not None and offs.ndim != 1):
            return otherwise(aten._grouped_mm.default, a, b, offs, bias, out_dtype)
        if offs is None:
            return self._bmm(a, b)
        groups = len(offs)
        if any(x.ndim == 3 and len(x) != groups for x in (a, b)):
            return otherwise(aten._grouped_mm.default, a, b, offs, bias, out_dtype)
        batch = (groups,) if a.ndim == b.ndim else ()
        out = a.new_zeros(*batch, a.shape[-2], b.shape[-1])
        start = 0
        for group, end in enumerate(offs.tolist()):
            cut = slice(start, max(start, end))
            if a.ndim == b.ndim:
                out[group] = self._mm(a[:, cut], b[cut])
            elif a.ndim == 2:
                out[cut] = self._mm(a[cut], b[group])
            else:
                out[:, cut] = self._mm(a[group], b[:, cut])
            start = cut.stop
        return out

    def _mv(self, matrix: Tensor, vector: Tensor) -> Tensor:
        if not (covered(matrix, vector) and matrix.ndim == 2 and vector.shape == matrix.shape[1:]):
            return stock(aten.mv.out, vector, vector.dtype, matrix, vector)
        return self.matrix_vector(matrix, vector)

    def _addmv(self, bias: Tensor, matrix: Tensor, vector: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not covered(bias, matrix, vector):
            return stock(aten.addmv.out, vector, vector.dtype, bias, matrix, vector, beta=beta, alpha=alpha)
        return plus_product(bias, self._mv(matrix, vector), beta, alpha)

    def _softmax(self, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        dtype = torch.float32 if half_to_float else x.dtype
        if not covered(x):
            return stock(aten._softmax.out, x, dtype, x, dim, half_to_float)
        return self.softmax(x, dim, dtype)

    def _safe_softmax(self, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """The softmax of scaled_dot_product_attention's math path: fully masked rows (all -inf) are 0."""
        return torch.softmax(x, dim, dtype).masked_fill(torch.isneginf(x).all(dim, keepdim=True), 0)

    def _log_softmax(self, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        dtype = torch.float32 if half_to_float else x.dtype
        if not covered(x):
            return stock(aten._log_softmax.out, x, dtype, x, dim, half_to_float)
        return self.log_softmax(x, dim, dtype)

    def _mean_dim(
        self, x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        result = dtype or x.dtype
        dims = tuple(dim or range(x.ndim))
        if not covered(x) or result not in COVERED_DTYPES or x.ndim == 0 or not are_dims(dims, x.ndim):
            return stock(aten.mean.out, x, result, x, dim, keepdim, dtype=dtype)
        return self.mean(x, dims, keepdim, result)

    def _mean_of_all(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        return self._mean_dim(x, None, dtype=dtype)


def are_dims(dims: Sequence[int], ndim: int) -> bool:
    """Whether a tensor of `ndim` dimensions has all of these, each named once; torch raises the errors."""
    return all(-ndim <= d < ndim for d in dims) and len({d % ndim for d in dims}) == len(dims)


def plus_product(bias: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """beta * bias + alpha * product, the product rounded to its dtype first, and again after each operation.

    `F.linear` computes the same where it takes `matmul` and `add_`, so both of its ways give the same bits (strides,
    and so the batch, decide which way it takes).
    """
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product
    bias = bias.expand_as(product)
    return product + (bias if beta == 1 else bias * beta)
