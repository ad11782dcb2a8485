"""RMS norms of a recurrent layer's output, gated by SiLU before them (Mamba-2) or after (gated delta rule).

    R rows, W columns, normed in groups.

Rounding points, transformers': gate first: x silu(gate) and the norm in float32, rounded to the model's dtype, times
the weight, rounded. Norm first: the norm, rounded, times the weight, rounded, times silu(gate) in float32, rounded.
Falcon-H1's, of either order, is rounded once, at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import launch


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, eps, stride_x, stride_gate, groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr, REPEATED: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """Program: one group of one row. REPEATED: every group has the same weights [GROUP]."""
    device_math.after_previous_kernel()
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    i = tl.arange(0, BLOCK)
    keep, column = i < GROUP, group * GROUP + i
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + column, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + column, mask=keep, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + (i if REPEATED else column), mask=keep, other=0.0).to(tl.float32)
    factor = tl.div_rn(gate, 1.0 + device_math.exp(-gate))
    if GATE_FIRST:
        x = x * factor
    normed = x * device_math.rsqrt(tl.sum(x * x, 0) / GROUP + eps)
    if not ONCE:
        normed = normed.to(dtype).to(tl.float32)
    out = weight * normed
    if not ONCE:
        out = out.to(dtype).to(tl.float32)
    if not GATE_FIRST:
        out = out * factor
    tl.store(out_ptr + row * groups * GROUP + column, out.to(dtype), mask=keep)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool, rounded_once: bool = False
) -> Tensor:
    """[R, W] twice, of any row stride; weight [W], or [group] of which every group has the same -> [R, W].

    Each `group` of numbers is normed by itself. gate_first: x is multiplied with silu(gate) before; else the norm is.
    rounded_once: at its end only.
    """
    rows, width = x.shape
    assert width % group == 0 and len(weight) in (group, width) and x.stride(1) == gate.stride(1) == 1
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(group)
    launch(
        _gated_norm_kernel, (rows * (width // group), 1, 1),
        (x, gate, weight, out, eps, x.stride(0), gate.stride(0), width // group),
        (group, block, gate_first, len(weight) < width, rounded_once), 4 if block <= 2048 else 8, 1,
    )  # fmt: skip
    return out
