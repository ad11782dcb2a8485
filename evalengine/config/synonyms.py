"""Names that other programs give to this package's settings, for messages that suggest what to write instead."""

from __future__ import annotations

SYNONYMS = {  # a setting's last name, elsewhere -> ours
    # lm-eval's options, and entries of --model_args and --gen_kwargs
    "tasks": "task",
    "num_fewshot": "task.num_fewshot",
    "output_path": "output_dir",
    "use_cache": "cache",
    **dict.fromkeys(("batch_size", "max_batch_size"), "engine.max_num_seqs"),
    **dict.fromkeys(("pretrained", "path"), "model.path"),
    **{name: f"model.{name}" for name in ("revision", "tokenizer", "think_end_token", "generation_config")},
    "peft": "model.adapter",
    **dict.fromkeys(("max_length", "max_model_len"), "engine.max_model_len"),
    **{name: f"engine.{name}" for name in ("dtype", "device", "gpu_memory_utilization", "tensor_parallel_size")},
    **{name: name for name in ("limit", "seed", "enable_thinking", "chat_template_args", "system_instruction")},
    **dict.fromkeys(("max_gen_toks", "max_new_tokens", "max_tokens"), "task.generation.max_gen_toks"),
    **{name: f"task.generation.{name}" for name in ("temperature", "top_p", "top_k", "until")},
    # others
    **dict.fromkeys(("fewshot", "few_shot", "fewshots", "n_shot", "nshot", "shots"), "task.num_fewshot"),
    **dict.fromkeys(("batch", "bs", "num_seqs", "max_batch"), "engine.max_num_seqs"),
    **dict.fromkeys(("precision", "torch_dtype"), "engine.dtype"),
    **dict.fromkeys(("num_samples", "max_samples", "n_samples", "samples"), "limit"),
    **dict.fromkeys(("output", "out", "out_dir", "output_folder"), "output_dir"),
    **dict.fromkeys(("context_length", "max_seq_len", "max_seq_length"), "engine.max_model_len"),
    **dict.fromkeys(("max_output_tokens", "max_completion_tokens"), "task.generation.max_gen_toks"),
    **dict.fromkeys(("stop", "stop_strings"), "task.generation.until"),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel"), "engine.tensor_parallel_size"),
    **dict.fromkeys(("dataset", "benchmark"), "task"),
    **dict.fromkeys(("chat_template", "chat"), "apply_chat_template"),
    **dict.fromkeys(("base_url", "api_base"), "model.api"),
    "model_name": "model.path",
    **dict.fromkeys(("lora", "lora_path", "adapter_path", "peft_path"), "model.adapter"),
}
REMOVED = {  # a setting that there was -> why it is gone
    "sequential.seed": "the order of asking follows from the gate's baseline and cannot be chosen; leave it out",
    "hydra/launcher": "a sweep's runs start one after another; submit one run per job (docs/clusters.md, Slurm)",
}
