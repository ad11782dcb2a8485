"""How the settings of two runs differ, and what each setting is called.

Everything here is about plain JSON values: `Run.identity`, and the manifest around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from evalengine.records.sealed import Names, differing
from evalengine.report.read.run import Run

# Settings that may differ between comparable runs: they change how numbers are computed, not what is requested.
NUMERIC_SETTINGS = ("numerics", "dtype", "attention_backend", "gpu_architecture", "engine", "model", "model_dtype")
# Settings whose effect is in the prompts, whose hashes are compared.
PROMPT_SETTINGS = (
    *("apply_chat_template", "chat_template", "chat_template_date", "fewshot_as_multiturn", "fewshot_seed"),
    *("long_prompts", "system_instruction", "limit", "num_fewshot", "description", "fewshot_split"),
    *("system_instruction_sha", "chat_template_sha"),
    *("doc_to_text", "doc_to_target", "target_delimiter", "fewshot_delimiter"),
    *("enable_thinking", "chat_template_args", "gen_prefix", "choice_order"),
)
CONTENT = {  # identity key -> what its difference means
    "weights": "The model weights differ",
    "model_spec": "The models differ in more than their weights",
    "tokenizer": "The tokenizers differ",
    "contract_version": "The numerics contracts differ",
    "model_sha": "The model weights differ",
    "model_revision": "The model revisions differ",
    "model_args": "The model arguments differ",
}
DATA_SETTINGS = ("dataset_path", "dataset_name", "test_split", "validation_split")  # rows are compared by their hashes
SEEDS = ("seed", "random_seed", "numpy_seed", "torch_seed")
PLACES = ("datasets", "prompts", "tasks", "task_hashes")  # compared by document, by item, by setting
# lm-eval's model arguments that say which model it is; the others say how it was run.
MODEL_NAMES = ("pretrained", "model", "revision", "tokenizer", "peft", "delta", "gguf_file", "subfolder")
_THINGS = {  # a setting's name, where it is at the identity's top -> what a reader calls it
    "model_sha": "weights",
    "model_dtype": "dtype",
    "numerics": "numerics level",
    "gpu_architecture": "GPU architecture",
    "model": "model backend",
    "gen_kwargs": "generation settings",
    **{name: "chat template" for name in PROMPT_SETTINGS if "chat_template" in name},
    **{name: "system instruction" for name in PROMPT_SETTINGS if name.startswith("system_instruction")},
    **dict.fromkeys(SEEDS, "seed"),
}
_GROUPS = {"model_spec": "model configuration", "engine": "engine setting", "model_args": "model argument"}


def differing_settings(a: Run, b: Run) -> Iterator[tuple[Names, Any, Any]]:
    """Identity entries that differ. For sources of unlike kinds, only entries that both record."""
    alike = a.program == b.program
    tasks = {key[0] for key in a.items} & {key[0] for key in b.items}
    for path, old, new in differing(_identity(a, alike), _identity(b, alike)):
        if not alike and (old is None or new is None):
            continue
        if path[0] not in PLACES or len(path) < 2 or path[1] in tasks:  # a task that one run lacks is its own finding
            yield path, old, new


def thing(path: Names) -> str:
    """The name of a differing setting: `dtype`, `generation setting max_gen_toks`, `model configuration rope.theta`.

    path: names, from the identity's top.
    """
    top, leaf = path[0], path[-1]
    if top in _THINGS and len(path) == 1:
        return _THINGS[top]
    if leaf == "dtype":
        return "dtype"
    if top == "gen_kwargs" or (top == "tasks" and {"generation", "generation_kwargs"} & {*path}):
        return f"generation setting {leaf}"
    if path == ("model_spec", "packing"):
        return "weights: packed otherwise"
    if top in _GROUPS:
        return f"{_GROUPS[top]} {'.'.join(path[1:])}".strip()
    if leaf in PROMPT_SETTINGS:
        return _THINGS.get(leaf, leaf)
    if top == "tasks":
        return f"task setting {leaf}"
    return "tokenizer" if top == "tokenizer" else top.replace("_", " ")


def said(path: Names, old: Any, new: Any) -> str:
    """A difference in words, `name is 1 in A and 2 in B`, with hashes shortened."""
    return f"{'.'.join(path)} is {short(old)} in A and {short(new)} in B"


def short(value: Any) -> str:
    """A setting's value for a sentence: JSON, hashes shortened, `none` where it is not set."""
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False, default=str)
    whole = text.strip('"')
    return f"{whole[:12]}..." if len(whole) == 64 and all(c in "0123456789abcdef" for c in whole) else text


def section(run: Run, name: str) -> Mapping[str, Any]:
    """A part of the identity that holds several settings; empty where there is none."""
    value = run.identity.get(name)
    return value if isinstance(value, Mapping) else {}


def _identity(run: Run, alike: bool) -> dict[str, Any]:
    """The run's identity; lm-eval's model arguments taken apart, and its generation settings under our name
    where it meets a run of another program. Where our engine ran lm-eval's tasks, the model is known by its content:
    what it was called counts only in a comparison with a run of lm-eval's own."""
    identity = dict(run.identity)
    if isinstance(identity.get("model_args"), str):
        identity["model_args"] = run.model_args
    if alike and run.program == "evalengine in lm-eval":
        identity.pop("model_args", None)
    if not alike and run.program != "evalengine":
        identity["tasks"] = {
            task: {**settings, "generation": settings.get("generation_kwargs")}
            for task, settings in section(run, "tasks").items()
        }
    return identity
