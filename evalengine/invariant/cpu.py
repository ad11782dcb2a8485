"""The CPU side of the mode: the `exact` kernels, whose float32 result is rounded to the operands' dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.invariant import cpu_elementwise, cpu_rows
from evalengine.invariant.overrides import Kernel, Overrides, refused
from evalengine.invariant.prepared import PreparedWeights
from evalengine.kernels import exact, exact_aten
from evalengine.kernels.limits import MAX_VOCABULARY


class CPUOverrides(Overrides):
    """The CPU's kernels. A product's left operand (F.linear's input) has two limbs, the right one (the weight) one."""

    device = "cpu"

    def __init__(self, weights: PreparedWeights | None = None) -> None:
        self.weights = PreparedWeights() if weights is None else weights

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        _refuse_beyond(exact_aten.MAX_TERMS, b.shape[-2], "a product over {} terms")
        return exact_aten.product(a, self.weights.right(b)).to(dtype)

    def batched_product(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        if b.shape[0] == 1 or b.stride(0) == 0:  # b is a weight that matmul has expanded over a batch
            return self.product(a.reshape(-1, a.shape[-1]), b[0], dtype).view(*a.shape[:-1], b.shape[-1])
        _refuse_beyond(exact_aten.MAX_TERMS, b.shape[-2], "a product over {} terms")
        return exact_aten.batched_product(a, b).to(dtype)

    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        _refuse_beyond(MAX_VOCABULARY, x.shape[dim] if x.ndim else 1, "a softmax over {} numbers")
        return exact.softmax(x, dim).to(dtype)

    def log_softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        _refuse_beyond(MAX_VOCABULARY, x.shape[dim] if x.ndim else 1, "a log_softmax over {} numbers")
        return exact.log_softmax(x, dim).to(dtype)

    def mean(self, x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
        return exact.mean(x, dims, keepdim).to(dtype)

    def kernels(self) -> dict[str, Kernel]:
        flash = "_scaled_dot_product_flash_attention_for_cpu"
        return super().kernels() | cpu_rows.KERNELS | cpu_elementwise.KERNELS | {flash: refused(flash)}


def _refuse_beyond(limit: int, length: int, what: str) -> None:
    """Raises ConfigError for a reduction over more numbers than the kernels take."""
    if length > limit:
        raise ConfigError(
            f"{what.format(length)} is longer than the {limit} that set_batch_invariant_mode() adds up on a CPU: "
            "split it, use float64, or leave the mode for it"
        )
