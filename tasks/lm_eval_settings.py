"""Settings of lm-eval's tasks: a run's configuration replaces some of them, and some are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from evalengine.config.schema import TaskConfig, TemplateConfig
from evalengine.errors import ConfigError
from evalengine.tasks.lm_eval_generation import generation_kwargs_problems, generation_of, with_own
from evalengine.tasks.lm_eval_index import leaf_of
from evalengine.tasks.lm_eval_quiet import quiet
from evalengine.tasks.repeats import repeat_problems, repeats_of

SAYS_LITTLE = {"do_sample": False, "temperature": 0.0}  # lm-eval's settings for a task's file without any


def settings_of(config: TaskConfig, allow_code_execution: Any) -> dict[str, Any]:
    """The settings that lm-eval has for the task that `config.lm_eval.name` names.

    Raises ConfigError. Settings that the task's file already shows are refused before its functions are imported: these
    may load programs from the Hub.
    """
    if not config.lm_eval.name:
        raise ConfigError("lm_eval.name: is not set; choose the task as task=lm_eval/NAME")
    leaf = leaf_of(config.lm_eval.name)
    outline, shots = overridden(leaf.outline, config), leaf.outline.get("num_fewshot")
    if refused := list(problems(outline, config, shots, allow_code_execution)):
        raise ConfigError(refused)
    try:
        with quiet():
            return dict(leaf.settings())
    except Exception as error:  # most often a missing package that the task's functions import
        raise ConfigError(f"lm-eval cannot read the task: {type(error).__name__}: {error}") from error


def generates(settings: Mapping[str, Any]) -> bool:
    """Whether answers are generated; else given texts are scored."""
    return (settings.get("output_type") or "generate_until") == "generate_until"


def overridden(settings: Mapping[str, Any], config: TaskConfig) -> dict[str, Any]:
    """The settings with the run's own split, exemplars, description and generation."""
    own = {
        "test_split": config.split,
        "fewshot_split": config.fewshot_split,
        "description": config.description,
        "gen_prefix": config.gen_prefix,
    }
    merged = {**settings, **{key: value for key, value in own.items() if value is not None}}
    if not generates(settings):
        return merged
    kwargs_before = settings.get("generation_kwargs")
    if kwargs := with_own(kwargs_before or {}, config.generation):
        merged["generation_kwargs"] = kwargs if kwargs_before else {**SAYS_LITTLE, **kwargs}
    if config.repeats is not None or config.generation.repeats is not None:
        merged["repeats"] = repeats_of(config)
    return merged


def with_dataset(settings: Mapping[str, Any], config: TaskConfig) -> dict[str, Any]:
    """The settings with the dataset that the run names, where it is another than the file's."""
    merged, dataset = dict(settings), config.dataset
    if dataset.path is not None:
        merged.update(dataset_path=dataset.path, dataset_name=dataset.name)
    if dataset.revision is not None:
        merged["dataset_kwargs"] = {**(settings.get("dataset_kwargs") or {}), "revision": dataset.revision}
    return merged


def problems(
    settings: Mapping[str, Any], config: TaskConfig, fixed_shots: int | None, allow_code_execution: Any
) -> Iterator[str]:
    """Yields what cannot be honoured; each problem starts with the setting.

    fixed_shots: the task's own number of exemplars.
    """
    cls = settings.get("class")
    if config.template != TemplateConfig():
        yield "template: lm-eval's task writes its own prompts; use a YAML file of your own (task=./FILE)"
    if config.fewshot_file is not None:
        yield "fewshot_file: lm-eval's task has exemplars of its own; task.fewshot_split=SPLIT names others"
    if fixed_shots == 0 and config.num_fewshot:
        yield f"num_fewshot={config.num_fewshot}: lm-eval fixes it at 0 for this task"
    if settings.get("doc_to_image") or settings.get("doc_to_audio") or getattr(cls, "MULTIMODAL", False):
        yield "lm_eval.name: the task shows images or sounds, and the engine reads text only"
    unsafe = settings.get("unsafe_code") or getattr(cls, "UNSAFE_CODE", False)
    if unsafe and allow_code_execution != "without_isolation":
        yield (
            "lm_eval.name: lm-eval's own scorer runs code that the model wrote, with this process's files and network: "
            "allow_code_execution=without_isolation allows it, in a container or virtual machine that may be lost "
            "(with HF_ALLOW_CODE_EVAL=1 where the task asks for that); humaneval and mbpp of this package are isolated"
        )
    if config.choice_order is not None:
        yield f"choice_order={config.choice_order}: lm-eval's task lists its options itself"
    if config.pass_at is not None or config.code_timeout is not None:
        yield "pass_at, code_timeout: lm-eval's task scores by its own metrics and runs programs by its own limits"
    if generates(settings):
        kwargs = settings.get("generation_kwargs") or {}
        if wrong := list(generation_kwargs_problems(kwargs)):
            yield from wrong
        elif repeats_of(config) > 1:
            yield from repeat_problems(
                replace(config, generation=replace(config.generation, temperature=generation_of(kwargs).temperature))
            )
    elif config.repeats is not None or any(value is not None for value in vars(config.generation).values()):
        yield "generation, repeats: are for tasks that generate text; this one scores given texts"
