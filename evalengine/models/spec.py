"""The description of a model, as a frozen dataclass.

`hf_config` and the GGUF reader translate a checkpoint's own configuration into it, once, and `spec_checks` checks the
result. Layers and engine read no Hugging Face config and no GGUF metadata.
"""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.shapes import Shapes
from evalengine.models.processors import LogitsProcessors

RopeType = Literal["default", "linear", "llama3", "factors"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: the base and how its frequencies are stretched."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0  # used by linear and llama3 scaling only
    low_freq_factor: float = 1.0  # used by llama3 RoPE scaling only, as the next two are
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    freq_factors: tuple[float, ...] | None = None  # type factors divides each frequency by one (GGUF's rope_freqs)

    def inv_freq(self, head_dim: int) -> Tensor:
        """The inverse frequencies, float32 [head_dim / 2], by transformers' formulas.

        The powers are rounded from 40 decimal digits, since torch's float32 `pow` gives other bits on another
        instruction set (12 of 2160 values over common bases and head sizes, AVX2 against scalar). The rest is IEEE
        arithmetic.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        with decimal.localcontext(decimal.Context(prec=40)):
            powers = [float(decimal.Decimal(self.theta) ** decimal.Decimal(e)) for e in exponents.tolist()]
        inv_freq = 1.0 / torch.tensor(powers, dtype=torch.float32)
        if self.type == "linear":
            return inv_freq / self.factor
        if self.type == "factors":
            return inv_freq / torch.tensor(self.freq_factors, dtype=torch.float32)
        return self._llama3(inv_freq) if self.type == "llama3" else inv_freq

    def _llama3(self, inv_freq: Tensor) -> Tensor:
        """Llama 3.1's scaling: frequencies of long wavelengths are divided by `factor`, those of short ones kept, and
        those between blended."""
        context = self.original_max_position_embeddings
        wavelength = 2 * math.pi / inv_freq
        blend = (context / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - blend) * inv_freq / self.factor + blend * inv_freq
        long, short = wavelength > context / self.low_freq_factor, wavelength < context / self.high_freq_factor
        return torch.where(long, inv_freq / self.factor, torch.where(short, inv_freq, blended))


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model. Sizes are element counts."""

    architecture: str  # key of MODEL_REGISTRY
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # whether q, k and v have a bias
    attention_output_bias: bool  # whether o_proj has a bias
    qk_norm: bool
    dtype: torch.dtype  # the checkpoint's dtype
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    processors: LogitsProcessors = field(default_factory=LogitsProcessors)  # those of the generation config

    @property
    def shapes(self) -> Shapes:
        """The sizes that the kernels' schedules depend on."""
        return Shapes(**{size.name: getattr(self, size.name) for size in fields(Shapes)})

    @property
    def attention_scale(self) -> float:
        """The factor of q . k."""
        return self.head_dim**-0.5

    @property
    def variants(self) -> tuple[AttentionVariant, ...]:
        """What the layers' attention computes, each variant once."""
        return (AttentionVariant(self.attention_scale),)

    def kv_heads_of_rank(self, ranks: int) -> int:
        """How many KV heads each of so many ranks holds. With fewer heads than ranks, several ranks share a head."""
        return self.shapes.heads_of_rank(ranks)[1]

    @property
    def num_parameters(self) -> int:
        """The number of the model's weights; a tied table counts once."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (q + 2 * kv) + q * hidden
        attention += (q + 2 * kv) * self.attention_bias + hidden * self.attention_output_bias
        norms = 2 * hidden + 2 * self.head_dim * self.qk_norm
        layer = attention + norms + 3 * hidden * self.intermediate_size
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables + hidden


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
