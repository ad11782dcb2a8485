"""`CoverageAudit` finds the reductions in a piece of code that `set_batch_invariant_mode` does not cover."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, prod
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from evalengine.errors import EvalEngineError
from evalengine.invariant.overrides import COVERED_DTYPES
from evalengine.invariant.table import COVERED_OPS, SHORT_SUM
from evalengine.kernels.torch_private import TorchDispatchMode, has_kernel, overload_of, schema_of, without_modes

_NAMES = """
    mm addmm addmm_ bmm baddbmm baddbmm_ addbmm addbmm_ mv addmv addmv_ dot vdot _addmm_activation _foreach_mm
    _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _cslt_sparse_mm _sparse_semi_structured_mm
    _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros
    _sparse_addmm _trilinear mkldnn_linear _mkl_linear linalg_vecdot _cdist_forward _euclidean_dist _pdist_forward
    convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_transpose
    cudnn_convolution_relu cudnn_convolution_add_relu mkldnn_convolution _slow_conv2d_forward slow_conv3d_forward
    slow_conv_transpose2d slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d _conv_depthwise2d
    conv_depthwise3d
    sum nansum mean var std var_mean std_mean prod cumsum cumsum_ cumprod cumprod_ logsumexp logcumsumexp
    _logcumsumexp norm linalg_vector_norm linalg__powsum _foreach_norm renorm renorm_ dist trace
    _softmax _safe_softmax _log_softmax _sparse_softmax _masked_softmax _masked_softmax_backward
    native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _batch_norm_no_update
    _native_batch_norm_legit_no_training cudnn_batch_norm _batch_norm_with_update _fused_rms_norm
    _weight_norm_interface
    scaled_dot_product_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable _flash_attention_forward _efficient_attention_forward
    _cudnn_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd
    _thnn_fused_lstm_cell _thnn_fused_gru_cell _cudnn_rnn mkldnn_rnn_layer
    avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d _embedding_bag _embedding_bag_forward_only
    index_add index_add_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_reduce index_reduce_
    index_put index_put_ _index_put_impl_ put put_ segment_reduce bincount _histogramdd_bin_edges
    multi_margin_loss multilabel_margin_loss_forward _ctc_loss _cudnn_ctc_loss
    nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy
    _fft_r2c _fft_c2r _fft_c2c cholesky linalg_cholesky_ex linalg_lu_factor_ex linalg_inv_ex linalg_qr _linalg_svd
    _linalg_eigh _linalg_solve_ex _linalg_det linalg_matrix_exp
"""
REDUCTIONS = frozenset(_NAMES.split())
"""aten ops (base names, all overloads) that add or multiply many floats, in an order that torch chooses."""

_UNEVEN = """
    silu silu_ sigmoid sigmoid_ gelu gelu_ glu softplus mish mish_ elu elu_ exp2 exp2_ cosh cosh_ sinh sinh_
    atanh atanh_ atan2 atan2_ logaddexp logaddexp2
"""
UNEVEN_ON_CPU = frozenset(_UNEVEN.split())
"""Element-wise ops whose vector body and scalar tail round differently on a CPU."""
_UNEVEN_POWERS = frozenset({"pow", "pow_", "float_power", "float_power_"})
_EVEN_EXPONENTS = (0, 0.5, 1, 2, 3, -1, -2)  # computed by products, square roots and divisions, all IEEE 754
_SCALED_SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub"})  # these are uneven in bf16 and fp16 if alpha is not 1

_OURS = ("aten", "prim", "prims", "profiler", "evalengine")


class UncoveredOpError(EvalEngineError):
    """Ops outside the mode's coverage were met; `ops` counts each of them."""

    def __init__(self, ops: Counter[str]) -> None:
        self.ops = ops
        super().__init__(f"not covered by set_batch_invariant_mode(): {_counts(ops)}")


class CoverageAudit:
    """Watches every op that runs inside it, and on leaving raises `UncoveredOpError`, naming all uncovered ones.

        with torch.no_grad(), set_batch_invariant_mode(), CoverageAudit():
            model(input_ids)

    An op is uncovered if it is one of `REDUCTIONS` on floats (sums of integers are exact) and `COVERED_OPS` does not
    list it for the operands' device and dtypes, or if it is no aten op at all (flash-attn, a custom op), which the mode
    cannot reach. The audit sees every op that passes torch's dispatcher on this thread, in forward direction. It does
    not see the kernels that an op calls inside, nor Triton kernels launched without an op. Its report does not depend
    on whether the mode is on. `met` counts every op seen.

    What a model makes of padding is in none of its ops, so it is not judged: a recurrent state takes in what stands
    before a row (Rwkv, MiniMax), and positions counted from the batch's left edge are others than the row's own (ALiBi
    in Mpt). `unjudged` counts the modules that met an `attention_mask` with rows padded on the left; leaving warns of
    them.
    """

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self.uncovered: Counter[str] = Counter()
        self.unjudged: Counter[str] = Counter()
        self._recorder = _Recorder(self)

    def __enter__(self) -> CoverageAudit:
        self._hook = register_module_forward_hook(self._look_for_padding, with_kwargs=True)
        self._recorder.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.__exit__(kind, error, trace)
        self._hook.remove()
        if error is None and self.unjudged:
            warnings.warn(
                f"not judged: rows padded on the left ({_counts(self.unjudged)}). Whether such a row has the bits that "
                "it has alone depends on what the model makes of padding (recurrent states, ALiBi, positions counted "
                "from the left edge): compare one with the row alone",
                stacklevel=2,
            )
        if error is None and self.uncovered:
            raise UncoveredOpError(self.uncovered)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not watch what runs in it: ops whose promise is another one's to keep."""
        with without_modes():
            yield

    def _look_for_padding(self, module: nn.Module, args: object, kwargs: dict[str, Any], result: object) -> None:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            with without_modes():  # what is called here is no op of the model's
                if mask.numel() and ((mask[:, 0] == 0) & mask.any(1)).any():
                    self.unjudged[type(module).__name__] += 1


