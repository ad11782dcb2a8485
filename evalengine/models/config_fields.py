"""The meaning of each field of a config.json to a model that does not read it: the table, as data.

transformers keeps a field that a model's code does not ask for, and leaves it out without a word. So `logit_scale` on a
Llama, whose logits Cohere's code would have multiplied, gives another model than the file describes. `refused_fields`
refuses such a field by name, and `unknown_fields` finds those that no text model of transformers has.

The names are those of every text model's configuration class in transformers `TABLE_OF`, its aliases and its old
spellings. A field that only a later version has is warned of, as one that no model has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from evalengine.models.file_values import is_number, shown
from evalengine.models.spec import ModelSpec

TABLE_OF = "5.24"  # the version of transformers; a test compares the table with those up to it


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# `hf_config` makes the spec of this first group.
HONOURED = {
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("tie_word_embeddings", "attention_bias", "dtype", "torch_dtype", "bos_token_id", "eos_token_id"),
}
# These must have values that change nothing, checked in transformers' classes, which interpret them.
CHECKED_BY_CLASS = {
    *("hidden_act", "mlp_bias", "layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
    "quantization_config",
}
# What each type of RoPE reads of `rope_parameters`, and what none of them does. `mrope_section` splits the positions of
# an image; a text's are one number each.
ROPE_READ: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
        | {"original_max_position_embeddings", "max_position_embeddings"}
    ),
    "longrope": frozenset(
        {"short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"}
    ),
    # HunYuan's, whose base is fixed. Its files also contain YaRN's fields, which no code of this model reads.
    "dynamic": frozenset({"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
}
ROPE_WITHOUT_EFFECT = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("mrope_section", "mrope_interleaved", "finetuned"),
}
READ = frozenset(HONOURED | CHECKED_BY_CLASS | {"is_causal"})

# These change no logit of a text in any family: they are for training (dropout, initial values, losses), for generation
# (`generation_config` reads those), for images and sound, which no text has, for heads that classify, for layers that
# guess further tokens; or they choose one of several implementations, say what another field was made from or tune
# what another one switches on, or say where the file comes from.
WITHOUT_EFFECT = _names(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _from_model_config
    _name_or_path _sliding_window_pattern activation_dropout add_classification_head apply_spec_augment
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind attention_dropout
    attention_probs_dropout_prob attn_implementation attn_pdrop audio_token_id audio_token_index aux_loss_alpha
    aux_loss_coef axial_norm_std bad_words_ids begin_suppress_tokens block_mlp_init_scale block_out_init_scale
    block_use_xavier_init boa_token_id boi_token_id boi_token_index bos_index cache_config cache_implementation
    chunk_size_feed_forward chunk_size_lm_head chunkwise_kernel cla_share_factor class_num classifier_activation
    classifier_bias classifier_dropout classifier_dropout_prob classifier_proj_size cls_token_id compile_config
    constraints context_length continuous_batching_config conv_use_xavier_init decoder_layerdrop decoder_start_token_id
    dense_list disable_compile disable_ngram_loss diversity_penalty do_sample dola_layers dropout dropout_p dropout_rate
    early_stopping emb_pdrop embd_pdrop embed_dropout embed_init_std embedding_dropout embedding_initializer_range
    encoder_layerdrop encoder_no_repeat_ngram_size encoder_repetition_penalty end_n_top eoa_token_id eoa_token_index
    eod_token_id eoi_token_id eoi_token_index eos_index ep_size epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty final_w_init_variance_scale finetuning_task force_words_ids forced_bos_token_id
    forced_eos_token_id gradient_checkpointing guidance_scale hidden_dropout hidden_dropout_prob id2label im_end_id
    im_newline_id im_start_id image_seq_length image_token_id image_token_index init_device init_method init_std
    initializer_cutoff_factor initializer_factor initializer_range input_jitter_noise is_assistant is_decoder
    is_llama_config label2id label_smoothing lambda_std_dev layerdrop learnable_sink_init length_penalty
    linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
    local_attention_probs_dropout_prob low_memory lsh_attention_probs_dropout_prob mamba_dt_init_floor mamba_dt_max
    mask_feature_length mask_feature_min_masks mask_feature_prob mask_index mask_init_id mask_time_length
    mask_time_min_masks mask_time_prob mask_token_id max_cache_len max_inference_chunksize max_length
    max_matching_ngram_size max_new_tokens max_seq_len max_sequence_length max_source_positions max_target_positions
    max_time median_filter_width min_length min_new_tokens min_p mlp_dropout mlp_expansion_factor mode model_max_length
    moe_capacity moe_shared_expert_overlap mtp_config mtp_hidden_states_first mtp_hybrid_override_pattern
    mtp_layer_types mtp_layers_block_type mtp_local_layer_ids mtp_loss_scaling_factor mtp_mlp_layer_types
    mtp_num_hidden_layers mtp_transformer_layers mtp_use_dedicated_embeddings multimodal_projector_bias n_ctx
    n_positions no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_labels num_logits_to_keep num_mtp_layers num_mtp_modules num_nextn_predict_layers num_return_sequences
    output_attentions output_hidden_states output_logits output_router_logits output_scores pad_id pad_index
    pad_token_id patching_batch_size penalty_alpha pool_type prefill_chunk_size prefix pretraining_tp problem_type
    prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty rescale_prenorm_residual
    resid_dropout resid_pdrop residual_dropout return_dict return_dict_in_generate return_last_states
    router_aux_loss_coef router_jitter_noise sep_token_id seq_aux sequence_bias sequence_kernel slow_but_exact
    spatial_merge_size speculation_type start_n_top step_kernel stop_strings summary_activation summary_first_dropout
    summary_last_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens target_lookbehind
    task_specific_params temperature text_end_id text_start_id time_step_floor time_step_init_scheme time_step_max
    token_healing tokenizer_class top_h top_k top_p torchscript transformers.js_config transformers_version typical_p
    unk_index unk_token_id unsloth_fixed unsloth_version use_associative_scan use_cache use_falcon_mambapy
    use_flash_attention use_mamba_kernels use_mambapy use_mem_eff_path use_mems_train use_mtp use_parallel_embedding
    video_token_id video_token_index vision_end_token_id vision_feature_layer vision_start_token_id
    w_init_variance_scale watermarking_config weight_mode z_loss_coefficient
    """
)

