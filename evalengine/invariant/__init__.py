"""`set_batch_invariant_mode` gives any torch model the engine's arithmetic, by overriding aten ops.

While the mode is on, every op of `COVERED_OPS` that gets float32, bf16 or fp16 tensors runs the project's own kernel:
on the CPU the `exact` one, its float32 result rounded to the input's dtype, on CUDA the `native` one. A row's bits then
no longer depend on how many rows there are; on the CPU neither on the thread count nor on the instruction set. float64,
integer and complex operands keep torch's own kernels. On CUDA each schedule of a product's kernel is compared with the
reference schedule before it is first used, and dropped if a byte differs (`first_use`).

    with set_batch_invariant_mode():
        logits = model(input_ids)

scaled_dot_product_attention is one kernel on CUDA, with any mask and the arithmetic of the engine's own attention. The
mode also sets two switches of torch, and puts them back: elsewhere, and for what that kernel does not cover (dropout,
values of another width than keys), scaled_dot_product_attention takes its math path (`bmm`, `_safe_softmax`, `bmm`, in
float32 for bf16 and fp16 inputs; the fused attention ops raise `ConfigError`), and functions under `torch.compile` run
eagerly (its compiler would lower `mm` to kernels that it picks by shape and by timing, past the overrides).

Padding on the CPU: a term of a product whose left factor is zero changes no bit, nor does a softmax's column at -inf.
So a row of a padded batch has the bits that it has alone, padded on the left or on the right, and a decoded token has
those of a prefill, wherever the model masks the padding and gives it no weight (a mask that is added must be large
enough for exp to give 0, and masked values must be finite). Limits remain: `softmax` and `log_softmax` take 2^19
columns, a sum of more than 2^22 numbers is cut at absolute places, a float32 product whose right operand's column
spreads over 2^8 and more loses to torch's in accuracy (docs/numerics.md has figures), and an op that counts padding as
data (a `mean` over the padded axis, a MoE's capacity, absolute position ids) depends on it by definition.

Padding on CUDA: zeros after the end of K and masked columns after the end of a softmax change nothing, so padding on
the right is harmless. Padding on the left shifts the columns, so it changes bits. Equal bits of prefill and decode are
not promised there.

`v @ x` of a vector and transposed matrices [B, K, N] may reach torch's dispatcher as `mv(x.mT, v)`, by strides and
gradients; on the CPU, where a left operand has more bits than a right one, that is another product: write `x.mT @ v`.

These ops are left to torch: `dot` (its result is one number, without rows), `addbmm`, `out=` variants (by which the
overrides reach torch's own kernels), convolutions, pooling, `prod`, `scatter_add`, batch norm, recurrent cells, losses
that add up, norms of other orders than 1, 2 and infinity, the fused layers of nn.MultiheadAttention; on the CPU the
element-wise ops whose vector body and scalar tail differ (softplus, mish, elu, exp2, cosh, sinh, atanh, atan2,
logaddexp, powers other than those by 0, 1/2, 1, 2, 3, -1 and -2, and in bf16 and fp16 sums with an alpha); on CUDA
`sum` of more than 64 terms, `cumsum`, `norm`, `var`, `logsumexp` and `group_norm`. Out of reach: kernels outside aten
(flash-attn, custom ops) and CUDA graphs captured before; `_grouped_mm` reads its offsets on the host, so it cannot be
captured. `CoverageAudit` names the ones that a model meets, and warns of rows padded on the left, which it does not
judge.

cos, sin, exp, log, tanh and float32 rsqrt gave equal bits at every length and offset tried on one CPU, so they need no
override there; across instruction sets they may differ. On CUDA torch computes every element of an element-wise op by
the same formula, in the vectorised body as in the tail; tests try lengths and offsets.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import torch
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from evalengine.errors import ConfigError
from evalengine.invariant.audit import CoverageAudit, UncoveredOpError
from evalengine.invariant.cpu import CPUOverrides
from evalengine.invariant.overrides import Overrides
from evalengine.invariant.prepared import PreparedWeights
from evalengine.invariant.table import COVERED_OPS
from evalengine.kernels.torch_private import destroy

__all__ = ["COVERED_OPS", "CoverageAudit", "UncoveredOpError", "is_batch_invariant_mode", "set_batch_invariant_mode"]

_installed: ExitStack | None = None  # the overrides in place; closing it puts torch back as it was
_weights = PreparedWeights()  # the CPU side's weights; empty while the mode is off


def _install(enabled: bool, keep_weights: bool = False) -> None:
    """Puts the overrides in place, or torch's own kernels back. Idempotent.

    keep_weights: whether prepared weights outlive the overrides.
    """
    global _installed
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # without it some versions trace the error, give up, and run this again uncompiled
        raise ConfigError("set_batch_invariant_mode() cannot be compiled: enter it outside the compiled function")
    if enabled and _installed is None:
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            library = Library("aten", "IMPL")
            stack.callback(destroy, library)
            for overrides in _devices():
                _register(library, overrides)
            _installed = stack.pop_all()
    elif not enabled and _installed is not None:
        installed, _installed = _installed, None
        installed.close()
        if not keep_weights:
            _weights.clear()


def _devices() -> list[Overrides]:
    devices: list[Overrides] = [CPUOverrides(_weights)]
    if torch.cuda.is_available():
        from evalengine.invariant.cuda import CUDAOverrides  # imports Triton

        devices.append(CUDAOverrides())
    return devices


def _register(library: Library, overrides: Overrides) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
        for name, kernel in overrides.kernels().items():
            library.impl(name, kernel, overrides.device.upper())
        for name, kernel in overrides.autograd_kernels().items():
            library.impl(name, kernel, f"Autograd{overrides.device.upper()}")


def is_batch_invariant_mode() -> bool:
    """Whether the overrides are in place now."""
    return _installed is not None


class set_batch_invariant_mode:
    """Turns the mode on (or off) at once, for the whole process, as `torch.set_grad_enabled` does for gradients.

    After a plain call the mode stays until the next call. As a context manager it restores the former mode on leaving,
    also after an exception, so calls nest in any way: `set_batch_invariant_mode(False)` inside a `True` turns the mode
    off there. It is meant for inference; under autograd each covered op keeps torch's own gradient formula. Raises
    `ConfigError` inside a function under `torch.compile`: a compiler cannot trace the call that switches it off.

    `weight_cache_bytes` bounds the memory for weights that the CPU side has prepared (2 GiB by default; 0 keeps none):
    12 bytes a float32 weight, 10 a bf16 or fp16 one. Weights beyond it are prepared at every call, to the same bits.
    None leaves the bound as it is, and leaving the context puts back the former one. Raises `ConfigError` if it is no
    number of bytes. With `keep_weights` they outlive the context, for a caller that enters it again and again; each
    goes when its weight does, and all of them when the mode is next left without it.
    """

    def __init__(
        self, enabled: bool = True, *, weight_cache_bytes: int | None = None, keep_weights: bool = False
    ) -> None:
        if weight_cache_bytes is not None and (type(weight_cache_bytes) is not int or weight_cache_bytes < 0):
            raise ConfigError(
                f"set_batch_invariant_mode(weight_cache_bytes={weight_cache_bytes!r:.60}): "
                "give a number of bytes, 0 or more"
            )
        self._previous, self._previous_limit = is_batch_invariant_mode(), _weights.limit
        self._keep_weights = keep_weights
        _install(enabled)
        if weight_cache_bytes is not None:
            _weights.limit = weight_cache_bytes

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        _install(self._previous, self._keep_weights)
        _weights.limit = self._previous_limit
