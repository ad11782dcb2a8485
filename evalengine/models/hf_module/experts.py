"""A mixture's experts, so that a token's result is its own: each pair of a token and an expert is a row by itself, and
a token's pairs are added one after another.

    T tokens, k experts of each.

transformers' own functions add the pairs by a reduction or by `index_add_`, whose order is torch's to choose on CUDA.
The products are transformers' `grouped_mm` form, one for each expert, of which the mode makes one product after
another.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "evalengine"


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """[T, H], int64 [T, k], [T, k] -> [T, H], the sums in float32 (float64), in the order of the router's choice."""
    tokens, k = top_k_index.shape
    rows = hidden_states.repeat_interleave(k, dim=0)
    pairs = grouped_mm_experts_forward(self, rows, top_k_index.reshape(-1, 1), top_k_weights.reshape(-1, 1))
    first, *others = pairs.view(tokens, k, -1).unbind(1)
    total = first if first.dtype.itemsize >= 4 else first.float()
    for other in others:
        total = total + other
    return total.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
