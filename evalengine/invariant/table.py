"""The table of covered ops, as plain data that can be read where neither Triton nor a GPU is installed."""

from __future__ import annotations

from typing import NamedTuple


class CoveredOp(NamedTuple):
    """The devices on which an op is covered, and how."""

    devices: tuple[str, ...]  # "cpu": the exact kernels; "cuda": the native ones
    note: str  # what reaches the op, or how it is computed


SHORT_SUM = 64  # terms: the most of a sum that is covered on CUDA
_BOTH, _CPU, _CUDA = ("cpu", "cuda"), ("cpu",), ("cuda",)

COVERED_OPS: dict[str, CoveredOp] = {
    "mm": CoveredOp(_BOTH, "matmul, F.linear without a bias; on CPU the left operand has two limbs, the right one one"),
    "addmm": CoveredOp(_BOTH, "F.linear with a bias; the product is rounded, then the bias added"),
    "addmm_": CoveredOp(_BOTH, "addmm, in place"),
    "bmm": CoveredOp(_BOTH, "matmul, einsum, F.linear on 3-D strided input; same bits as mm, row by row"),
    "baddbmm": CoveredOp(_BOTH, "bmm, rounded, then added"),
    "baddbmm_": CoveredOp(_BOTH, "baddbmm, in place"),
    "mv": CoveredOp(_BOTH, "matmul with a vector: same bits as mm with a column"),
    "addmv": CoveredOp(_BOTH, "mv, rounded, then added"),
    "_softmax": CoveredOp(_BOTH, "softmax, along any axis (on CPU up to 2^19 long)"),
    "_safe_softmax": CoveredOp(_BOTH, "scaled_dot_product_attention: softmax, rows of -inf give 0"),
    "_log_softmax": CoveredOp(_BOTH, "log_softmax and cross_entropy, along any axis (on CPU up to 2^19 long)"),
    "mean": CoveredOp(_BOTH, "mean over everything"),
    "mean.dim": CoveredOp(_BOTH, "mean over axes; hand-written RMSNorms, and F.rms_norm on CPU"),
    "scaled_dot_product_attention": CoveredOp(_CUDA, "the engine's attention, with any mask; else the math path"),
    "_fused_rms_norm": CoveredOp(_CUDA, "F.rms_norm: torch's formula in float32 over mean.dim, rounded once"),
    "mm.dtype": CoveredOp(_CUDA, "mm with out_dtype=torch.float32"),
    "addmm.dtype": CoveredOp(_CUDA, "likewise; the bias is added in float32"),
    "bmm.dtype": CoveredOp(_CUDA, "likewise"),
    "baddbmm.dtype": CoveredOp(_CUDA, "likewise"),
    "_grouped_mm": CoveredOp(_BOTH, "the experts of transformers' MoE models: one mm a group"),
    "sum": CoveredOp(_CPU, "sum over everything: integers of 40 bits"),
    "sum.dim_IntList": CoveredOp(_BOTH, "likewise, over axes; on CUDA up to 64 terms, one after another in float32"),
    "linalg_vector_norm": CoveredOp(_CPU, "norm and F.normalize of order 1, 2 and infinity"),
    "var.correction": CoveredOp(_CPU, "var: sums of integers, about the mean"),
    "std.correction": CoveredOp(_CPU, "std, likewise"),
    "var_mean.correction": CoveredOp(_CPU, "var_mean, likewise"),
    "std_mean.correction": CoveredOp(_CPU, "std_mean, likewise"),
    "logsumexp": CoveredOp(_CPU, "as log_softmax sums"),
    "native_layer_norm": CoveredOp(_BOTH, "layer_norm: mean and variance (CUDA: mean's), rounded once at the end"),
    "native_group_norm": CoveredOp(_CPU, "group_norm, likewise"),
    "cumsum": CoveredOp(_CPU, "torch's own: one chain along the axis, whatever else there is"),
    "cumsum_": CoveredOp(_CPU, "likewise"),
    "cumprod": CoveredOp(_CPU, "likewise"),
    "cumprod_": CoveredOp(_CPU, "likewise"),
    "index_add": CoveredOp(_CPU, "torch's own: a row's terms are added in the order of the index; alpha must be 1"),
    "index_add_": CoveredOp(_CPU, "likewise"),
    "silu": CoveredOp(_CPU, "torch's vector body and scalar tail round differently in float32"),
    "silu_": CoveredOp(_CPU, "likewise"),
    "sigmoid": CoveredOp(_CPU, "likewise"),
    "sigmoid_": CoveredOp(_CPU, "likewise"),
    "glu": CoveredOp(_CPU, "likewise"),
    "gelu": CoveredOp(_CPU, "likewise; both forms, erf and tanh"),
    "gelu_": CoveredOp(_CPU, "likewise"),
    "rsqrt": CoveredOp(_CPU, "bf16 and fp16 only, by way of float32: torch's vector body and scalar tail differ there"),
    "rsqrt_": CoveredOp(_CPU, "likewise"),
}
"""aten op (with its overload, unless that is the default) -> where it is covered and how."""
