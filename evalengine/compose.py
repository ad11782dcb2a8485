"""Command-line overrides -> `Config`s, by Hydra's compose API.

Hydra's own application is not used: it would own argv, logging and exit codes, and write files of its own (a sweep
always leaves `multirun.yaml`). What is left of Hydra is its grammar, groups, search path and type checks.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from evalengine.config import Config, validate
from evalengine.errors import ConfigError

CONF = "evalengine.conf"


@dataclass(frozen=True)
class Job:
    """One run of a sweep: what sets it apart, and its configuration."""

    overrides: tuple[str, ...]
    config: Config


def available(group: str) -> list[str]:
    """The names of a configuration group ("task", "model", "engine"), sorted."""
    folder = files(CONF) / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def compose_jobs(overrides: Sequence[str], multirun: bool = False) -> list[Job]:
    """The validated configurations that the overrides describe: one, or a sweep's product.

    Raises `ConfigError` for bad grammar, unknown settings, wrong types and settings that contradict each other.
    """
    parsed = _parse(overrides, multirun)
    choices = [_choices(override) for override in parsed]
    jobs = []
    for chosen in product(*choices):
        config = _compose(list(chosen))
        validate(config)
        varied = tuple(text for text, options in zip(chosen, choices, strict=True) if len(options) > 1)
        jobs.append(Job(varied, config))
    return jobs


def _choices(override: Override) -> list[str]:
    """The override itself, or one override a value of its sweep."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key = override.get_key_element()
    try:
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException as error:  # interval(), glob()
        raise ConfigError(f"{override.input_line}: only lists, choice() and range() can be swept") from error


def _parse(overrides: Sequence[str], multirun: bool) -> list[Override]:
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[str] = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            problems.append(f"{text}: {_first_line(error)} (quote a value that holds = , or brackets: key='value')")
            continue
        parsed.append(override)
        problems.extend(_override_problems(override, multirun))
    if problems:
        raise ConfigError(problems)
    return parsed


def _override_problems(override: Override, multirun: bool) -> Iterator[str]:
    key = override.key_or_group
    if key.startswith("hydra."):
        if key != "hydra.searchpath":
            yield f"{key}: Hydra's own settings have no effect here, except hydra.searchpath"
        return
    known = known_keys()
    if not any(re.fullmatch(pattern, key) for pattern in known.values()):
        names = [name for name in known if name.split(".")[-1] == key.split(".")[-1] and "<" not in name]
        names = names or difflib.get_close_matches(key, known, 2, 0.7)
        yield f"{key}: no such setting" + (f"; did you mean {' or '.join(names)}?" if names else "; see --help")
    if override.is_sweep_override() and not multirun:
        value = override.get_value_string()
        yield f"{key}={value}: for one run a value add -m; for a list in one run write {key}=[{value}]"


@lru_cache(None)
def known_keys() -> dict[str, str]:
    """Every setting's dotted name -> a pattern that matches it (`tasks.<name>.split` stands for any task)."""

    def walk(kind: Any, prefix: str) -> Iterator[str]:
        for name, hint in get_type_hints(kind).items():
            yield prefix + name
            if is_dataclass(hint):
                yield from walk(hint, f"{prefix}{name}.")
            elif get_origin(hint) is dict:
                inner = f"{prefix}{name}.<name>"
                yield inner
                if is_dataclass(get_args(hint)[1]):
                    yield from walk(get_args(hint)[1], inner + ".")

    return {name: re.escape(name).replace("<name>", r"[^.]+") for name in walk(Config, "")}


def _compose(overrides: list[str]) -> Config:
    keys = {OverridesParser.create().parse_override(text).key_or_group for text in overrides}
    _register_schema()
    try:
        with warnings.catch_warnings(), initialize_config_module(CONF, version_base="1.3", job_name="evalengine"):
            warnings.simplefilter("error", UserWarning)  # a search path that does not exist
            composed = compose("config", overrides=overrides)
        data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except (HydraException, OmegaConfBaseException, UserWarning, ValueError) as error:
        raise ConfigError(_explain(error, overrides)) from error
    assert isinstance(data, dict)
    _complete_model(data["model"], keys)
    for name, task in data["tasks"].items():
        _complete_dataset(task["dataset"], data["task"]["dataset"], f"tasks.{name}.dataset", keys)
        data["tasks"][name] = _apply(data["task"], task, f"tasks.{name}", keys)
    config: Config = _freeze(Config, data)
    return config


