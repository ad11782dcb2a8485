"""Settings of lm-eval's tasks: a run's configuration replaces some of them, and some are rejected.

Also what follows from them: the generation settings, and where the rows are if lm-eval does not load them itself
(`data_dir`, or any file that the user names).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evalengine.config.schema import (
    LM_EVAL_LENGTHS,
    LM_EVAL_NEUTRAL,
    DatasetConfig,
    GenerationConfig,
    TaskConfig,
    TemplateConfig,
)
from evalengine.errors import ConfigError
from evalengine.integrations.lm_eval_tasks.index import leaf_of
from evalengine.tasks.dataset import load_rows, local_source, read_local, text_lines
from evalengine.tasks.generation import repeat_problems, repeats_of
from evalengine.tasks.instance import Generation
from evalengine.tasks.lm_eval_quiet import quiet
from evalengine.tasks.lm_eval_yaml import GENERATION_KWARGS, evaluated_split, exemplar_split, generation_of
from evalengine.tasks.rows import Rows, check_rows

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
        yield "fewshot_file: lm-eval's task has its own exemplars; task.fewshot_split=SPLIT names others"
    if fixed_shots == 0 and config.num_fewshot:
        yield f"num_fewshot={config.num_fewshot}: lm-eval fixes it at 0 for this task"
    if settings.get("doc_to_image") or settings.get("doc_to_audio") or getattr(cls, "MULTIMODAL", False):
        yield "lm_eval.name: the task shows images or sounds, and the engine reads text only"
    unsafe = settings.get("unsafe_code") or getattr(cls, "UNSAFE_CODE", False)
    if unsafe and allow_code_execution != "without_isolation":
        yield (
            "lm_eval.name: lm-eval's own scorer runs code that the model wrote, with this process's files and network: "
            "allow_code_execution=without_isolation allows it, in a container or virtual machine that may be lost "
            "(with HF_ALLOW_CODE_EVAL=1 where the task requires that); humaneval and mbpp of this package are isolated"
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
                replace(config, generation=replace(config.generation, temperature=resolved(kwargs).temperature))
            )
    elif config.repeats is not None or any(value is not None for value in vars(config.generation).values()):
        yield "generation, repeats: are for tasks that generate text; this one scores given texts"


def with_own(settings: Mapping[str, Any], own: GenerationConfig) -> dict[str, Any]:
    """lm-eval's settings of a task; those that the run's configuration sets replace them."""
    chosen = {name: value for name, value in asdict(own).items() if value is not None and name != "repeats"}
    if "max_gen_toks" in chosen:
        settings = {name: value for name, value in settings.items() if name not in LM_EVAL_LENGTHS}
    if "temperature" in chosen:
        chosen["do_sample"] = chosen["temperature"] > 0
    return {**settings, **chosen}


def generation_kwargs_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields what cannot be honoured; each problem starts with the setting."""
    for name, value in settings.items():
        where = f"generation_kwargs.{name}={str(value)[:80]}"
        if value is None or (name in LM_EVAL_NEUTRAL and value == LM_EVAL_NEUTRAL[name]):
            continue
        if name not in GENERATION_KWARGS:
            yield f"{where}: lm-eval's task sets it, the engine does not build it, and it changes what is generated"
        elif name in ("temperature", "top_p", "top_k", *LM_EVAL_LENGTHS) and not _is_number(value):
            yield f"{where}: must be a number"
        elif name == "until" and not all(isinstance(stop, str) for stop in generation_of({name: value})[name]):
            yield f"{where}: must be a text or a list of texts"
    if settings.get("do_sample") is True and not float(settings.get("temperature") or 0.0):
        yield "generation_kwargs.do_sample=True at temperature=0 samples nothing: set task.generation.temperature"


def resolved(settings: Mapping[str, Any]) -> Generation:
    """The settings by lm-eval's rules: greedy without a temperature, 256 tokens without a length."""
    given = generation_of(settings)
    return Generation(
        until=tuple(filter(None, given.get("until", ()))),  # an empty string stops nothing
        max_gen_toks=int(given.get("max_gen_toks", 256)),
        temperature=given.get("temperature", 0.0),
        top_k=int(given.get("top_k", 0)),
        top_p=float(given.get("top_p", 1.0)),
    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


SUBJECT = "subject"  # the column that names a row's configuration
SOLE = (None, "", "default", "main")  # what a dataset's only configuration is called


def local_rows(
    settings: Mapping[str, Any], config: DatasetConfig, data_dir: str | None, shots: int
) -> dict[str, Rows] | None:
    """The rows of each split that the task names; None if no local place has the evaluated split.

    A missing split of exemplars is an error only if exemplars are shown; else lm-eval is given one evaluated row in its
    place, which no prompt shows.
    Raises ConfigError as `load_rows` does.
    """
    split = evaluated_split(settings)
    if split is None:
        return _whole_folder(config.folder or str(settings["task"]), data_dir)
    place = _place(settings, config, data_dir, split)
    if place is None:
        return None
    rows_of = {split: load_rows(place, split, data_dir=data_dir, read_text=text_lines)}
    pool = exemplar_split(settings) if shots else None
    few = settings.get("fewshot_config")
    names = [settings.get(f"{name}_split") for name in ("training", "validation", "test", "fewshot")]
    names.append(few.get("split") if isinstance(few, dict) else None)
    for name in filter(None, names):
        if name in rows_of:
            continue
        if name == pool or local_source(place, name, data_dir, evaluated=False) is not None:
            rows_of[name] = load_rows(place, name, data_dir=data_dir, read_text=text_lines, evaluated=False)
        else:
            rows_of[name] = replace(rows_of[split], rows=rows_of[split].rows[:1], lines=())
    return rows_of


def _whole_folder(folder: str, data_dir: str | None) -> dict[str, Rows] | None:
    """Every <split>.jsonl of the folder, for a class that knows its splits itself; None if there are none."""
    if data_dir is None:
        return None
    files = sorted((Path(data_dir).expanduser() / folder).glob("*.jsonl"))
    return {file.stem: check_rows(read_local(file, file.stem, text_lines)) for file in files} or None


def _place(
    settings: Mapping[str, Any], config: DatasetConfig, data_dir: str | None, split: str
) -> DatasetConfig | None:
    """The dataset with the folder that has the split: the folder that the run names, else the task's, else
    the dataset's with the task's configuration; None if none has it."""
    last = str(settings.get("dataset_path") or "").rsplit("/", 1)[-1]
    name = settings.get("dataset_name")
    places = [replace(config, folder=config.folder or str(settings["task"]))]
    if not config.folder and last and name in SOLE:
        places.append(replace(config, folder=last))
    elif not config.folder and last:
        # Of a dataset with several configurations the folder does not say whose rows it holds; a column may (mmlu's).
        places.append(replace(config, folder=f"{last}/{name}"))
        places.append(replace(config, folder=last, where=config.where or {SUBJECT: str(name)}))
    for place in places:
        if local_source(place, split, data_dir, evaluated=True) is not None:
            return place
    return None
