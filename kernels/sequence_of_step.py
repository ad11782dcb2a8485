"""Where a kernel of layers with states finds its sequence: its tokens in a ragged step, and its slot of the pool."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of_step(s, cu_seqlens, seqlens, state_slots):
    """Sequence s -> its slot (-1: padding) and its first token's row, both int64; how many tokens it has in the step,
    and whether these are all of its tokens, so that it begins with zeros, both int32."""
    slot = tl.load(state_slots + s).to(tl.int64)
    first = tl.load(cu_seqlens + s).to(tl.int64)
    n = (tl.load(cu_seqlens + s + 1) - first).to(tl.int32)
    begins = (tl.load(seqlens + s) == n).to(tl.int32)
    return slot, first, n, begins
