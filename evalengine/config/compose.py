"""Command-line overrides -> `Config`s, by Hydra's compose API.

Hydra's own application is not used: it would own argv, logging and exit codes, and write files of its own (a sweep
always leaves `multirun.yaml`). This package uses Hydra's grammar, groups, search path and type checks.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from evalengine.config.check import config_problems, read_settings
from evalengine.config.implied import complete_model, completed
from evalengine.config.schema import Config
from evalengine.config.shipped import GROUPS, available
from evalengine.config.sources import Source, register, searched
from evalengine.config.task_files import namesakes
from evalengine.config.texts import read_texts
from evalengine.config.words import first_line, names_set, parse, quoted, unknown, with_folders
from evalengine.errors import ConfigError, listed
from evalengine.util.plain_files import read_yaml

SEARCHED = "hydra.searchpath"
MAX_RUNS = 1000  # runs of one sweep; each is composed before the first one runs
# Errors that Hydra and OmegaConf raise for files and overrides of shapes that they do not expect.
NOT_UNDERSTOOD = (
    *(HydraException, OmegaConfBaseException, UserWarning, ValueError),
    *(TypeError, AttributeError, LookupError, AssertionError, RecursionError),
)


@dataclass(frozen=True)
class Job:
    """One run of a sweep: the overrides that set it apart, and its configuration."""

    overrides: tuple[str, ...]
    config: Config


def compose_jobs(
    overrides: Sequence[str], multirun: bool = False, settings: Mapping[str, Any] | None = None
) -> list[Job]:
    """The validated configurations that the overrides describe: one, or a sweep's product.

    An experiment sweeps the settings of its file, less those that the overrides name, and needs no `multirun`.
    settings: further ones by their dotted names, with Python's values, which hold over the files'.
    Raises `ConfigError` for bad grammar, unknown settings, wrong types and settings that contradict each other.
    """
    sweeps = multirun or experiment_name(overrides) is not None
    parsed = parse(with_folders(parse(overrides, sweeps)), sweeps)
    if experiment_name(overrides):
        parsed = [*_experiment_sweep(parsed), *parsed]
    if (count := math.prod(map(_count, parsed))) > MAX_RUNS:
        raise ConfigError(f"{count:,} runs: a sweep has at most {MAX_RUNS:,}; sweep fewer values, or in several parts")
    choices = [_choices(override) for override in parsed]
    jobs = []
    for chosen in product(*choices):
        config = _composed(list(chosen), settings or {})
        varied = tuple(text for text, options in zip(chosen, choices, strict=True) if len(options) > 1)
        jobs.append(Job(varied, config))
    return jobs


def experiment_name(overrides: Sequence[str]) -> str | None:
    """X of `experiment=X`; None without one. Raises `ConfigError` for more than one, and for bad grammar."""
    parsed = parse([text for text in overrides if re.match(r"\+?experiment=", text)], multirun=True)
    names = {override.get_value_string().strip() for override in parsed} - {"null"}
    several = any(o.is_sweep_override() or isinstance(o.value(), list | dict) for o in parsed)
    if len(names) > 1 or several:
        raise ConfigError(f"experiment={','.join(sorted(names))}: name one experiment; each is a sweep of its own")
    return next((str(override.value()) for override in parsed if override.value() is not None), None)


def _experiment_sweep(parsed: list[Override]) -> list[Override]:
    """The sweep of the chosen experiment's file, less the settings that the user's own overrides name."""
    named = {override.key_or_group for override in parsed}
    _, hydra = _merged(OverridesParser.create().parse_overrides([next(_texts(override)) for override in parsed]))
    sweep = {str(name): str(values) for name, values in (hydra.sweeper.get("params") or {}).items()}
    return parse([f"{name}={values}" for name, values in sweep.items() if name not in named], multirun=True)


COMPUTED_AGAIN = ("resume=auto", "cache=null", "cache.audit=0")  # no answer is read or kept


def read_config(file: Path, overrides: Sequence[str] = (), selects: bool = True) -> Config:
    """The validated configuration of a `config.yaml`, with single settings overridden (no groups, no `task.` node).
    selects: whether it must select a task; those of served runs select none.

    Raises `ConfigError` if the file is missing or no configuration, and as `compose_jobs` does.
    """
    parsed = parse(overrides, multirun=False)
    try:
        written = read_yaml(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: missing, damaged or of another version ({error})") from error
    if isinstance(written, dict) and isinstance(in_steps := written.get("sequential"), dict):
        in_steps.pop("seed", None)  # all earlier runs have this setting, which is removed
    for override in parsed if isinstance(written, dict) else []:
        _set(written, override.key_or_group, override.value())
    config, problems = read_settings(Config, written)
    if problems:
        raise ConfigError(f"{file}: damaged or of another version ({listed(problems, 5, '; ')})")
    keys = {override.key_or_group for override in parsed}
    config, problems = config_problems(
        config, lambda read: replace(read, model=complete_model(read.model, keys)), selects
    )
    if problems:
        raise ConfigError(problems)
    return config


def _set(data: dict[str, Any], name: str, value: Any) -> None:
    """Puts a setting into nested mappings by its dotted name."""
    *above, last = name.split(".")
    for part in above:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    data[last] = value


def _count(override: Override) -> int:
    """How many values a sweep has, computed without listing them; 1 if the override is no sweep."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return 1
    start, stop, step = (float(part or 0) for part in (value.start, value.stop, value.step))
    if not all(map(math.isfinite, (start, stop, step))) or step == 0:
        raise ConfigError(f"{override.input_line}: from {start} by steps of {step} nothing reaches {stop}")
    return max(0, math.ceil((stop - start) / step))


