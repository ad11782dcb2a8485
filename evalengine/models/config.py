"""What a model is, translated once from its checkpoint's own configuration into a frozen dataclass.

Nothing below this module reads a Hugging Face config or GGUF metadata. What the engine cannot compute faithfully
(an active sliding window, an unknown RoPE type, packed quantised weights) is refused here, all of it at once.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.models.registry import get_model_class, model_class_for_type

if TYPE_CHECKING:
    from evalengine.models.decoder import DecoderForCausalLM

RopeType = Literal["default", "linear", "llama3", "factors"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: the base and how its frequencies are stretched."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0  # linear, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 8192  # llama3
    freq_factors: tuple[float, ...] | None = None  # factors: one divisor a frequency (GGUF's rope_freqs tensor)

    def inv_freq(self, head_dim: int) -> Tensor:
        """float32 [head_dim / 2], by transformers' formulas.

        The powers are rounded from 40 decimal digits: torch's float32 `pow` gives other bits on another instruction
        set (12 of 2160 values over common bases and head sizes, AVX2 against scalar), the rest is IEEE arithmetic.
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
        """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
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
    attention_bias: bool  # on q, k and v
    attention_output_bias: bool  # on o_proj
    qk_norm: bool
    dtype: torch.dtype  # of the checkpoint
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Weights of the model; a tied table counts once."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (q + 2 * kv) + q * hidden
        attention += (q + 2 * kv) * self.attention_bias + hidden * self.attention_output_bias
        norms = 2 * hidden + 2 * self.head_dim * self.qk_norm
        layer = attention + norms + 3 * hidden * self.intermediate_size
        tables = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + tables + hidden


def kernel_shapes(spec: ModelSpec) -> dict[str, Any]:
    """What the kernels' schedules depend on: the shapes that `Ops.verify_kernels` takes."""
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "attention_bias": spec.attention_bias,
        "attention_output_bias": spec.attention_output_bias,
    }


def from_hf(config: Any) -> ModelSpec:
    """A transformers `PretrainedConfig` -> `ModelSpec`. Of an unknown model type, config.json's values do.

    Raises `ConfigError` that lists everything in it that is not supported, the model itself among it.
    """
    problems = list(_unsupported(config))
    try:
        model = _model_class(config)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    problems += _head_problems(config)
    if problems:
        raise ConfigError([f"{model.__name__}: {problem}" for problem in problems])
    qkv_bias, output_bias = model.attention_biases(config)
    heads = config.num_attention_heads
    return ModelSpec(
        architecture=model.__name__,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=config.rms_norm_eps,
        rope=_rope(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        attention_bias=qkv_bias,
        attention_output_bias=output_bias,
        qk_norm=model.qk_norm,
        dtype=getattr(config, "dtype", None) or torch.float32,
        bos_token_id=config.bos_token_id,
        eos_token_ids=token_ids(config.eos_token_id),
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's `eos_token_id`, which may be absent, one id or several."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _model_class(config: Any) -> type[DecoderForCausalLM]:
    """By the class name if the configuration has one; its model type must be known, too."""
    architecture = (getattr(config, "architectures", None) or [None])[0]
    of_type = model_class_for_type(config.model_type)
    return get_model_class(architecture) if architecture else of_type


def _rope(parameters: Mapping[str, Any]) -> RopeSpec:
    # transformers 5 keeps theta in rope_parameters and has no `rope_theta` attribute.
    kind = parameters.get("rope_type", "default")
    scaling = {
        name: parameters[name]
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if kind != "default" and name in parameters
    }
    return RopeSpec(theta=float(parameters["rope_theta"]), type=kind, **scaling)


def _unsupported(config: Any) -> Iterator[str]:
    """What no model here computes, a sentence each. Fields that an unknown model's configuration lacks say nothing."""
    if hasattr(config, "rope_parameters"):
        yield from _rope_problems(config.rope_parameters or {})
    layer_types = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in layer_types) or getattr(config, "use_sliding_window", False):
        yield "an active sliding window is not supported (layer_types, use_sliding_window)"
    if getattr(config, "quantization_config", None) is not None:
        yield "quantization_config: packed weights are not supported; use the unquantised checkpoint"
    if (activation := getattr(config, "hidden_act", "silu")) != "silu":
        yield f"hidden_act={activation}: only silu is supported"
    if getattr(config, "mlp_bias", False):
        yield "mlp_bias=true is not supported"


def _rope_problems(parameters: Mapping[str, Any]) -> Iterator[str]:
    if "rope_theta" not in parameters or parameters.get("rope_type", "default") not in ("default", "linear", "llama3"):
        yield f"rope_parameters={parameters}: supported are default, linear and llama3 scaling"
    elif parameters.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor: only the whole head may be rotated"


def _head_problems(config: Any) -> Iterator[str]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % kv_heads:
        yield f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
    if (getattr(config, "head_dim", None) or config.hidden_size // heads) % 2:
        yield "head_dim must be even"
