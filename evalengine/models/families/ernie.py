"""ERNIE 4.5, dense or with experts: a Llama whose RoPE has its pairs side by side and rounds only its result."""

from __future__ import annotations

from typing import Any

from evalengine.errors import ConfigError
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.models.describe import describe, rope_of, with_experts
from evalengine.models.file_values import is_integer, shown
from evalengine.models.gguf_form import Config, GGUFForm, Metadata
from evalengine.models.registry import Family, NotNative
from evalengine.models.spec import PLAIN, Block, ModelSpec
from evalengine.models.weight_names import SHARED_EXPERTS, WeightNames


def _spec(family: Family, config: Any, blocks: tuple[Block, ...]) -> ModelSpec:
    rope = rope_of(config, interleaved=True, wide=True)
    return describe(family, config, biases=(config.use_bias, config.use_bias), rope=rope, blocks=blocks)


def _dense(family: Family, config: Any) -> ModelSpec:
    return _spec(family, config, (Block(mlp_bias=config.use_bias),))


def _moe(family: Family, config: Any) -> ModelSpec:
    if config.use_bias:
        raise NotNative("use_bias=true: its head would have a bias, which is not supported")
    router = Router(
        config.moe_num_experts, config.moe_k, wide=True, choice_bias=True, normed=True, least_sum=config.moe_norm_min
    )
    inner = config.moe_intermediate_size
    mixture = Mixture(router, inner, shared_size=inner * config.moe_num_shared_experts)
    first, last, step = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    if not all(is_integer(number, 0, 1024) for number in (first, last)) or not is_integer(step, 1, 1024):
        raise ConfigError(f"moe_layer_start_index={shown(first)}, moe_layer_end_index={shown(last)}, "
                          f"moe_layer_interval={shown(step)}: must name layers")  # fmt: skip
    chosen = range(first, last + 1)
    own = with_experts(config, PLAIN, mixture, lambda layer: layer in chosen and (layer + 1) % step == 0)
    return _spec(family, config, own)


def _gguf(metadata: Metadata, config: Config) -> None:
    config["use_bias"] = metadata.biased("attn_q")


_IMPLIED = {"compression_ratio": (1,)}
ERNIE45 = Family(
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    _dense,
    frozenset({"use_bias"}),
    gguf=GGUFForm("ernie4_5", _gguf),
    implied=_IMPLIED,
)
ERNIE45_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    "ernie4_5_moe",
    _moe,
    frozenset(
        {
            *("use_bias", "moe_num_experts", "num_experts", "moe_k", "num_experts_per_tok", "moe_norm_min"),
            *("moe_intermediate_size", "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index"),
            "moe_layer_interval",
        }
    ),
    WeightNames(
        parts={
            **SHARED_EXPERTS,
            "mlp.moe_statics.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
            "mlp.gate.moe_statics.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        },
    ),
    implied={**_IMPLIED, "use_rmsnorm": (True,), "moe_gate": ("topk",), "moe_use_aux_free": (True,)},
)