def _choices(override: Override) -> list[str]:
    """The override itself, or one override for each value of its sweep."""
    choices = list(_texts(override))
    if not choices:
        raise ConfigError(f"{override.input_line}: sweeps no value at all")
    return choices


def _texts(override: Override) -> Iterator[str]:
    if not override.is_sweep_override():
        yield str(override.input_line)
        return
    key = override.get_key_element()
    try:
        for value in override.sweep_string_iterator():
            yield f"{key}={value}"
    except HydraException as error:  # interval() and glob() cannot be swept
        raise ConfigError(f"{override.input_line}: only lists, choice() and range() can be swept") from error


def _composed(overrides: list[str], settings: Mapping[str, Any]) -> Config:
    parsed = OverridesParser.create().parse_overrides(overrides)
    data, _ = _merged(parsed)
    named = {name for override in parsed for name in names_set(override.key_or_group, override.value())}
    for name, value in settings.items():
        _set(data, name, value)
    if problems := list(_not_selected(data, named | {*settings}, overrides)):
        raise ConfigError(problems)
    data = read_texts(data, named | {*settings}, problems)
    keys = named | {override.key_or_group for override in parsed} | {*settings}
    config, wrong = config_problems(data, partial(completed, keys=keys))
    if problems := [*problems, *map(_suggested, wrong)]:
        raise ConfigError(problems)
    return config


def _merged(parsed: Sequence[Override]) -> tuple[dict[str, Any], Any]:
    """(the values that Hydra composes of `conf/` and the overrides, Hydra's own node)."""
    register()
    chosen = [name for override in parsed if override.key_or_group == "task" for name in _listed(override)]
    Source.problems, Source.own, Source.chosen = [], {}, chosen
    folders = [place for override in parsed if override.key_or_group == SEARCHED for place in _listed(override)]
    texts = [_forced(override) for override in parsed if override.key_or_group != SEARCHED]
    try:
        with warnings.catch_warnings(), initialize(config_path=None, version_base="1.3", job_name="evalengine"):
            warnings.simplefilter("error", UserWarning)  # Hydra warns of a search path that does not exist
            texts.append(f"{SEARCHED}=[{','.join(map(quoted, searched(folders)))}]")
            node = compose("config", overrides=texts, return_hydra_config=True)
        hydra = OmegaConf.create({"hydra": OmegaConf.to_container(node.hydra, resolve=False)}).hydra
        with open_dict(node):
            del node["hydra"]  # only Hydra's own application fills in its values
        data = OmegaConf.to_container(node, resolve=True, throw_on_missing=False)
    except NOT_UNDERSTOOD as error:
        raise ConfigError(Source.problems or _explain(error)) from error
    if problems := [*Source.problems, *namesakes(chosen, Source.own)]:
        raise ConfigError(problems)
    assert isinstance(data, dict)
    return {str(name): value for name, value in data.items()}, hydra


