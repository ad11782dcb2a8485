"""Checks settings: each by its type in the schema, then those that contradict each other or lack something here.

And settings that stand for others: `task.` for every task's, a model's path for its name, a dataset's for its commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import fields, is_dataclass, replace
from graphlib import CycleError, TopologicalSorter
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from evalengine.config.schema import LEVELS, MAX_MODEL_NAME, Config, EngineConfig, ModelConfig, Numerics
from evalengine.errors import ConfigError
from evalengine.util.plugins import added, not_installed
from evalengine.util.validation import as_typed, integer, shown

T = TypeVar("T")
API_KEYS = ("EVALENGINE_API_KEY", "OPENAI_API_KEY")  # the variable whose value an endpoint is sent
TRACKERS = ("wandb", "mlflow")  # names of their libraries, and of this package's extras
# Groups of other packages' entry points: trackers for log_to, and what sends requests to addresses of further schemes.
EXPORTS, MODELS = "evalengine.exports", "evalengine.models"
HTTP = ("http", "https")
TEMPLATE_OWN = {"messages", "tools", "documents", "add_generation_prompt"}  # variables that every template is given


def config_problems(config: Config, selects: bool = True) -> list[str]:
    """The contradictions among settings of the right types. selects: whether a task must be selected."""
    problems = [*(_selection_problems(config) if selects else ()), *run_problems(config)]
    problems += numerics_problems(config.batch_invariant, config.numerics)
    return [*problems, *engine_contradictions(config.engine)]


def resolve_numerics(batch_invariant: bool, numerics: str, device_type: str) -> Numerics:
    """The numerics level of a run on `device_type` ("cpu" | "cuda").

    Raises `ConfigError` where the two settings contradict each other, or the device has no such level.
    """
    if problems := list(numerics_problems(batch_invariant, numerics)):
        raise ConfigError(problems)
    if numerics == "native" and device_type != "cuda":
        raise ConfigError(
            f"numerics=native runs on CUDA only, and this run's device is {device_type}: use numerics=exact or auto"
        )
    automatic = "fast" if not batch_invariant else "native" if device_type == "cuda" else "exact"
    level: Any = automatic if numerics == "auto" else numerics
    return level


def numerics_problems(batch_invariant: bool, numerics: str) -> Iterator[str]:
    """Yields what is wrong with the two settings, a sentence each."""
    if numerics not in LEVELS:
        yield f"numerics={as_typed(numerics)}: must be one of {', '.join(LEVELS)}"
    if batch_invariant and numerics == "fast":
        yield "batch_invariant=true contradicts numerics=fast: set batch_invariant=false, or numerics=auto"
    if not batch_invariant and numerics in ("exact", "native"):
        yield f"batch_invariant=false contradicts numerics={numerics}: set batch_invariant=true, or numerics=auto"


def engine_contradictions(engine: EngineConfig) -> Iterator[str]:
    """Yield what contradicts among the engine's settings, whatever the model, a sentence each."""
    default = EngineConfig.kv_cache_memory_fraction
    if engine.gpu_memory_utilization is not None and engine.kv_cache_memory_fraction != default:
        yield "engine.gpu_memory_utilization: set it or engine.kv_cache_memory_fraction, not both"