def _counts(names: Counter[str]) -> str:
    return "; ".join(f"{count} x {name}" for name, count in names.items())


class _Recorder(TorchDispatchMode):
    def __init__(self, audit: CoverageAudit) -> None:
        super().__init__()
        self.audit = audit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = next((x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), "cpu")
        if _is_composite(func, device):
            with self:  # inference_mode hands over whole composites (linear, matmul), whose parts must be seen
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        namespace, name = _name(func)
        self.audit.met[name] += 1
        floats = _floats((args, kwargs), result)
        if namespace not in _OURS and floats:
            self.audit.uncovered[f"{namespace}::{name} on {device}"] += 1
        elif _order_matters(func, device, args, kwargs) and not _is_covered(name, device, floats, args, kwargs):
            dtypes = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in floats}))
            self.audit.uncovered[f"aten::{name} on {device} ({dtypes})"] += 1
        return result


def _name(func: Any) -> tuple[str, str]:
    """The op's namespace, and its name as COVERED_OPS spells it: with the overload unless that is the default."""
    namespace, base = schema_of(func).name.split("::")
    return namespace, base if overload_of(func) == "default" else f"{base}.{overload_of(func)}"


def _is_composite(func: Any, device: str) -> bool:
    """Whether torch has only a decomposition for this op on this device, and no kernel."""
    return has_kernel(func, "CompositeImplicitAutograd") and not has_kernel(func, device.upper())


def _floats(operands: object, result: object) -> list[Tensor]:
    """The float tensors among operands and result; none if all operands are empty, since nothing adds up then."""
    inputs = [x for x in tree_leaves(operands) if isinstance(x, Tensor) and x.numel()]
    made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and inputs]
    return [x for x in inputs + made if x.is_floating_point() or x.is_complex()]


def _order_matters(func: Any, device: str, args: Any, kwargs: Any) -> bool:
    """Whether the result may depend on the order of additions, or on where the vector body ends."""
    base = schema_of(func).name.split("::")[1]
    names = [argument.name for argument in schema_of(func).arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if device == "cpu" and _is_uneven(base, arguments):
        return True
    if "accumulate" in names and not arguments.get("accumulate"):
        return False  # without `accumulate`, index_put and its like only move numbers
    if base == "linalg_vector_norm" and abs(arguments.get("ord", 2)) == inf:
        return False  # such a norm is a maximum or a minimum
    if base == "sum" and _terms(arguments) <= 2:
        return False  # two terms have one order
    return base in REDUCTIONS and arguments.get("reduction") != 0  # a loss with reduction="none" adds nothing up


def _terms(arguments: dict[str, Any]) -> float:
    """How many terms a sum over axes has; infinity for one over everything."""
    x, axes = arguments.get("self"), arguments.get("dim")
    named = isinstance(x, Tensor) and isinstance(axes, list | tuple) and bool(axes)
    return prod(x.shape[axis] for axis in axes) if named else inf  # type: ignore[union-attr]


def _is_uneven(base: str, arguments: dict[str, Any]) -> bool:
    if base in _UNEVEN_POWERS:
        exponent = arguments.get("exponent")
        numbers = not isinstance(exponent, Tensor) and isinstance(arguments.get("self"), Tensor)
        return not (numbers and exponent in _EVEN_EXPONENTS)
    if base in _SCALED_SUMS:
        narrow = any(isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) for x in arguments.values())
        return narrow and arguments.get("alpha", 1) != 1
    return base in UNEVEN_ON_CPU


def _is_covered(name: str, device: str, floats: list[Tensor], args: Any, kwargs: Any) -> bool:
    if not floats:
        return True  # integers add exactly
    op = COVERED_OPS.get(name)
    if op is None or device not in op.devices or any(x.dtype not in COVERED_DTYPES for x in floats):
        return False
    if name == "sum.dim_IntList" and device == "cuda":
        return _terms({"self": args[0], "dim": args[1] if len(args) > 1 else kwargs.get("dim")}) <= SHORT_SUM
    if name == "linalg_vector_norm":
        return (args[1] if len(args) > 1 else kwargs.get("ord", 2)) in (1, 2)
    return name not in ("index_add", "index_add_") or kwargs.get("alpha", 1) == 1
