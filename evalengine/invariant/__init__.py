"""`set_batch_invariant_mode`: the engine's arithmetic under any torch model, by overriding aten ops.

While it is on, every op of `COVERED_OPS` that gets float32, bf16 or fp16 tensors runs the project's own kernel: on the
CPU the `exact` one, its float32 result rounded to the input's dtype, on CUDA the `native` one. A row's bits then no
longer depend on how many rows there are; on the CPU neither on the thread count nor on the instruction set. float64,
integer and complex operands keep torch's own kernels. On CUDA a schedule of a product is compared with the reference
schedule before it is first used, and dropped if a byte differs (`first_use`).

    with set_batch_invariant_mode():
        logits = model(input_ids)

The mode also sets two switches of torch, and puts them back: scaled_dot_product_attention takes its math path (`bmm`,
`_safe_softmax`, `bmm`, in float32 for bf16 and fp16 inputs; the fused attention ops raise `ConfigError`), and functions
under `torch.compile` run eagerly (its compiler would lower `mm` to kernels that it picks by shape and by timing,
and no override would be asked).

What it does not promise. On the CPU `bmm` and `baddbmm` depend on what pads K, so attention over a cache padded to
another length may differ (the engine's own paged attention does not). On CUDA zeros after the end of K and masked
columns after the end of a softmax change nothing, so padding on the right is harmless there; padding on the left shifts
the columns, and is not. Prefill against decode is promised on neither.

Left to torch: `dot` (one number: it has no rows), `addbmm`, `out=` variants (by which the overrides reach torch's own
kernels), `logsumexp`, `layer_norm`, `group_norm`, convolutions, `sum`, `cumsum`, recurrent cells, the fused layers of
nn.MultiheadAttention, and on the CPU `gelu` (whose vector body and scalar tail differ). Out of reach: kernels outside
aten (flash-attn, custom ops) and CUDA graphs captured before. `CoverageAudit` names the ones that a model meets.

cos, sin, exp, log, tanh and float32 rsqrt gave equal bits at every length and offset tried on one CPU, so they need no
override there; across instruction sets they may differ. On CUDA torch computes every element of an element-wise op by
the same formula, in the vectorised body as in the tail; tests try lengths and offsets.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from types import TracebackType

import torch
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from evalengine.errors import ConfigError
from evalengine.invariant.audit import CoverageAudit, UncoveredOpError
from evalengine.invariant.cpu import CPUOverrides
from evalengine.invariant.overrides import Overrides
from evalengine.invariant.table import COVERED_OPS

__all__ = ["COVERED_OPS", "CoverageAudit", "UncoveredOpError", "is_batch_invariant_mode", "set_batch_invariant_mode"]

_installed: ExitStack | None = None  # closing it puts torch back as it was


def _install(enabled: bool) -> None:
    """Puts the overrides in place, or torch's own kernels back. Idempotent."""
    global _installed
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # or some versions trace the error, give up, and run this once more, uncompiled
        raise ConfigError("set_batch_invariant_mode() cannot be compiled: enter it outside the compiled function")
    if enabled and _installed is None:
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            library = Library("aten", "IMPL")
            stack.callback(library._destroy)
            for overrides in _devices():
                _register(library, overrides)
            _installed = stack.pop_all()
    elif not enabled and _installed is not None:
        installed, _installed = _installed, None
        installed.close()


def _devices() -> list[Overrides]:
    devices: list[Overrides] = [CPUOverrides()]
    if torch.cuda.is_available():
        from evalengine.invariant.cuda import CUDAOverrides  # imports Triton

        devices.append(CUDAOverrides())
    return devices


def _register(library: Library, overrides: Overrides) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
        for name, kernel in overrides.kernels().items():
            library.impl(name, kernel, overrides.device.upper())


def is_batch_invariant_mode() -> bool:
    """Whether the overrides are in place now."""
    return _installed is not None


class set_batch_invariant_mode:
    """Turns the mode on (or off) at once, for the whole process, as `torch.set_grad_enabled` does for gradients.

    As a plain call it stays until the next call; as a context manager it restores, on leaving, what was before, also
    after an exception, so calls nest in any way: `set_batch_invariant_mode(False)` inside a `True` turns it off there.
    Meant for inference; under autograd each covered op keeps torch's own gradient formula. Raises `ConfigError` inside
    a function under `torch.compile`: a compiler cannot trace what it is switched off by.
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