def _listed(override: Override) -> list[str]:
    """The names that an override chooses."""
    value = override.value()
    return [str(name) for name in (value if isinstance(value, list) else [value]) if name is not None]


def _forced(override: Override) -> str:
    """The override's text for Hydra. `conf/` holds few of the settings, and Hydra sets others only where `++` says so;
    whether there is such a setting is said by the schema."""
    text, key = str(override.input_line), override.key_or_group
    is_choice = key in GROUPS and not isinstance(override.value(), dict)
    if is_choice or key.startswith("hydra") or override.is_delete():
        return text
    return f"++{text.lstrip('+')}"


def _not_selected(data: Mapping[str, Any], named: Set[str], overrides: Sequence[str]) -> Iterator[str]:
    """A sentence for each task of which nothing is known but what the overrides set."""
    tasks = data.get("tasks")
    chosen = [name for text in overrides if text.startswith("task=") for name in text[5:].strip("[]").split(",")]
    for name, task in tasks.items() if isinstance(tasks, dict) else []:
        own = {key.split(".")[2] for key in named if key.startswith(f"tasks.{name}.")}
        if own and isinstance(task, dict) and {*task} <= own - {"cls"}:
            cure = f"'task=[{','.join([*chosen, name])}]'" if chosen else f"task={name}"
            yield f"tasks.{name}: this task is not selected; add it with {cure}"


def _suggested(problem: str) -> str:
    """A problem with an unknown setting with the name that is near."""
    name, _, said = problem.partition(": ")
    return unknown(name) if said == "no such setting" else problem


def _explain(error: Exception) -> str:
    """Hydra's and OmegaConf's errors in one line that names the setting and, where one is near, the right name."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.partition("/")
        return _no_such_file(group, name, error.options)
    if isinstance(error, InterpolationResolutionError) and error.full_key:
        return f"{error.full_key}: {first_line(error)}"
    message = first_line(error).removeprefix("Error merging override ")
    return f"{message}: {first_line(error.__cause__)}" if error.__cause__ else message


def _no_such_file(group: str, name: str, options: Sequence[str] | None) -> str:
    """options: the names that the group has, if Hydra says them."""
    if group == "task" and re.search(r"/|\.\w+$", name) and not name.startswith("lm_eval/"):
        return (
            f"task={name}: no such task; a task's file is YAML: write task=./my_task.yaml, and name your rows in it, "
            f"as in dataset_path: {name} (tasks/README.md)"
        )
    options, wanted = options or available(group), name.lower()
    if group == "model":
        wanted = wanted.rstrip("/").rpartition("/")[2]  # of a Hub id
    near = [wanted] if wanted in options else difflib.get_close_matches(wanted, options, 2, 0.7)
    near = near or [o for o in options if wanted and o.startswith(wanted)]
    near = near or [o for o in options if difflib.get_close_matches(wanted, [o[: len(wanted) + 1]], 1, 0.8)]
    near += [f"model.path={name}"] if group == "model" and "/" in name else []
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    own = {
        "model": "; model.path=FOLDER, FILE.gguf or a Hub id takes any other",
        "task": "; lm_eval/NAME: any of lm-eval's",
    }
    return f"{group}={name}: no such {group}; {hint}there are: {', '.join(options) or 'none'}{own.get(group, '')}"
