"""The numbers that packed weights stand for: FP8, MXFP4, NVFP4, and integers of GPTQ, AWQ and compressed-tensors.

    E experts, N output features, K input features, g numbers that share a scale.

A packed weight is a small number (of an integer: less its zero) times a scale. That product is taken in float32, and is
rounded once, to the run's dtype, as it is copied into the model. It is exact before that where the scale has 16 bits or
is a power of two. An NVFP4 scale is float32 of its own and the tensor's first: their quotient (compressed-tensors) or
product (ModelOpt). So a row has the bytes that it has by a model whose weights were unpacked beforehand.
The `gguf` library dequantises only GGUF files: its MXFP4 layout differs, and it turns -0 into +0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from evalengine.kernels.packed_rows import E2M1

MXFP4_ROW = 32  # numbers that share a scale
NVFP4_ROW = 16
_EXPONENT_OF_ONE = 127
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each four bits of a word, the lowest first


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [E, N, K / 32, 16] and [E, N, K / 32] -> bfloat16 [E, K, N], exactly; with one expert's copy at a time.

    A number is 4 bits of e2m1; a byte has two, the lower half first. 32 of them in a row share a scale, a power of
    two (OCP Microscaling Formats v1.0, section 5; the layout is that of gpt-oss's checkpoints).
    """
    out = torch.empty(*blocks.shape[:2], blocks.shape[2] * MXFP4_ROW, dtype=torch.bfloat16)
    factors = torch.ldexp(torch.ones(256), torch.arange(256) - _EXPONENT_OF_ONE)
    for expert, (packed, scale) in enumerate(zip(blocks, scales, strict=True)):
        out[expert] = _e2m1(packed).mul_(factors[scale.int()].unsqueeze(-1)).flatten(-2)
    return out.transpose(1, 2)


def mxfp4_rows(words: Tensor, scales: Tensor) -> Tensor:
    """uint8 [N, K / 2] and [N, K / 32] -> bfloat16 [N, K], exactly."""
    return mxfp4(words.view(1, len(words), -1, MXFP4_ROW // 2), scales.unsqueeze(0))[0].t()


def nvfp4(words: Tensor, scales: Tensor, of_all: Tensor, divides: int) -> Tensor:
    """uint8 [N, K / 2], float8_e4m3fn [N, K / 16], float32 [1] -> float32 [N, K]."""
    factors = nvfp4_scales(scales, of_all, divides)
    return _e2m1(words.unflatten(1, (-1, NVFP4_ROW // 2))).mul_(factors.unsqueeze(-1)).flatten(-2)


def nvfp4_scales(scales: Tensor, of_all: Tensor, divides: int) -> Tensor:
    """float8_e4m3fn [N, K / 16], float32 [1] -> the scales of 16 numbers each, float32 [N, K / 16]."""
    own = scales.float()
    return own / of_all if divides else own * of_all


def scaled(weight: Tensor, scales: Tensor, zeros: Tensor | None, rows: int, columns: int) -> Tensor:
    """float8_e4m3fn or int8 [..., N, K] and a scale for each block of `rows` x `columns`, [..., N / rows, K / columns]
    rounded up, as the zeros of integers are -> float32 [..., N, K]."""
    *leading, n, k = weight.shape

    def spread(x: Tensor) -> Tensor:
        x = x.float().reshape(*leading, -(-n // rows), -(-k // columns))
        if 1 < rows < n:
            x = x.repeat_interleave(rows, -2)[..., :n, :]
        return x.repeat_interleave(columns, -1)[..., :k] if 1 < columns < k else x

    numbers = weight.float()
    return (numbers if zeros is None else numbers.sub_(spread(zeros))).mul_(spread(scales))


def integers(words: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor | None, bits: int) -> Tensor:
    """int32 words of numbers of `bits`: [N, K bits / 32], along K; float [N, groups]; zeros [N bits / 32, groups],
    along N, else half the range; the group of each input, int [K], else they are of equal size -> float32 [N, K]."""
    numbers = from_words(words, bits, 1)
    n, k = numbers.shape
    zero = torch.full(scales.shape, 1 << (bits - 1)) if zeros is None else from_words(zeros, bits, 0)[:n]
    group = _groups(group_of, k, scales.shape[1])
    return numbers.sub_(zero[:, group]).float().mul_(scales.float()[:, group])


def gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_of: Tensor, bits: int, zero_offset: int) -> Tensor:
    """int32 words of numbers of `bits`: [K bits / 32, N], along K; [K / g, N bits / 32], along N; float [K / g, N]; the
    group of each input, int [K] -> float32 [N, K]. Zeros are stored less `zero_offset`."""
    numbers = from_words(qweight, bits, 0)
    zeros = from_words(qzeros, bits, 1).add_(zero_offset)
    group = _groups(group_of, len(numbers), len(scales))
    return numbers.sub_(zeros[group]).float().mul_(scales.float()[group]).t()


def _groups(group_of: Tensor | None, k: int, count: int) -> Tensor:
    """The group of each input, int64 [K]: of `count` equal ones where a checkpoint has none, or -1 everywhere (a place
    that it does not use). Raises IndexError for another below 0, which torch would count from the end."""
    if group_of is None or bool((group_of == -1).all()):
        return torch.arange(k) // (k // count)
    if bool((group_of < 0).any()):
        raise IndexError("a group below 0")
    return group_of.long()


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """int32 words of 8 numbers along N, in AWQ's order: [K, N / 8], [K / g, N / 8]; float [K / g, N] ->
    float32 [N, K]."""
    numbers, zeros = (awq_numbers(x) for x in (qweight, qzeros))
    spread = [x.repeat_interleave(group_size, 0) for x in (zeros, scales.float())]
    return numbers.sub_(spread[0]).float().mul_(spread[1]).t()


def awq_numbers(words: Tensor) -> Tensor:
    """int32 [rows, N / 8] -> int32 [rows, N], in the order of columns."""
    order = torch.tensor(_AWQ_ORDER).argsort()
    return from_words(words, 4, 1).unflatten(1, (-1, 8))[:, :, order].flatten(1)


def from_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words -> int32 numbers of so many bits along `dim`, the lowest bits of a word first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(dim + 1) >> shifts.view([-1] + [1] * (1 - dim))) & ((1 << bits) - 1)
    return numbers.flatten(dim, dim + 1)


def _e2m1(words: Tensor) -> Tensor:
    """Bytes -> float32, two for each byte in a last dimension twice as long, the lower half first."""
    values = torch.tensor(E2M1)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)
    return pairs[words.int()].flatten(-2)


METHODS: Mapping[str, Callable[..., Tensor]] = {
    method.__name__: method for method in (mxfp4, mxfp4_rows, nvfp4, scaled, integers, gptq, awq)
}


def unpacked(method: str, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """The weight that the tensors of one of `METHODS` hold; sizes: its integers."""
    return METHODS[method](*tensors, *sizes)
