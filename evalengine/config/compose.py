"""Command-line overrides -> `Config`s, by Hydra's compose API.

Hydra's own application is not used: it would own argv, logging and exit codes, and write files of its own (a sweep
always leaves `multirun.yaml`). This package uses Hydra's grammar, groups, search path and type checks.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, RangeSweep
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from evalengine.config.arguments import adapter, problems_of, read_as
from evalengine.config.check import complete_model, completed, config_problems
from evalengine.config.schema import Config
from evalengine.config.shipped import GROUPS, ONE_OF, available
from evalengine.config.sources import MERGED, Source, namesakes, register, searched
from evalengine.config.words import SEARCHED, names_set, parse, quoted, read_texts, unknown
from evalengine.errors import ConfigError, listed
from evalengine.util.plain_files import read_yaml

MAX_RUNS = 1000  # runs of one sweep; each is composed before the first one runs
COMPUTED_AGAIN = ("resume=auto", "cache=null", "cache.audit=0")  # no answer is read or stored
OTHERS = {  # how a group's files are named that are not among its names
    "model": "; model.path=FOLDER, FILE.gguf or a Hub id takes any other",
    "task": "; ./my_task.yaml: a file of yours; lm_eval/NAME: any of lm-eval's",
}
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
    experiment = experiment_name(overrides)
    parsed = parse(overrides, multirun or experiment is not None)
    if experiment is not None:
        parsed = [*_experiment_sweep(parsed), *parsed]
    choices = [_choices(override) for override in parsed]
    if math.prod(map(len, choices)) > MAX_RUNS:
        raise ConfigError(f"a sweep has at most {MAX_RUNS:,} runs; sweep fewer values, or in several parts")
    jobs = []
    for chosen in product(*choices):
        varied = tuple(text for text, options in zip(chosen, choices, strict=True) if len(options) > 1)
        jobs.append(Job(varied, _composed(chosen, settings or {})))
    return jobs


def experiment_name(overrides: Sequence[str]) -> str | None:
    """X of `experiment=X`; None without one. Raises `ConfigError` for more than one, and for bad grammar."""
    parsed = parse([text for text in overrides if re.match(r"\+?experiment=", text)], multirun=True)
    if swept := [override for override in parsed if override.is_sweep_override()]:
        raise ConfigError(f"{swept[0].input_line}: name one experiment; each is a separate sweep")
    return str(parsed[0].value()) if parsed else None


def _experiment_sweep(parsed: list[Override]) -> list[Override]:
    """The sweep of the chosen experiment's file, less the settings that the user's own overrides name."""
    named = {override.key_or_group for override in parsed}
    _, sweep = _merged(OverridesParser.create().parse_overrides([_choices(override)[0] for override in parsed]))
    return parse([f"{name}={values}" for name, values in sweep.items() if name not in named], multirun=True)


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
    if isinstance(written, dict) and isinstance(sequential := written.get("sequential"), dict):
        sequential.pop("seed", None)  # earlier runs have this setting
    try:
        read_as(Config, written)
    except ConfigError as error:
        raise ConfigError(f"{file}: damaged or of another version ({listed(error.problems, 5, '; ')})") from error
    for override in parsed:
        _set(written, override.key_or_group, override.value())
    keys = {override.key_or_group for override in parsed}
    return _valid(written, [], lambda read: replace(read, model=complete_model(read.model, keys)), selects)


def _set(data: dict[str, Any], name: str, value: Any) -> None:
    """Puts a setting into nested mappings by its dotted name."""
    *above, last = name.split(".")
    for part in above:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    data[last] = value


def _choices(override: Override) -> list[str]:
    """The override itself, or one override for each value of its sweep, at most one more than a sweep may have."""
    value = override.value()
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not isinstance(value, ChoiceSweep | RangeSweep) or (isinstance(value, RangeSweep) and value.shuffle):
        raise ConfigError(f"{override.input_line}: only lists, choice() and range() can be swept")
    try:
        values = [*islice(override.sweep_string_iterator(), MAX_RUNS + 1)]
    except (ValueError, ArithmeticError) as error:  # a range with a step of 0
        raise ConfigError(f"{override.input_line}: {error}") from error
    if not values:
        raise ConfigError(f"{override.input_line}: sweeps no value at all")
    return [f"{override.get_key_element()}={value}" for value in values]


def _composed(overrides: Sequence[str], settings: Mapping[str, Any]) -> Config:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    data, _ = _merged(parsed)
    for name, value in settings.items():
        _set(data, name, value)
    typed = {*settings} | {name for override in parsed for name in names_set(override.key_or_group, override.value())}
    problems: list[str] = []
    data = read_texts(data, typed, problems)
    keys = typed | {override.key_or_group for override in parsed}
    return _valid(data, problems, partial(completed, keys=keys))


def _valid(
    data: dict[str, Any], problems: list[str], complete: Callable[[Config], Config], selects: bool = True
) -> Config:
    """The configuration of plain values. Raises ConfigError with all `problems`: those given, unknown settings, wrong
    values, and contradictions between the other settings."""
    for last in (False, True):
        try:
            config = complete(adapter(Config).validate_python(data))
            problems = [*problems, *config_problems(config, selects)]
            break
        except ValidationError as error:
            if last:  # no settings are left that could be checked together
                break
            missing = ": no such setting"
            wrong = problems_of(error)
            problems = [*problems, *(unknown(p.removesuffix(missing)) if p.endswith(missing) else p for p in wrong)]
            for problem in error.errors(include_url=False):
                _remove(data, problem["loc"])
    if problems:
        raise ConfigError(problems)
    return config


def _remove(data: Any, place: Sequence[str | int]) -> None:
    """Takes a setting out of nested mappings, or the one above it that is not a mapping."""
    *above, last = place
    for part in above:
        if not isinstance(data.get(part), dict):
            last = part
            break
        data = data[part]
    data.pop(last, None)


def _merged(parsed: Sequence[Override]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the values that Hydra composes of `conf/` and the overrides, the sweep of an experiment's file)."""
    register()
    chosen = [name for override in parsed if override.key_or_group == "task" for name in _listed(override)]
    Source.problems, Source.own, Source.chosen = [], {}, chosen
    folders = [place for override in parsed if override.key_or_group == SEARCHED for place in _listed(override)]
    choices = [one for one in parsed if one.key_or_group in GROUPS and not isinstance(one.value(), dict)]
    # `conf/` has few of the settings; the schema knows whether there is such a setting.
    others = [one if one.is_delete() else replace(one, type=OverrideType.FORCE_ADD)
              for one in parsed if one not in choices and one.key_or_group != SEARCHED]  # fmt: skip
    shipped = not folders and all(name in available(one.key_or_group) for one in choices for name in _listed(one))
    try:
        compose_files = _of_shipped_files if shipped else _of_files
        node, sweep, several = compose_files(tuple(str(one.input_line).lstrip("+") for one in choices), tuple(folders))
        if Source.problems:  # a file that could not be read counts as empty: the next call reads it again
            _of_shipped_files.cache_clear()
        node = deepcopy(node)
        ConfigLoaderImpl._apply_overrides_to_config(others, node)
        data = OmegaConf.to_container(node, resolve=True, throw_on_missing=False)
    except NOT_UNDERSTOOD as error:
        raise ConfigError(Source.problems or _explain(error)) from error
    problems = [*Source.problems, *namesakes(chosen, Source.own)]
    if problems := [*problems, *(f"{group}: a run has one {group}; name one" for group in several)]:
        raise ConfigError(problems)
    assert isinstance(data, dict)
    return {str(name): value for name, value in data.items()}, sweep