def run_problems(config: Config) -> Iterator[str]:
    """Yields what contradicts among a run's settings or is missing on this machine, other than tasks and numerics, a
    sentence each. `settings_problems` checks the engine's settings, the Ray integration what depends on Ray
    (`ray_problems`)."""
    cluster, cache, drafts, end = config.cluster, config.cache, config.drafts, config.model.think_end_token
    local, audit, replicas, address = cluster.backend == "local", cluster.audit, cluster.replicas, cluster.address
    variables = config.chat_template_args or {}
    thinks = variables.get("enable_thinking") if config.enable_thinking is None else config.enable_thinking
    problems = (  # (whether it is so, the sentence)
        ((config.sequential.step is None) != (config.sequential.baseline is None),
         "sequential: step and baseline are set together, as `gate BASELINE --step 100 -- SETTINGS` does"),
        (drafts is not None and not isfile(Path(drafts, "records.parquet")),
         f"drafts={drafts}: holds no records.parquet; name the folder of a finished run"),
        (drafts is not None and not local,
         f"drafts={drafts}: replicas make their own guesses; leave it null, or set cluster=local"),
        (drafts is not None and config.engine.speculation == "off",
         f"drafts={drafts}: contradicts engine.speculation=off; leave that at auto"),
        (config.enable_thinking is not None and not config.apply_chat_template,
         "enable_thinking: has no effect without a chat template; set apply_chat_template=true"),
        (variables and not config.apply_chat_template,
         "chat_template_args: has no effect without a chat template; set apply_chat_template=true"),
        (own := sorted(TEMPLATE_OWN & variables.keys()),
         f"chat_template_args: {', '.join(own)}: reserved variables cannot be overridden; remove them"),
        (config.enable_thinking is not None and variables.get("enable_thinking") not in (None, config.enable_thinking),
         "chat_template_args.enable_thinking: contradicts enable_thinking; set one of them"),
        (config.score_unfinished_thinking and end is None,
         "score_unfinished_thinking=true: needs an end of thinking, as model.think_end_token='</think>'"),
        (thinks and end is None,
         "enable_thinking=true: name what ends the thinking, or it would be scored as the answer: write "
         "'model.think_end_token=\"</think>\"', or the token's id"),
        (cache.path is None and cache.audit,
         f"cache.audit={cache.audit}: there is no cache to audit; set cache=FOLDER"),
        (cache.path is not None and (not config.batch_invariant or config.numerics == "fast"),
         f"cache={cache.path}: bits of fast numerics depend on the batch; remove it, or set batch_invariant=true"),
        (local and replicas not in ("auto", 1),
         f"cluster.replicas={shown(replicas)}: several replicas run on Ray; add cluster=ray"),
        (local and address is not None,
         f"cluster.address={as_typed(address)}: it is a Ray cluster's; add cluster=ray"),
        (not local and address is not None and not re.fullmatch(r"auto|[^/\s]+:\d{1,5}", address),
         f"cluster.address={shown(address)}: must be host:port of a Ray cluster, auto, or null"),
        (not local and config.engine.device.startswith("cuda:"),
         f"engine.device={config.engine.device}: Ray chooses each replica's GPUs; set it to cuda or auto"),
        (audit > 0 and not config.batch_invariant,
         f"cluster.audit={audit}: compares bits, which need batch_invariant=true; set that, or cluster.audit=0"),
        (audit > 0 and integer(replicas) == 1,
         f"cluster.audit={audit}: it needs a second replica; set cluster=ray cluster.replicas=2 or more"),
        (config.data_dir is not None and not isdir(config.data_dir or ""),
         f"data_dir={config.data_dir}: no such folder"),
        (not config.output_dir, "output_dir: names no folder; results is the default"),
    )  # fmt: skip
    yield from tracker_problems("log_to", config.log_to)
    yield from (problem for is_wrong, problem in problems if is_wrong)
    for name, folder in (("output_dir", config.output_dir), ("cache", cache.path)):  # neither need exist
        try:
            if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
                yield f"{name}={folder}: exists and is not a folder"
        except OSError as error:  # the name is too long, or a folder above may not be read
            yield f"{name}={folder}: {error.strerror}; name another folder"


def tracker_problems(name: str, tracker: str | None) -> Iterator[str]:
    """Yields what is wrong with a setting that names a tracker: an unknown word, or a library that is not installed."""
    if tracker is None:
        return
    if tracker in TRACKERS:
        if missing := not_installed(tracker, tracker):
            yield f"{name}={tracker}: {missing}"
    elif tracker not in (others := added(EXPORTS)):
        yield f"{name}={as_typed(tracker)}: must be one of {', '.join([*TRACKERS, *others])}"


def address_problems(setting: str, address: str) -> Iterator[str]:
    """Yields what is wrong with the address of an endpoint."""
    url = urlsplit(address)
    if url.username is not None or url.query or url.fragment:  # not repeated: it may hold a key
        yield f"{setting}: no name, key or query belongs into the address; the key is {API_KEYS[0]}'s value"
    elif not url.netloc or (url.scheme not in HTTP and url.scheme not in added(MODELS)):
        yield f"{setting}={address}: must be an address as https://HOST/v1"


