"""How one family's row-wise layers differ from another's, as data: norms and activations.

A layer hands its variant to `Ops`; a numerics level computes it, or says that it cannot (`Ops.problems`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evalengine.kernels.row_variants import NormVariant

# gelu_tanh is transformers' gelu_pytorch_tanh, gelu the one by erf; relu2 is max(x, 0)^2; clamped_swiglu is gpt-oss's,
# always gated: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up within -7 and 7. xielu has learned numbers
# (`Ops.xielu`) and is never gated.
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "clamped_swiglu", "xielu"]


@dataclass(frozen=True)
class Fp8Rows:
    """A layer's input as numbers of FP8 times scales. group: features of a token, in a row, that share a scale; None:
    all of them. scale: of every number, in place of a group's own. power: whether those are powers of two."""

    group: int | None = None
    scale: float | None = None
    power: bool = False


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension.

    rms: x / sqrt(mean(x^2) + eps) * (offset + weight). layer: (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, the
    variance divided by n. All of it in float32; `cast_first` says where the dtype of the model comes in: the normed row
    is rounded to it before the weight multiplies (Llama), or the result is rounded, once (OLMo 2, Gemma). A layer norm
    is rounded once, whatever `cast_first`. Only an RMS norm that is rounded once has an offset, and only a layer norm a
    bias.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0  # Gemma's weights are stored minus one
    cast_first: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        rounded_once = self.kind == "rms" and not self.cast_first
        assert not self.offset or rounded_once, "only an RMS norm that is rounded once, at its end, has an offset"
        assert not self.bias or self.kind == "layer", "only a layer norm has a bias"

    @property
    def variant(self) -> NormVariant:
        """The variant that its kernel computes."""
        return NormVariant(self.kind, self.offset, self.kind == "rms" and self.cast_first, self.bias)

    @property
    def is_plain(self) -> bool:
        """Whether it is Llama's, which has fused kernels."""
        return self.kind == "rms" and self.cast_first


LAYER_NORM = Norm(eps=0.0, kind="layer", cast_first=False, bias=True)  # a family's, before its eps is known