# Each group of fields changes the logits of some family, except with the values next to it; null is always harmless,
# and so is a list of nothing but such values.
_GROUPS: tuple[tuple[tuple[Any, ...], str], ...] = (
    (  # switches, caps and counts, by which something is off
        (False, 0),
        """
        _remove_final_layer_norm activation_sparsity_pattern adapter_layer_norm add_bias_linear add_cross_attention
        additional_vocab_size alibi apply_l2norm apply_residual_connection_post_layernorm asm attention_chunk_size
        attention_k_eq_v attn_logit_softcapping attn_temperature_tuning axial_pos_embds bi_data bias
        chain_hidden_post_norm compression_config concat_input configuration_files conv_bias cross_attn_all_layers
        decoder decoder_bias enable_bias enable_moe_block enable_moe_fp32_combine enable_pronunciation enable_shape
        final_logit_softcapping fusion_config gate_soft_cap gated_norm_rank gating generator hidden_size_per_layer_input
        index_kpool_always_select_tail is_encoder is_encoder_decoder is_moe kda_safe_gate kv_sharing_modes
        layernorm_embedding learned_pos_emb linear_allow_neg_eigval lm_head_bias ln_before_adapter logits_soft_cap
        mamba_conv_bias mamba_norm_before_gate mamba_proj_bias mamba_rms_norm mlp_gate_softcap mlp_up_softcap
        moe_apply_router_weight_on_input moe_num_experts moe_num_shared_experts moe_router_logit_softcapping multi_query
        mup_enabled n_routed_experts n_shared_experts new_decoder_architecture norm_after norm_bias norm_topk_prob
        num_experts num_experts_per_tok num_experts_per_token num_kv_shared_layers num_local_experts num_shared_experts
        output_logit_soft_cap parallel_attn patch_in_forward per_layer_config pre_norm prefix_lm projectors_bias
        qk_layernorm reorder_and_upcast_attn rescale_embeddings rescale_every residual_in_fp32 rope_interleave
        rope_interleaved rotary_value router_bias same_length scale_attn_by_inverse_layer_idx scale_embedding
        scale_sqrt_depth share_encoder_decoder_embeddings shared_expert_sink shared_intermediate_size
        sinusoidal_embeddings sliding_window_pattern sliding_window_size swiglu_limit swiglu_limits swiglu_limits_shared
        text_config text_encoder thinker_config tie_encoder_decoder transformers_weights use_attention_gate use_bias
        use_bidirectional_attention use_conv_bias use_double_wide_mlp use_dsa use_expert_bias use_lang_emb
        use_learned_position_embeddings use_long_context use_mem_rope use_mems_eval use_mrope use_ordered_embeddings
        use_parallel_residual use_post_norm use_prompt use_repmixer_blocks use_sandwich_norm
        use_shared_attention_adapter use_task_id use_weighted_layer_sum vision_config window_size zero_expert_num
        """,
    ),
    (  # factors, and counts of groups
        (1,),
        """
        attention_in_multiplier attention_out_multiplier attention_value_scale block_ffn_dim_multiplier
        embedding_fraction embedding_multiplier embedding_scale full_attn_alpha_factor full_attn_beta_factor
        key_multiplier linear_attn_alpha_factor linear_attn_beta_factor lm_head_multiplier logit_scale
        logits_mup_width_multiplier logits_scaling mlp_alpha_factor mlp_beta_factor mlp_multipliers
        moe_routed_scaling_factor moe_router_scaling_factor n_group n_langs no_rope_layers num_expert_group
        output_multiplier partial_rotary_factors qk_scale_factor residual_multiplier rotary_pct route_scale
        routed_scaling_factor router_scale router_scaling_factor scale_emb ssm_in_multiplier ssm_multipliers
        ssm_out_multiplier swiglu_alpha time_step_scale topk_group
        """,
    ),
    (  # what every model here does
        (True,),
        """
        add_out_norm attention_softmax_in_fp32 causal do_layer_norm_before layer_norm_elementwise_affine no_bias
        norm_reduction_force_float32 scale_attention_softmax_in_fp32 scale_attn_weights use_rotary_embedding
        """,
    ),
    (
        ("silu", "swish"),
        """
        activation activation_function afn dense_act_fn ff_activation ffn_act_fn hidden_activation mlp_hidden_act
        """,
    ),
    (("dense",), "mlp_layer_types"),
    (("attention", "full_attention"), "layers_block_type"),
    (("rope", "rotary"), "position_embedding_type"),
    ((-1,), "clamp_len"),
    (({},), "pruned_heads"),
    (  # sizes, kinds and positions of what no model here has
        (),
        """
        H_cycles L_bp_cycles L_cycles adapter_rank adapter_reduction_factor adapter_reuse_layer_norm altup_active_idx
        altup_coef_clip altup_correct_scale altup_num_inputs asm_cutoffs asm_div_value attention_hidden_size
        attention_layers attention_other_setting attention_type attention_types attention_window_size attn_config
        attn_layer_indices attn_layer_offset attn_layer_period attn_layers attn_scale attn_type audio_chunk_size
        audio_config audio_encoder audio_encoder_config audio_merge_size audio_soft_tokens_per_image audio_vocab_size
        autocast_kernel_dtype axial_pos_embds_dim axial_pos_shape backbone_hidden_size block_auto_adjust_ff_dim
        block_ff_dim block_multiple_of block_size block_types capacity_factor cca_time0 cca_time1
        centroid_intermediate_top_k chroma_length chunk_size clip_qkv compress_rate_csa compress_rate_hca
        compress_rates compress_ratios compress_rope_theta conv1d_width conv_L_cache conv_kernel conv_kernel_size
        cross_attention_hidden_size cross_attention_layers cross_attn_k d_inner d_rel decoder_attention_heads
        decoder_config decoder_ffn_dim decoder_layers decoder_sparse_step decoder_vocab_size default_language
        dense_intermediate_size dense_mlp_idx depth_decoder_config dim_ff dim_model_base embedding_dim embedding_size
        encoder_attention_heads encoder_config encoder_ffn_dim encoder_hash_byte_group_nb_functions
        encoder_hash_byte_group_size encoder_hash_byte_group_vocab encoder_hidden_size encoder_layers eps expand
        expansion_ratio expert_ffn_hidden_size expert_layer_offset expert_layer_period expert_selection_fn
        feed_forward_size ffn_config ffn_proj_factor ffn_round_up_to_multiple_of first_k_dense_replace floor_scale
        full_attention_interval full_attn_idxs gelu_activation global_attn_every_n_layers global_config
        global_head_dim global_rope_theta hash_seed hc_count hc_eps hc_lowrank hc_magnitude hc_mult hc_sinkhorn_iters
        heads_per_ngram hidden_mamba_act hybrid_layer_ids hybrid_override_pattern image_size index_block_size
        index_head_dim index_kpool index_local_blocks index_n_heads index_skip_topk_offset index_topk
        index_topk_blocks index_topk_freq index_topk_pattern indexer_budget indexer_compress_ratio indexer_head_dim
        indexer_kv_heads indexer_n_heads indexer_types inference_state_dtype input_embedding_size
        interleave_moe_layer_step intermediate_multiple_size intermediate_size_mlp kda_lower_bound keep_window_size
        kv_lora_rank kv_source_layers lang_id language_config languages laurel_rank layer_group_size layer_rope_theta
        layer_scale_init_value layers_num_experts linear_attn_config linear_conv_kernel_dim linear_head_dim
        linear_key_head_dim linear_lower_bound linear_num_heads linear_num_key_heads linear_num_value_heads
        linear_value_head_dim local_attention local_attention_window_len local_attn_chunk_length local_layer_ids
        local_num_chunks_after local_num_chunks_before local_rope_theta log_scaling_alpha log_scaling_n_floor
        loop_config loop_gate_rank loop_layer_index_end loop_layer_index_start loop_num_passes lru_width
        lsh_attn_chunk_length lsh_num_chunks_after lsh_num_chunks_before make_ngram_vocab_size_divisible_by
        mamba_chunk_size mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_dt_limit mamba_dt_min mamba_dt_rank
        mamba_expand mamba_head_dim mamba_headdim mamba_hidden_act mamba_n_groups mamba_n_heads mamba_ngroups
        mamba_num_heads mamba_ssm_cache_dtype max_patch_length mem_len mixer_rms_eps mlp_only_layers
        mm_tokens_per_image moe_hidden_size moe_intermediate_size moe_k moe_latent_size moe_layer_end_index
        moe_layer_freq moe_layer_interval moe_layer_start_index moe_layers moe_layers_enum moe_norm_min
        moe_renormalize moe_shared_expert_intermediate_size moe_top_k moe_topk n_groups n_input_layers
        n_layers_per_attn_res_block n_mamba_heads n_output_layers n_recurrent_layers n_recurrent_loops ngpt_alpha_init
        ngram ngram_size ngram_vocab_size_base no_rope_layer_interval norm_type num_attention_heads_per_layer
        num_blocks num_buckets num_centroids num_channels num_chroma num_codebooks num_decoder_attention_heads
        num_decoder_layers num_dense_layers num_encoder_attention_heads num_encoder_layers num_global_key_value_heads
        num_hash_layers num_hashes num_image_with_embedding num_layers_per_stack num_ln_in_parallel_attn num_mel_bins
        num_mem_blocks num_random_blocks num_sliding_attention_heads o_groups o_lora_rank output_embedding_size
        output_gate_type output_vocab_size patch_size patcher_config patching_mode patching_threshold
        ple_conv_kernel_size ple_embed_dim ple_layer_ids pooling pooling_epsilon position_bias_max_distance
        position_bias_num_buckets post_norm_eps prefix_dense_intermediate_size prefix_dense_sliding_window_pattern
        project_dim projection_dim projection_hidden_act projection_size projector_bias projector_hidden_act
        prompt_length prompt_mid_dim prompt_types pronunciation_embed_dim pronunciation_vocab_size pyramid_num_routed
        q_head_dim q_lora_rank qk_dim_factor qk_l2_clip_threshold qk_nope_head_dim qk_norm_type qk_rope_head_dim
        recurrent_kv_cache_mode rel_extent rel_l2_clip_threshold relative_attention_max_distance
        relative_attention_num_buckets relative_max_distance repmixer_kernel_size residual_gate_temperature reuse_len
        rms_norm_eps_moe_gate rope_local_base_freq rope_scaling_layers router_hidden_size scale_depth
        sconv_kernel_size scoring_func seed segment_types shape_embed_dim shape_vocab_size share_expert_dim
        share_expert_dims shared_expert_combination_strategy shared_expert_intermediate_size
        shared_experts_intermediate_size short_conv_kernel_size softmax_scale sparse_attention_config
        split_ngram_parts ssm_state_size state_size swa_head_dim swa_num_attention_heads swa_num_key_value_heads
        swa_qk_rope_head_dim swa_rope_theta task_type_vocab_size time_step_limit time_step_min time_step_rank
        top_k_experts topk_method type_vocab_size v_dim_factor vision_soft_tokens_per_image vision_vocab_size
        vocab_size_per_layer_input vocabulary_map vq_config whisper_config word_embed_proj_dim
        """,
    ),
)
# Field -> the values with which it changes nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {name: neutral for neutral, names in _GROUPS for name in _names(names)}
WHAT = {
    "attention_chunk_size": "attention in chunks is not supported",
    "compression_config": "packed weights are not supported; use the unquantised checkpoint",
    "configuration_files": "it names another file to read instead, which is not supported",
    "is_encoder_decoder": "only decoders are supported",
    "kv_sharing_modes": "layers that share keys and values are not supported",
    "per_layer_config": "layers unlike each other are not supported",
    "transformers_weights": "it names other weights, which is not supported",
    **dict.fromkeys(
        ("text_config", "decoder", "generator", "text_encoder"), "a model made of several is not supported"
    ),
}
# Other families' names for what a `ModelSpec` has -> its attribute; harmless if they say the same.
SAME_AS: Mapping[str, str] = {
    name: attribute
    for attribute, names in {
        "hidden_size": "block_dim conv_dim d_model emb_dim embed_dim n_embd n_embed",
        "intermediate_size": "d_ff dff ffn_dim ffn_hidden_size n_inner",
        "num_layers": "layers n_layer n_layers num_layers",
        "num_heads": "attention_heads heads n_head n_heads num_heads",
        "num_kv_heads": "kv_n_heads num_attention_groups num_kv_heads",
        "head_dim": "attention_head_dim attention_head_size d_head d_kv dim_head kv_channels qk_head_dim "
        "query_pre_attn_scalar rotary_dim v_head_dim",
        "attention_scale": "attention_multiplier",
        "rms_norm_eps": "block_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon",
        "rope.theta": "rotary_emb_base",
        "rope.original_max_position_embeddings": "initial_context_length",
        "vocab_size": "n_token n_words org_vocab_size unpadded_vocab_size",
        "tie_word_embeddings": "tie_embedding",
        "attention_bias": "qkv_bias use_attention_bias use_qkv_bias",
        "attention_output_bias": "attention_out_bias",
        "qk_norm": "use_qk_norm",
    }.items()
    for name in _names(names)
}
_WHY = "transformers ignores it, so the file may describe a different model; check model_type"