def _of_files(choices: tuple[str, ...], folders: tuple[str, ...]) -> tuple[DictConfig, dict[str, str], list[str]]:
    """(what the chosen files set, the sweep of an experiment's file, the groups of which several files are chosen)."""
    # Not `initialize`, which reads the source of every calling frame to find its caller.
    with warnings.catch_warnings(), initialize_config_dir(MERGED, job_name="evalengine", version_base="1.3"):
        warnings.simplefilter("error", UserWarning)  # Hydra warns of a search path that does not exist
        texts = [*choices, f"{SEARCHED}=[{','.join(map(quoted, searched(folders)))}]"]
        node = compose("config", overrides=texts, return_hydra_config=True)
    sweep = {str(name): str(values) for name, values in (node.hydra.sweeper.get("params") or {}).items()}
    # Hydra names no choice of a group for a list, whose files it mixes.
    several = [group for group in ONE_OF if group not in node.hydra.runtime.choices]
    with open_dict(node):
        del node["hydra"]  # only Hydra's own application fills in its values
    return node, sweep, several


_of_shipped_files = lru_cache(64)(_of_files)  # They do not change. Hydra takes 65 ms of the 80 ms of a composition.


def _listed(override: Override) -> list[str]:
    """The names that an override chooses."""
    value = override.value()
    return [str(name) for name in (value if isinstance(value, list) else [value]) if name is not None]


def _explain(error: Exception) -> str:
    """Hydra's and OmegaConf's errors in one line; for a missing file also the name that is near."""
    if not isinstance(error, MissingConfigException) or not error.missing_cfg_file:
        return ": ".join(" ".join(str(one).split()) for one in (error, error.__cause__) if one is not None)
    group, _, name = error.missing_cfg_file.partition("/")
    options, wanted = error.options or available(group), name.rstrip("/").rpartition("/")[2].lower()
    near = difflib.get_close_matches(wanted, options, 1, 0.7)
    near = near or [o for o in options if difflib.get_close_matches(wanted, [o[: len(wanted) + 1]], 1, 0.8)]
    near += [f"model.path={name}"] if group == "model" and "/" in name else []
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{group}={name}: no such {group}; {hint}there are: {', '.join(options) or 'none'}{OTHERS.get(group, '')}"
