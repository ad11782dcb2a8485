"""generation_config.json: each setting that changes a greedy or a sampled token is applied, or rejected by name.

transformers' `generate` takes this file's values wherever its caller says nothing, and so does lm-eval's hf backend,
which says only what the task does. Qwen2.5-Coder-7B-Instruct, for one, ships a repetition penalty of 1.1, which changes
greedy output, too. Every field of transformers' `GenerationConfig` is in exactly one of the groups below.

The sampling settings (`SAMPLING`) are not taken from the file: a request says itself whether it samples, and how
(temperature, top_k, top_p; a setting that a task leaves out is off), so that a task means the same on every model. In
transformers the file's top_k and top_p, and without one top_k=50, would hold for a task that sets a temperature alone.

`model.generation_config=none` reads none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from evalengine.engine.load.hf_folder import GENERATION_CONFIG, generation_config
from evalengine.errors import ConfigError
from evalengine.models.processors import LogitsProcessors
from evalengine.util.validation import shown

FIX = "fix the file, or set model.generation_config=none to ignore all of its settings but the end-of-sequence ids"

APPLIED = tuple(f.name for f in fields(LogitsProcessors))


def _other_than(*neutral: Any) -> Callable[[Any], bool]:
    """A test that is true for every value but these."""
    return lambda value: value not in neutral


# Setting -> whether a value of it would change what is generated; null is always harmless.
REFUSED: Mapping[str, Callable[[Any], bool]] = {
    # These ask for another search than arg max or sampling.
    "num_beams": _other_than(1),
    "num_beam_groups": _other_than(1),
    "num_return_sequences": _other_than(1),
    "penalty_alpha": _other_than(0),
    "dola_layers": _other_than(),
    "constraints": _other_than([]),
    "force_words_ids": _other_than([]),
    "use_mtp": _other_than(False),
    "prompt_lookup_num_tokens": _other_than(),
    "assistant_early_exit": _other_than(),
    # These ask for logits processors that are not built here.
    "guidance_scale": _other_than(1),
    "sequence_bias": _other_than([], {}),
    "encoder_repetition_penalty": _other_than(1),  # for a decoder, the "encoder's" tokens are the prompt
    "encoder_no_repeat_ngram_size": _other_than(0),
    "forced_bos_token_id": _other_than(),
    "forced_eos_token_id": _other_than(),
    "exponential_decay_length_penalty": _other_than(),
    "watermarking_config": _other_than(),
    "token_healing": _other_than(False),
    # These end a generation otherwise.
    "stop_strings": _other_than([], ""),
    "max_time": _other_than(),  # a limit in seconds would make no run repeatable
    # A quantised cache holds other numbers.
    "cache_implementation": lambda value: value == "quantized",
}
SAMPLING = frozenset(
    ("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
)
NEUTRAL = SAMPLING | frozenset(
    (
        *("max_length", "max_new_tokens"),  # the request's own max_tokens holds instead
        *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"),  # the model's spec has these
        *("early_stopping", "length_penalty", "diversity_penalty", "low_memory"),  # settings of the refused searches
        # These tune a draft model, which is refused above; they change the speed, not the choice.
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
        "max_matching_ngram_size",
        # With finite scores these two change neither the best token nor any probability; here a row with a NaN fails.
        *("renormalize_logits", "remove_invalid_values"),
        # These say how generation is computed and returned.
        *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile"),
        *("continuous_batching_config", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("return_dict_in_generate", "transformers_version", "_from_model_config"),
    )
)


def read_processors(folder: Path, choice: str, vocab_size: int, setting: str) -> LogitsProcessors:
    """The logits processors that a model's folder requests (`hf_folder.generation_config`: in generation_config.json;
    without it transformers takes the fields from config.json, where old checkpoints have them, and where fields of no
    group are the model's).

    `choice` is model.generation_config (auto | none), `setting` names the folder in errors.

    Raises: ConfigError that lists what cannot be honoured, EvalEngineError for a file that is no JSON object.
    """
    if choice == "none":
        return LogitsProcessors()
    name, raw = generation_config(folder)
    if name != GENERATION_CONFIG:  # the other fields of config.json are the model's
        raw = {field: value for field, value in raw.items() if field in APPLIED or field in REFUSED}
    try:
        return from_fields(raw, vocab_size)
    except ConfigError as error:
        raise ConfigError([f"{setting}: {name}: {problem}; {FIX}" for problem in error.problems]) from error


def from_fields(raw: Mapping[str, Any], vocab_size: int) -> LogitsProcessors:
    """`GenerationConfig` fields -> the processors. Raises ConfigError that lists what cannot be honoured."""
    problems = list(_refused(raw))
    values = {name: raw[name] for name in APPLIED if raw.get(name) is not None}
    if raw.get("min_new_tokens") is not None:  # transformers then sets min_length to prompt + min_new_tokens
        values.pop("min_length", None)
    processors = LogitsProcessors()
    try:
        processors = LogitsProcessors(**values)
    except ConfigError as error:
        problems.extend(error.problems)
    if processors.largest_token_id() >= vocab_size:
        problems.append(f"it names token ids outside the vocabulary, 0 ... {vocab_size - 1}")
    if problems:
        raise ConfigError(problems)
    return processors


def _refused(raw: Mapping[str, Any]) -> Iterator[str]:
    for name, value in raw.items():
        if value is None or name in APPLIED or name in NEUTRAL:
            continue
        if name in REFUSED:
            if REFUSED[name](value):
                yield f"{name}={shown(value)} is not supported: it would change what is generated"
        elif _is_transformers(name):  # which ignores other names, and so do we
            yield f"{name}={shown(value)}: a setting of a newer transformers, which may change what is generated"


def _is_transformers(name: str) -> bool:
    from transformers import GenerationConfig  # its import takes seconds

    return name in GenerationConfig().to_dict()
