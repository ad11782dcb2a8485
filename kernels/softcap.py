"""The cap of logits, c tanh(x / c), element by element.

Rounding points (`native`): x float32(1 / c), `device_math.tanh`, times c, each in float32. An infinity becomes +-c.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import launch

BLOCK = 1024
WARPS = 4


@triton.jit
def _softcap_kernel(x_ptr, out_ptr, n, cap, reciprocal, BLOCK: tl.constexpr):
    device_math.after_previous_kernel()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, index < n, other=0.0)
    tl.store(out_ptr + index, device_math.softcap(x, cap, reciprocal), index < n)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """float32, any shape and strides -> cap * tanh(logits / cap), contiguous. cap > 0."""
    assert logits.dtype == torch.float32, f"logits are float32, not {logits.dtype}"
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    if n := logits.numel():
        launch(_softcap_kernel, (triton.cdiv(n, BLOCK), 1, 1), (logits, out, n, cap, 1 / cap), (BLOCK,), WARPS, 1)
    return out