@lru_cache(None)
def _register_schema() -> None:
    ConfigStore.instance().store("schema", _mutable(Config))


def _complete_model(model: dict[str, Any], keys: set[str]) -> None:
    """A path given by the user is the only one tried; a model without a name is called by its path's last part."""
    if model["path"] in ("", "???"):
        raise ConfigError("model.path: names no weights; give a folder, a Hub id or a .gguf file")
    if "model.path" in keys:
        model["alternatives"] = model["alternatives"] if "model.alternatives" in keys else []
        model["revision"] = model["revision"] if "model.revision" in keys else None
    if "model.path" in keys and not {"model", "model.name"} & keys:  # the default model's name is not this path's
        last = re.split(r"[/\\:]", model["path"].rstrip("/\\"))[-1]
        model["name"] = (Path(model["path"]).resolve().name if last in ("", ".", "..") else last).removesuffix(".gguf")


def _complete_dataset(own: dict[str, Any], shared: dict[str, Any], where: str, keys: set[str]) -> None:
    """The shipped configuration and commit mean nothing to a dataset that the user names."""
    given = {name for name in shared if shared[name] or f"{where}.{name}" in keys}
    if "path" in given:
        own.update(dict.fromkeys({"name", "revision"} - given))


def _apply(shared: dict[str, Any], own: dict[str, Any], where: str, keys: set[str]) -> dict[str, Any]:
    """`own` with the set fields of `shared` (the `task:` node), except those that `tasks.<name>.` overrides named."""
    merged = dict(own)
    for name, value in shared.items():
        path = f"{where}.{name}"
        if path in keys or value is None:
            continue
        if isinstance(value, dict):
            merged[name] = _apply(value, own.get(name, {}), path, keys)
        else:
            merged[name] = value
    return merged


def _explain(error: Exception, overrides: list[str]) -> str:
    """Hydra's and OmegaConf's errors in one line that names the setting and, where one is near, the right name."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.partition("/")
        near = difflib.get_close_matches(name, error.options, 2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        return f"{group}={name}: no such {group}; {hint}There are: {', '.join(error.options) or 'none'}"
    message = _first_line(error)
    if named := re.match(r"Could not override 'tasks\.([^.']+)", message):
        return f"tasks.{named[1]}: this task is not selected; add it with task={named[1]}"
    if "must be a string or a list" in message:
        empty = [text for text in overrides if text.endswith("=null")]
        return f"{' '.join(empty)}: a group needs a name; see --help for those there are"
    message = message.removeprefix("Error merging override ")
    return f"{message}: {_first_line(error.__cause__)}" if error.__cause__ else message


def _first_line(error: BaseException) -> str:
    first, *rest = str(error).split("\n")
    return f"{first} {rest[0]}" if rest and first.endswith(":") else first


@lru_cache(None)
def _mutable(kind: Any) -> Any:
    """The same dataclass, not frozen, nested ones included: OmegaConf makes nodes of frozen ones read-only, and a
    read-only schema accepts no value."""
    if get_origin(kind) is dict:
        return dict[str, _mutable(get_args(kind)[1])]  # type: ignore[misc]
    if not is_dataclass(kind):
        return kind
    hints = get_type_hints(kind)
    members: list[tuple[str, Any, Any]] = []
    for item in fields(kind):
        factory: Any = item.default_factory
        default = field(default=item.default) if factory is MISSING else field(default_factory=_mutable(factory))
        members.append((item.name, _mutable(hints[item.name]), default))
    assert isinstance(kind, type)
    return make_dataclass(kind.__name__, members)


def _freeze(kind: Any, data: Any) -> Any:
    if get_origin(kind) is dict:
        return {name: _freeze(get_args(kind)[1], value) for name, value in data.items()}
    if not is_dataclass(kind):
        return data
    hints = get_type_hints(kind)
    return kind(**{name: _freeze(hints[name], value) for name, value in data.items()})  # type: ignore[operator]
