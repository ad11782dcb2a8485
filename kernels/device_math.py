"""The elementary functions that the `native` kernels call: CUDA's libdevice, which rounds as torch's kernels do.

torch's CUDA element-wise kernels are compiled from the same `expf`, `logf`, `rsqrtf` and `erff`; Triton's own `tl.exp`
is the 2-ulp `ex2.approx` form. Triton's interpreter has no libdevice; under it, and only there, these are `tl.exp` and
so on. `approximate_exp2` and `approximate_reciprocal` are single instructions, for results rounded to fewer bits.
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

    The number of arrivals is 0 again for the next launch. SCOPE: "gpu", or "sys" if other GPUs see it.
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
    def prefetch(at, num_bytes):
        pass

    @triton.jit
    def prefetch_lines(at):
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
    def erf(x):
        return tl.erf(x)

    @triton.jit
    def approximate_exp2(x):
        return tl.exp2(x)

    @triton.jit
    def approximate_reciprocal(x):
        return 1.0 / x

    @triton.jit
    def row_max(x, axis: tl.constexpr):
        return tl.max(tl.where(x == x, x, float("inf")), axis)

    @triton.jit
    def rounded(x, dtype: tl.constexpr):
        return x.to(dtype).to(tl.float32)

else:

    @triton.jit
    def after_previous_kernel():
        """The first statement of a kernel: waits until the one before it on the stream has written its results.

        A kernel with this wait may be put on the GPU while the one before it still computes (programmatic dependent
        launch, from Hopper on; `launching` requests it), which hides the cost of its launch. The next kernel may start
        only after the wait: if it were allowed before, kernels would pile up on the SMs and slow each other down
        (results/reference/PROFILE.md).
        """
        if cuda_capability_geq(9, 0):
            gdc_wait()
            gdc_launch_dependents()

    @triton.jit
    def prefetch_lines(at):
        """Prefetch the line of 128 bytes at each address into the L2 cache."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def prefetch(at, num_bytes):
        """Prefetch `num_bytes`, a multiple of 16, from an address aligned to 16 bytes into the L2 cache. One thread
        issues it. Before Hopper this does nothing."""
        if cuda_capability_geq(9, 0):
            tl.inline_asm_elementwise(
                """{
                .reg .pred first;
                .reg .u32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                @first cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.u32 $0, 0;
                }""",
                "=r,l,r", [at.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip

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
    def erf(x):
        return libdevice.erf(x)

    @triton.jit
    def approximate_exp2(x):
        """2^x within two ulp (a subnormal result is 0), one instruction."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def approximate_reciprocal(x):
        """1/x within one ulp for a float32 x in [2^-126, 2^126], one instruction; 0 for inf."""
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def row_max(x, axis: tl.constexpr):
        """float32 -> maximum along `axis`, not finite where a +inf or a NaN is there (tl.max would drop a NaN)."""
        return tl.reduce(x, axis, max_or_nan)

    @triton.jit
    def rounded(x, dtype: tl.constexpr):
        """float32 -> float32 holding `dtype` values; bfloat16 by pairs, which the compiler does only before a store."""
        if dtype == tl.bfloat16:
            result = tl.inline_asm_elementwise(
                "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
                "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            result = x.to(dtype).to(tl.float32)
        return result


@triton.jit
def tanh(x):
    """float32 tanh(x) within 3 ulp, by one formula without a branch; never tanh.approx, which keeps 11 bits.

    From 0.5 on 1 - 2 / (exp(2 |x|) + 1), whose reciprocal is one Newton step; it is 1 from 10 on, where the exponential
    is clamped. Below, where that would cancel, an odd polynomial: minimax, relative error 2^-26.
    """
    magnitude = tl.abs(x)
    bounded = tl.where(magnitude > 10.0, 10.0, magnitude)  # unlike a minimum, it keeps a NaN
    divisor = exp(bounded * 2.0) + 1.0
    reciprocal = approximate_reciprocal(divisor)
    reciprocal = tl.fma(tl.fma(-divisor, reciprocal, 1.0), reciprocal, reciprocal)
    large = tl.fma(reciprocal, -2.0, 1.0)
    square = x * x
    series = tl.fma(square, 0.017241476, -0.053045485)
    series = tl.fma(series, square, 0.13325879)
    series = tl.fma(series, square, -0.33333144)
    small = tl.fma(series * square, x, x)
    return tl.where(magnitude < 0.5, small, tl.where(x < 0.0, -large, large))


@triton.jit
def softcap(x, cap, reciprocal):
    """float32 cap tanh(x / cap), both products rounded; `reciprocal` is float32(1 / cap)."""
    return tanh(x * reciprocal) * cap


@triton.jit
def softplus(x):
    """float32 log(1 + exp(x)), within a few ulp by one formula: max(x, 0) + log1p(exp(-|x|)), whose log1p is corrected
    for what 1 + e loses of e."""
    e = exp(-tl.abs(x))
    rounded = 1.0 + e
    exact_part = rounded - 1.0
    log1p = tl.where(exact_part == 0.0, e, log(rounded) * (e / tl.where(exact_part == 0.0, 1.0, exact_part)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def sigmoid(x):
    """float32 1 / (1 + exp(-x))."""
    return tl.div_rn(1.0, 1.0 + exp(-x))