def _selection_problems(config: Config) -> Iterator[str]:
    """The problems of the selected tasks, groups and model."""
    if config.model.path in ("", "???"):
        yield "model.path: names no weights; give a folder, a Hub id or a .gguf file"
    if not config.tasks:
        yield "task: no task is selected; name one or more, as in task=gsm8k or 'task=[gsm8k,arc_easy]'"
    for name, task in config.tasks.items():
        if task.cls is None:  # known by nothing but the user's own settings of it
            yield f"tasks.{name}: this task is not selected; add it with task={name} (a task's own file names its cls)"
    for name, group in config.groups.items():
        where = f"groups.{name}"
        if name in config.tasks:
            yield f"{where}: is a task's name, too; rename one of them"
        if missing := [child for child in group.tasks if child not in config.tasks and child not in config.groups]:
            yield f"{where}.tasks: {', '.join(missing)} are not selected; add them to the file's defaults"
        if not group.tasks:
            yield f"{where}.tasks: names no task"
    try:
        TopologicalSorter({name: group.tasks for name, group in config.groups.items()}).prepare()
    except CycleError as error:
        yield f"groups: {' is part of '.join(error.args[1])}; a group must not be part of itself"


def completed(config: Config, keys: Set[str]) -> Config:
    """The configuration with what its settings imply. keys: the settings that the user's overrides name."""
    tasks = {}
    for name, own in config.tasks.items():
        shared, where = config.task.dataset, f"tasks.{name}.dataset"
        given = {item.name for item in fields(shared) if getattr(shared, item.name) or f"{where}.{item.name}" in keys}
        if "path" in given:  # another dataset, for which the shipped configuration and commit mean nothing
            cleared: Any = dict.fromkeys({"name", "revision"} - given)
            own = replace(own, dataset=replace(own.dataset, **cleared))
        tasks[name] = _applied(config.task, own, f"tasks.{name}", keys)
    return replace(config, model=complete_model(config.model, keys), tasks=tasks)


def complete_model(model: ModelConfig, keys: Set[str]) -> ModelConfig:
    """A path given by the user is the only one tried, and its last part names a model without a name; an adapter's last
    part follows."""
    if "model.path" in keys:
        alternatives = model.alternatives if "model.alternatives" in keys else []
        revision = model.revision if "model.revision" in keys else None
        named = {"model", "model.name"} & keys  # otherwise the name is the default model's
        name = model.name if named else name_of_path(model.path)
        model = replace(model, alternatives=alternatives, revision=revision, name=name)
    if model.adapter and "model.adapter" in keys and "model.name" not in keys:
        model = replace(model, name=f"{model.name}+{name_of_path(model.adapter)}"[:MAX_MODEL_NAME])
    return model


def name_of_path(path: str) -> str:
    """The name of a model that has none: the last part of its path."""
    last = re.split(r"[/\\:]", path.rstrip("/\\"))[-1]
    return (Path(path).resolve().name if last in ("", ".", "..") else last).removesuffix(".gguf")


def _applied(shared: T, own: T, where: str, keys: Set[str]) -> T:
    """`own` with the set fields of `shared` (the `task:` node), except those that `tasks.<name>.` overrides named."""
    changes = {}
    for item in fields(shared):  # type: ignore[arg-type]  # both are dataclasses
        value, mine, path = getattr(shared, item.name), getattr(own, item.name), f"{where}.{item.name}"
        if path in keys or value is None:
            continue
        if is_dataclass(value):
            changes[item.name] = _applied(value, mine, path, keys)
        elif str(item.type).startswith("dict"):
            changes[item.name] = mine | {key: text for key, text in value.items() if f"{path}.{key}" not in keys}
        else:
            changes[item.name] = value
    return replace(own, **changes)  # type: ignore[type-var]


def no_model(model: Any, expected: str) -> str:
    """The message about an argument that is no model."""
    if hasattr(model, "save_pretrained"):  # one of transformers
        return (
            f"model: a {type(model).__name__} in memory is not taken; save it and its tokenizer, each by "
            "save_pretrained(FOLDER), and give the folder"
        )
    return f"model={shown(model)}: must be {expected}"
