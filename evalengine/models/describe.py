"""Parts that the families' translations of a config.json share: sizes, windows, activations and RoPE, out of
transformers' configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from evalengine.errors import ConfigError
from evalengine.kernels.mixture_variant import Mixture, Router
from evalengine.kernels.recurrent_variant import GatedDelta, Mamba2
from evalengine.layers.variants import Activation
from evalengine.models.file_values import is_integer, is_number, shown
from evalengine.models.registry import Family, NotNative
from evalengine.models.rope import RopeSpec
from evalengine.models.spec import PLAIN, Block, ModelSpec

# transformers' names; those of one function differ in how its code rounds.
ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_accurate"), "gelu_tanh"),
    "relu2": "relu2",
}
WINDOW = frozenset({"sliding_window", "layer_types"})  # what a family reads that computes windows


def token_ids(value: Any) -> tuple[Any, ...]:
    """A configuration's `eos_token_id`, which may be absent, one id or several, as a tuple; the ids are not checked."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(dict.fromkeys(ids)) if all(is_integer(i) for i in ids) else ids


def describe(
    family: Family,
    config: Any,
    *,
    biases: tuple[bool, bool] | None = None,
    qk_norm: bool = False,
    rope: RopeSpec | None = None,
    eps: str = "rms_norm_eps",
    blocks: tuple[Block, ...] = PLAIN,
    intermediate_size: int | None = None,
    **more: Any,
) -> ModelSpec:
    """The spec of a transformers configuration.

    biases: whether (q, k and v; the output projection) have them; None: all of them
    where the configuration has an `attention_bias`. rope: of all layers; None: the configuration's. eps:
    what the configuration calls it. intermediate_size: None: the configuration's. more: further fields of `ModelSpec`.
    Raises ConfigError for a list without layers.
    """
    if not blocks:
        raise ConfigError("layers_block_type, layer_types: name no layer; list the kind of each")
    heads = config.num_attention_heads
    of_qkv, of_output = biases or (config.attention_bias, config.attention_bias)
    return ModelSpec(
        architecture=family.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim(config),
        rms_norm_eps=getattr(config, eps),
        rope=rope_of(config) if rope is None else rope,
        max_position_embeddings=longest_context(config),
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=of_qkv,
        attention_output_bias=of_output,
        qk_norm=qk_norm,
        dtype=getattr(config, "dtype", None) or torch.float32,
        bos_token_id=config.bos_token_id,
        eos_token_ids=token_ids(config.eos_token_id),
        blocks=blocks,
        **more,
    )


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def activation_of(config: Any, field: str = "hidden_act") -> Activation:
    """The feed-forward's activation. Raises NotNative for one that is not computed."""
    name = getattr(config, field)
    if name not in ACTIVATIONS:
        raise NotNative(f"{field}={shown(name)}: supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def by_layer(config: Any, block: Callable[[str], Block], recurrent: str | None = None) -> tuple[Block, ...]:
    """A block for each layer, of its kind in `layer_types`; without them all layers are one block of full attention.

    recurrent: the kind of layers that have no attention; windows are then refused.

    Raises ConfigError for another kind, or for kinds that are not one a layer.
    """
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return (block("full_attention"),)
    if others := sorted({str(kind) for kind in kinds} - {"full_attention", recurrent or "sliding_attention"}):
        raise ConfigError(f"layer_types: layers of {', '.join(others)} are not supported, only those of attention")
    if len(kinds) != config.num_hidden_layers:
        raise ConfigError(f"layer_types: {len(kinds)} kinds for num_hidden_layers={config.num_hidden_layers}")
    made = {kind: block(kind) for kind in set(kinds)}
    if "sliding_attention" in made:
        window(config)
    blocks = tuple(made[kind] for kind in kinds)
    return blocks[:1] if len(set(blocks)) == 1 else blocks


def window(config: Any) -> int:
    """`sliding_window`. Raises ConfigError unless it is a number of tokens."""
    if not is_integer(config.sliding_window, 1, 1 << 24):
        raise ConfigError(f"sliding_window={shown(config.sliding_window)}: must be a number of tokens")
    return int(config.sliding_window)


def windows(config: Any, block: Block) -> tuple[Block, ...]:
    """The blocks of layers that are alike but for their windows, where `layer_types` says which have one."""
    return by_layer(
        config, lambda kind: replace(block, window=window(config)) if kind == "sliding_attention" else block
    )


def grouped_router(config: Any) -> Router:
    """DeepSeek-V3's: sigmoid scores with a bias of the choice, of the experts of the best groups."""
    return Router(
        config.n_routed_experts,
        config.num_experts_per_tok,
        "sigmoid",
        wide=True,
        choice_bias=True,
        groups=config.n_group,
        kept_groups=config.topk_group,
        normed=config.norm_topk_prob,
        sum_offset=1e-20,
        scaling=float(config.routed_scaling_factor),
        rounded=False,
    )


def mamba2_of(config: Any) -> Mamba2:
    """Mamba-2 by the names that Granite 4 and Falcon H1 share. Raises ConfigError for other limits than two."""
    limits = config.time_step_limit
    if not isinstance(limits, list | tuple) or len(limits) != 2 or not all(isinstance(v, int | float) for v in limits):
        raise ConfigError(f"time_step_limit={shown(limits)}: must be two numbers, the least and the largest")
    least, most = limits
    return Mamba2(
        num_heads=config.mamba_n_heads, head_dim=config.mamba_d_head, num_groups=config.mamba_n_groups,
        state_dim=config.mamba_d_state, taps=config.mamba_d_conv, conv_bias=config.mamba_conv_bias,
        bias=config.mamba_proj_bias, dt_limits=(float(least), None if float(most) == math.inf else float(most)),
    )  # fmt: skip


def gated_delta_of(config: Any, **more: Any) -> GatedDelta:
    """A gated delta rule by the names that Qwen and OLMo share. Raises ConfigError for heads that do not divide."""
    heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
    if not keys or heads % keys:
        raise ConfigError(f"linear_num_value_heads={heads}: must be a multiple of linear_num_key_heads={keys}")
    sizes = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    return GatedDelta(keys, heads, *sizes, **more)


def with_experts(
    config: Any, blocks: tuple[Block, ...], mixture: Mixture, has: Callable[[int], bool]
) -> tuple[Block, ...]:
    """A block for each layer, taken in turn, with experts where `has` says so; one block if all are alike."""
    layers = range(config.num_hidden_layers)
    every = tuple(replace(blocks[i % len(blocks)], mixture=mixture if has(i) else None) for i in layers)
    return every[:1] if len({*every}) == 1 else every


def first_dense(config: Any, block: Block) -> tuple[Block, ...]:
    """A block with experts for each layer; the first `first_k_dense_replace` layers have none."""
    dense = config.first_k_dense_replace
    if not is_integer(dense, 0, 1024):
        raise ConfigError(f"first_k_dense_replace={shown(dense)}: must be a number of layers")
    layers = range(config.num_hidden_layers)
    return (block,) if dense == 0 else tuple(block if i >= dense else replace(block, mixture=None) for i in layers)


def rope_of(config: Any, kind: str | None = None, **more: Any) -> RopeSpec:
    """The configuration's RoPE: `rope_parameters`, or their entry for a kind of layer. more: further fields.

    transformers 5 keeps theta in rope_parameters and has no `rope_theta` attribute. Raises ConfigError for a part of a
    head that is none.
    """
    parameters: Mapping[str, Any] = config.rope_parameters
    if kind is not None and isinstance(parameters.get(kind), Mapping):
        parameters = parameters[kind]
    scaled: Any = parameters.get("rope_type", "default")
    theta = parameters["rope_theta"]
    scaling = {
        name: parameters[name]
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if scaled != "default" and name in parameters
    }
    if scaled == "yarn":
        scaling |= _yarn(config, parameters)
    part = parameters.get("partial_rotary_factor", 1.0)
    if part is not None and part != 1.0:
        if not is_number(part, 0, 1):
            raise ConfigError(f"partial_rotary_factor={shown(part)}: must be a number from 0 to 1")
        more["rotary_dim"] = int(head_dim(config) * part)
    return RopeSpec(theta=float(theta) if is_integer(theta) else theta, type=scaled, **scaling, **more)


def _yarn(config: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's own fields, as transformers' `_compute_yarn_parameters` reads them."""

    def scale_of(mscale: float) -> float:
        return 0.1 * mscale * math.log(parameters["factor"]) + 1.0 if parameters["factor"] > 1 else 1.0

    factor, mscale, of_all = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if factor is None:
        factor = scale_of(mscale) / scale_of(of_all) if mscale and of_all else scale_of(1.0)
    return {
        "attention_factor": float(factor),
        "beta_fast": float(parameters.get("beta_fast") or 32),
        "beta_slow": float(parameters.get("beta_slow") or 1),
        "truncate": bool(config.rope_parameters.get("truncate", True)),
    }


def with_original_length(config: Any) -> Any:
    """The configuration with a top-level `original_max_position_embeddings` in its `rope_parameters`.

    transformers moves it there only when it computes RoPE's frequencies, where it precedes the value inside.
    """
    if hasattr(config, "original_max_position_embeddings") and getattr(config, "rope_parameters", None):
        config.standardize_rope_params()
    return config


def longest_context(config: Any) -> Any:
    """The model's limit in tokens: `max_position_embeddings`, or with YaRN the original length times the factor.

    Model cards add YaRN to a config.json whose `max_position_embeddings` stays as it was. vLLM has the same rule.
    """
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, Mapping) and part.get("rope_type") == "yarn":
            factor: Any = part.get("factor")
            original: Any = part.get("original_max_position_embeddings")
            if is_number(factor, 1, 1e6) and is_integer(original, 1, 1 << 24):  # `spec_problems` names others
                return int(original * factor)
    return config.max_position_embeddings


def context_note(spec: ModelSpec, named: Any) -> str | None:
    """A warning if the model's limit is not the `max_position_embeddings` that its file names."""
    if named in (None, spec.max_position_embeddings):
        return None
    return (
        f"the longest context is {spec.max_position_embeddings} tokens, YaRN's factor times the original length; "
        f"the file has max_position_embeddings={shown(named)} (engine.max_model_len sets a shorter one)"
    )
