"""The negative control's last resort: products whose sum over K depends on the number of rows.

An ordinary engine's library splits K among thread blocks where a product has few rows, so that a row's bits depend on
how many others are in its step. For a model whose weights are so small that no library does that, it is injected here.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from evalengine.layers.fast import FastOps
from evalengine.layers.ops import PreparedWeight

FEW_ROWS = 4


def split_few_rows(ops: FastOps) -> None:
    """Makes products of up to `FEW_ROWS` rows the sum of two products over half of K each, rounded in between."""
    whole = ops.linear

    def linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        if len(x) > FEW_ROWS:
            return whole(x, weight, bias)
        half = x.shape[-1] // 2
        return F.linear(x[:, :half], weight[:, :half], bias) + F.linear(x[:, half:], weight[:, half:])

    ops.linear = linear  # type: ignore[method-assign]
