"""The numbers that a packed weight's codes stand for: float32, by the rule of `engine.load.unpacking`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves_codes(half, KIND: tl.constexpr):
    """The codes of 4 bits in the lower half of each int32: (b, h) = (0, 0), (0, 1), (1, 0), (1, 1) of `packed_rows`.

    Those of e2m1 as the bits of a bfloat16, which is 2^-126 times the number.
    """
    if KIND == "e2m1":
        a, b, c = half & 0x81C0, half << 3 & 0x81C0, half << 6 & 0x81C0
        d = half >> 4 & 0x00C0 | half >> 5 & 0x0100 | half << 1 & 0x8000
    else:
        a, b, c, d = half & 15, half >> 4 & 15, half >> 8 & 15, half >> 12 & 15
    return a, b, c, d


@triton.jit
def number(code, zero, KIND: tl.constexpr):
    """float32: the number of a code, int32; of an integer less its zero."""
    if KIND == "e2m1":
        value = (code << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif KIND == "e4m3":  # 2^-120
        bits = (code & 0x7F) << 20 | (code & 0x80) << 24
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    else:
        value = (code - zero).to(tl.float32)
    return value


@triton.jit
def factor(word, SCALE: tl.constexpr):
    """float32: the scale in a word of `PackedFragments.scales`, or in a byte that is a power of two."""
    if SCALE == "uint8":
        value = tl.where(word == 0, 0x00400000, word << 23).to(tl.float32, bitcast=True)
    elif SCALE == "float32":
        value = word.to(tl.float32, bitcast=True)
    elif SCALE == "float16":
        value = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = word.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)
    return value
