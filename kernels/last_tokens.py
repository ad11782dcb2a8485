"""Replaces references to the last step's tokens by their ids, for a step launched before these were known.

This takes one launch; torch's own ops take six (compare, negate, clamp, gather, select, clamp), about a
microsecond each in every decode step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evalengine.kernels import device_math
from evalengine.kernels.launching.launch import launch

_BLOCK = 256  # ids that one program resolves


@triton.jit(do_not_specialize=["count"])
def _resolve_kernel(ids_ptr, tokens_ptr, out_ptr, count, largest, BLOCK: tl.constexpr):
    device_math.after_previous_kernel()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    ids = tl.load(ids_ptr + place, mask, 0)
    tokens = tl.load(tokens_ptr + (-1 - ids), mask & (ids < 0), 0)
    tl.store(out_ptr + place, tl.minimum(tl.where(ids < 0, tokens, ids), largest), mask)


def resolve(ids: Tensor, tokens: Tensor, largest: int) -> Tensor:
    """int64 ids [T], tokens [rows] -> int64 [T]: -1 - r becomes tokens[r]; an id above `largest` becomes `largest`."""
    out = torch.empty_like(ids)
    count = ids.numel()
    launch(_resolve_kernel, (triton.cdiv(count, _BLOCK), 1, 1), (ids, tokens, out, count, largest), (_BLOCK,), 4, 1)
    return out
