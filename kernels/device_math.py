"""The elementary functions that the `native` kernels call: CUDA's libdevice, which rounds as torch's kernels do.

torch's CUDA element-wise kernels are compiled from the same `expf`, `logf` and `rsqrtf`; Triton's own `tl.exp` is the
2-ulp `ex2.approx` form. Triton's interpreter has no libdevice; under it, and only there, these are `tl.exp` and so on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from evalengine.kernels.launching.launch import INTERPRETED


@triton.jit
def is_last_to_arrive(arrived_ptr, count, SCOPE: tl.constexpr):
    """Whether all of `count` programs but this one have come here before; then what they stored can be read.

    The number of arrivals is 0 again for the next launch. SCOPE: "gpu", or "sys" if other GPUs are told of it.
    """
    tl.debug_barrier()  # every thread has stored its part before one of them says so
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope=SCOPE) == count - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last


# Whether our Gluon kernels can run: they need Triton 3.6, and the interpreter knows no Gluon.
GLUON: bool = not INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)

if INTERPRETED:

    @triton.jit
    def after_previous_kernel():
        pass

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def log(x):
        return tl.log(x)

    @triton.jit
    def rsqrt(x):
        return 1.0 / tl.sqrt_rn(x)

    @triton.jit
    def row_max(x, axis: tl.constexpr):
        return tl.max(tl.where(x == x, x, float("inf")), axis)

else:

    @triton.jit
    def after_previous_kernel():
        """The first statement of a kernel: waits until the one before it on the stream has written its results.

        A kernel with this wait may be put on the GPU while the one before it still computes (programmatic dependent
        launch, from Hopper on; `launching.driver` asks for it), which hides the cost of its launch. The next kernel is
        allowed to come only after the wait: if it were allowed before, kernels would pile up on the SMs and slow each
        other down (results/reference/PROFILE.md).
        """
        if cuda_capability_geq(9, 0):
            gdc_wait()
            gdc_launch_dependents()

    @triton.jit
    def max_or_nan(a, b):
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def exp(x):
        return libdevice.exp(x)

    @triton.jit
    def log(x):
        return libdevice.log(x)

    @triton.jit
    def rsqrt(x):
        return libdevice.rsqrt(x)

    @triton.jit
    def row_max(x, axis: tl.constexpr):
        """float32 -> maximum along `axis`, not finite where a +inf or a NaN is there (tl.max would drop a NaN)."""
        return tl.reduce(x, axis, max_or_nan)
