"""Variants of a model's row kernels, where they differ from Llama's. This module imports no kernel and no Triton."""

from __future__ import annotations

from typing import NamedTuple


class NormVariant(NamedTuple):
    """The variant of a norm; the default is Llama's."""

    kind: str = "rms"  # or "layer", "layer of each head" (of q and k, a weight for each)
    offset: float = 0.0  # added to the weight of an RMS norm
    cast_first: bool = True  # whether an RMS norm is rounded before the weight multiplies
    bias: bool = False  # whether a layer norm has one


class Xielu(NamedTuple):
    """The numbers of a layer's xIELU, float32: alpha_p x^2 + beta x for x > 0, else alpha_n (e^min(x, eps) - 1 - x) +
    beta x."""

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


class RowVariants(NamedTuple):
    """A model's norms that are not Llama's, each once, and whether its tables of RoPE are float32."""

    norms: tuple[NormVariant, ...] = ()
    wide_rope: bool = False


LLAMA = RowVariants()