def refused_fields(
    raw: Mapping[str, Any], read: Set[str] = READ, implied: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
) -> Iterator[str]:
    """Yield a message for each field that would change what a model computes.

    read: the fields that its code reads. implied: the family's `Family.implied`.
    """
    for name in sorted(raw.keys() & ((REFUSED.keys() - read) | implied.keys())):
        value, neutral = raw[name], (None, *implied.get(name, REFUSED.get(name, ())))
        if all(item in neutral for item in (value if isinstance(value, list) else [value])):
            continue
        if name in implied:
            yield f"{name}={shown(value)}: only {' or '.join(shown(one) for one in implied[name])} is supported"
        elif name in WHAT:
            yield f"{name}: {WHAT[name]}"
        else:
            yield f"{name}={shown(value)}: no model of this class computes it; {_WHY}"


def contradicting_fields(raw: Mapping[str, Any], spec: ModelSpec, read: Set[str] = READ) -> Iterator[str]:
    """Yield a message for each field that contradicts the spec. read: the fields to skip, since the model's code
    reads them or `refused_fields` checks them."""
    for name in sorted(raw.keys() & SAME_AS.keys() - read):
        value, own = raw[name], attrgetter(SAME_AS[name])(spec)
        numbers = is_number(value, -math.inf, math.inf) and is_number(own, -math.inf, math.inf)
        if value is not None and not (math.isclose(value, own, rel_tol=1e-6) if numbers else value == own):
            yield f"{name}={shown(value)}: the model has {own}; {_WHY}"


def unknown_fields(raw: Mapping[str, Any], read: Set[str] = READ) -> list[str]:
    """The fields of which nothing is known: no model here reads them, and no text model of transformers has them."""
    known = {*read, *REFUSED, *SAME_AS, *WITHOUT_EFFECT}
    return [name for name, value in raw.items() if name not in known and value is not None]
