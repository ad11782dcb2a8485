"""gpt-oss: experts with biases and a clamped SwiGLU, and a sink in every head; every other layer sees a window.

Checkpoints hold the experts as MXFP4, from which they are made bfloat16, exactly, as they are loaded.
"""

from __future__ import annotations

from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.layers.variants import Norm
from evalengine.models.describe import WINDOW, by_layer, describe, window
from evalengine.models.file_values import shown
from evalengine.models.gguf_form import Config, GGUFForm, Metadata, add_windows, named
from evalengine.models.registry import Family, NotNative
from evalengine.models.spec import Block, ModelSpec
from evalengine.models.weight_names import WeightNames

_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # `clamped_swiglu` has no others


def _spec(family: Family, config: Any) -> ModelSpec:
    # Classes of older versions of transformers have these numbers in their code.
    if other := [f"{n}={value}" for n, own in _SWIGLU.items() if (value := getattr(config, n, own)) != own]:
        kind = NotNative if hasattr(type(config), "swiglu_alpha") else ConfigError
        raise kind(f"{', '.join(other)}: the feed-forward is computed with {_SWIGLU} only")
    named = getattr(config, "experts_per_token", None)  # also in files; transformers ignores it
    if named not in (None, config.num_experts_per_tok):
        raise ConfigError(
            f"experts_per_token={shown(named)} contradicts num_experts_per_tok={config.num_experts_per_tok}"
        )
    router = Router(config.num_local_experts, config.num_experts_per_tok, scores="logit", bias=True)
    mixture = Mixture(router, config.intermediate_size, bias=True)

    def block(kind: str) -> Block:
        seen = window(config) if kind == "sliding_attention" else None
        return Block(window=seen, sinks=True, activation="clamped_swiglu", mixture=mixture)

    return describe(family, config, blocks=by_layer(config, block), norm=Norm(eps=0.0, cast_first=False))


def _gguf(metadata: Metadata, config: Config) -> None:
    add_windows(metadata, config, period=2)
    config["intermediate_size"] = metadata.integer("expert_feed_forward_length", config["intermediate_size"])
    named(expert_count="num_local_experts", expert_used_count="num_experts_per_tok")(metadata, config)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False  # no metadata: so it is in every checkpoint


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    _spec,
    WINDOW | {*_SWIGLU, "num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token", "mxfp4"},
    WeightNames(
        parts={"mlp.router": "mlp.gate", "self_attn.sinks": "self_attn.attention.sinks"}, experts_transposed=True
    ),
    GGUFForm("gpt-oss", _gguf, names={"post_attention_norm": "post_attention_layernorm"}),
    implied={"hidden_act": ("silu", "swish")},  # the clamped SwiGLU, by the name that files have for it
)
