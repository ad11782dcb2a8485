"""Finds what a GGUF file's metadata asks for and no model here computes, though llama.cpp (or others) might.

The keys are those of llama.cpp's `LLM_KV_NAMES` (src/llama-arch.cpp), without the architecture's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from gguf.constants import Keys

from evalengine.engine.load.gguf_fields import GGUFFields, shown
from evalengine.models.registry import Family

# These keys are read into the spec or compared with it, or do not influence the numbers of a dense decoder.
READ = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "tensor_data_layout",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.scale",
    "attention.sliding_window_pattern",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    # Granite 4's files have these without a recurrent layer; those of a layer would be tensors that no family reads.
    *(f"ssm.{key}" for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")),
}
# Keys that change the numbers -> their values that change nothing. llama.cpp takes a scale of 0 for "not set".
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_sparsity_scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.key_length_mla": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.q_lora_rank": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "full_attention_interval": (0, 1),
    "hidden_activation": ("silu", "swish"),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0, -1),
    "rescale_every_n_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (0,),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0, -1),
    "swiglu_clamp_exp": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}
TOKENIZER_KEYS = {value.removeprefix("tokenizer.") for name, value in vars(Keys.Tokenizer).items() if name.isupper()}
WHAT = {
    "attention.causal": "attention in both directions is not supported",
    "attention.sliding_window": "a sliding window is not supported",
    "expert_count": "mixtures of experts are not supported",
}


def unsupported(
    fields: GGUFFields, model: GGUFFields, read: Set[str], config: Mapping[str, Any], family: Family
) -> Iterator[str]:
    """A sentence for each unsupported thing that the file asks for.

    fields: the whole file's; model: those below its architecture; read: the keys that the family's own form reads;
    config: what the metadata are as a config.json.
    """
    head_dim, rope = config["head_dim"], config["rope_parameters"]
    if (kind := fields.string("general.type", "model")) != "model":
        yield f"general.type={shown(kind)}: only files of models are supported"
    known = ["none", "linear", "yarn", *({"longrope"} & family.reads)]
    if (scaling := model.string("rope.scaling.type", "linear")) not in known:
        yield f"RoPE scaling {shown(scaling)} is not supported; supported: {', '.join(known)}, llama3"
    turned = head_dim if "partial_rotary_factor" not in rope else int(head_dim * rope["partial_rotary_factor"])
    if model.integer("rope.dimension_count", head_dim) != turned:
        yield "only the whole head may be rotated (rope.dimension_count)"
    base = model.number("rope.freq_base", 10000.0)
    if "rope.freq_base_swa" not in read and model.number("rope.freq_base_swa", base) != base:
        yield "layers with a RoPE of their own are not supported (rope.freq_base_swa)"
    if model.integer("attention.value_length", head_dim) != head_dim:
        yield "keys and values of different sizes are not supported (attention.value_length)"
    scale = model.number("attention.scale", 0.0)
    if scale and abs(scale * head_dim**0.5 - 1) > 1e-6 and "attention.scale" not in read:
        yield f"attention.scale={scale}: only the inverse root of the head's size is supported"
    neutral = dict(NEUTRAL)
    if scaling == "yarn":
        neutral["rope.scaling.yarn_ext_factor"] = (1, -1)  # the whole ramp, which is also the default
        del neutral["rope.scaling.yarn_attn_factor"]  # read
    for key, allowed in neutral.items():
        value = None if key in read else model.any(key)
        if any(item not in allowed for item in (value if isinstance(value, list) else [value]) if item is not None):
            yield f"{WHAT[key]} ({key})" if key in WHAT else f"{key}={shown(value)} is not supported"
    if suppressed := fields.integers("tokenizer.ggml.suppress_tokens", []):
        yield f"tokens that are never generated are not supported (tokenizer.ggml.suppress_tokens: {len(suppressed)})"


def ignored(fields: GGUFFields, architecture: str, read: Set[str]) -> list[str]:
    """The keys that look like settings of the model or its tokenizer and that nothing reads: unknown ones, and those
    below another name, such as one that a damaged byte renamed. Keys about the file's origin are not among them."""
    known = {architecture: READ | NEUTRAL.keys() | read, "tokenizer": TOKENIZER_KEYS}
    ends = tuple(key for keys in known.values() for key in keys)
    unread = []
    for key in fields.names():
        prefix, _, rest = key.partition(".")
        other_template = prefix == "tokenizer" and rest.startswith("chat_template.")
        if not other_template and (rest not in known[prefix] if prefix in known else key.endswith(ends)):
            unread.append(key)
    return unread
