"""The numbers that packed weights stand for: MXFP4, FP8 in blocks, GPTQ and AWQ.

    E experts, N output features, K input features, g numbers that share a scale.

A packed weight is a small number times a scale. That product is taken in float32 (where that of MXFP4, GPTQ and AWQ is
exact) and is rounded once, to the run's dtype, as it is copied into the model. So a row has the bytes that it has by a
model whose weights were unpacked beforehand. Activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

MXFP4_ROW = 32  # numbers that share a scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_OF_ONE = 127
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each four bits of a word, the lowest first


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [E, N, K / 32, 16] and [E, N, K / 32] -> bfloat16 [E, K, N], exactly; one expert beside it at a time.

    A number is 4 bits of e2m1; two lie in a byte, the lower half first. 32 of them in a row share a scale, a power of
    two (OCP Microscaling Formats v1.0, section 5; the layout is that of gpt-oss's checkpoints).
    """
    out = torch.empty(*blocks.shape[:2], blocks.shape[2] * MXFP4_ROW, dtype=torch.bfloat16)
    values = torch.tensor(_E2M1)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)  # of each byte, the lower half first
    factors = torch.ldexp(torch.ones(256), torch.arange(256) - _EXPONENT_OF_ONE)
    for expert, (packed, scale) in enumerate(zip(blocks, scales, strict=True)):
        numbers = pairs[packed.int()].flatten(-2)
        out[expert] = numbers.mul_(factors[scale.int()].unsqueeze(-1)).flatten(-2)
    return out.transpose(1, 2)


def fp8(weight: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """float8_e4m3fn [..., N, K] and a scale for each block of `rows` x `columns`, [..., N / rows, K / columns] rounded
    up -> float32 [..., N, K]."""
    factors = scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return weight.float().mul_(factors[..., : weight.shape[-2], : weight.shape[-1]])


def gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_of: Tensor, bits: int, zero_offset: int) -> Tensor:
    """int32 words of numbers of `bits`: [K bits / 32, N], along K; [K / g, N bits / 32], along N; float [K / g, N]; the
    group of each input, int [K] -> float32 [N, K]. Zeros are stored less `zero_offset`."""
    numbers = _unpacked(qweight, bits, 0)
    zeros = _unpacked(qzeros, bits, 1).add_(zero_offset)
    group = group_of.long()
    return numbers.sub_(zeros[group]).float().mul_(scales.float()[group]).t()


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """int32 words of 8 numbers along N, in AWQ's order: [K, N / 8], [K / g, N / 8]; float [K / g, N] ->
    float32 [N, K]."""
    order = torch.tensor(_AWQ_ORDER).argsort()
    numbers, zeros = (_unpacked(x, 4, 1).unflatten(1, (-1, 8))[:, :, order].flatten(1) for x in (qweight, qzeros))
    spread = [x.repeat_interleave(group_size, 0) for x in (zeros, scales.float())]
    return numbers.sub_(spread[0]).float().mul_(spread[1]).t()


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words -> int32 numbers of so many bits along `dim`, the lowest bits of a word first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(dim + 1) >> shifts.view([-1] + [1] * (1 - dim))) & ((1 << bits) - 1)
    return numbers.flatten(dim, dim + 1)


METHODS: Mapping[str, Callable[..., Tensor]] = {"mxfp4": mxfp4, "fp8": fp8, "gptq": gptq, "awq": awq}


def unpacked(method: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The weight that the tensors of one of `METHODS` hold; sizes: its integers."""
    return METHODS[method](*tensors, *sizes)
