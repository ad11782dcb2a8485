"""Tensors packed as MXFP4, which gpt-oss's checkpoints hold their experts in, made bfloat16 as they are read: exactly.

    E experts, N output features, K input features.

A number is 4 bits of e2m1; two lie in a byte, the lower half first. 32 of them in a row share a scale, a power of two.
Every product of the two is a bfloat16 number, as long as its exponent is one, so nothing is rounded (OCP Microscaling
Formats v1.0, section 5; the names of tensors and their layout are those of gpt-oss's checkpoints).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW = 32  # numbers that share a scale
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_OF_ONE = 127


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [E, N, K / 32, 16] and [E, N, K / 32] -> bfloat16 [E, K, N], one expert in memory beside it at a time."""
    out = torch.empty(*blocks.shape[:2], blocks.shape[2] * ROW, dtype=torch.bfloat16)
    values = torch.tensor(_VALUES)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)  # of each byte, the lower half first
    exponents = torch.arange(256) - _EXPONENT_OF_ONE
    factors = torch.ldexp(torch.ones(256), exponents)
    for expert, (packed, scale) in enumerate(zip(blocks, scales, strict=True)):
        numbers = pairs[packed.int()].flatten(-2)
        out[expert] = numbers.mul_(factors[scale.int()].unsqueeze(-1)).flatten(-2)
    return out.transpose(1, 2)
