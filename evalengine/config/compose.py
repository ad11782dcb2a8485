"""Command-line overrides -> `Config`s, by Hydra's compose API, and where Hydra finds the files.

Hydra's application is not used: it would own argv, logging and exit codes, and write its files (a sweep always leaves
`multirun.yaml`). This package uses Hydra's grammar, groups, search path and type checks. Tasks are files of the shipped
folder, of the user's folders, or of other kinds:

task=./my_task.yaml        a file anywhere, in lm-eval's names or with a `# @package tasks.NAME` line
task=my_task               FOLDER/task/my_task.yaml below a folder of hydra.searchpath, in either form
task=their_task            an entry point of the group `evalengine.tasks`: a Task class with `defaults`
task=lm_eval/their_task    a task, group or tag of the installed lm-eval
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.resources import files
from itertools import islice, product
from os.path import exists, isdir
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from evalengine.config.check import complete_model, completed, config_problems
from evalengine.config.overrides import SEARCHED, literal, names_set, parse, quoted, read_texts, unknown
from evalengine.config.schema import Config
from evalengine.config.shipped import CONF, GROUPS, ONE_OF, available, names_in, package_of, settings_in
from evalengine.errors import ConfigError, listed
from evalengine.util.plain_files import YAML_SUFFIXES, read_yaml
from evalengine.util.plugins import added, load
from evalengine.util.validation import adapter, problems_of, read_as

MAX_RUNS = 1000  # runs of one sweep; each is composed before the first one runs
OTHERS = {  # how a group's files are named that are not among its names
    "model": "; model.path=FOLDER, FILE.gguf or a Hub id takes any other",
    "task": "; ./my_task.yaml: a file of yours; lm_eval/NAME: any of lm-eval's",
}
MERGED = str(files(CONF))  # the folder whose tasks are merged by `settings_in`
TASKS = "evalengine.tasks"  # the group of other packages' entry points
LM_EVAL = "lm_eval/"  # the prefix of names of lm-eval's tasks, groups and tags
PACKAGES = {"task": r"tasks\..+|_global_", "experiment": "_global_"}  # group -> what a file's package must be
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
        if isinstance(written, dict) and isinstance(sequential := written.get("sequential"), dict):
            sequential.pop("seed", None)  # earlier runs have this setting
        read_as(Config, written)
    except (OSError, ValueError) as error:  # a ConfigError among them
        why = listed(getattr(error, "problems", [str(error)]), 5, "; ")
        raise ConfigError(f"{file}: missing, damaged or of another version ({why})") from error
    for override in parsed:
        _set(written, override.key_or_group, override.value())
    keys = {override.key_or_group for override in parsed}
    return _valid(written, [], lambda read: replace(read, model=complete_model(read.model, keys)), selects)


def _set(data: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting by its dotted name; a mapping replaces the one before, as its keys may be labels."""
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
    read = adapter(Config).validate_python
    try:
        config = complete(read(data))
        problems = [*problems, *config_problems(config, selects)]
    except ValidationError as error:
        reported = tuple(problem.partition("=")[0] for problem in problems)  # as no text in UTF-8, say
        problems = [*problems, *(one for one in problems_of(error, unknown=unknown) if not one.startswith(reported))]
        for problem in error.errors(include_url=False):
            _remove(data, problem["loc"])
        with suppress(ValidationError):  # perhaps no others can be checked together
            problems += config_problems(complete(read(data)), selects)
    if problems:
        raise ConfigError(problems)
    return config


def _remove(data: Any, place: Sequence[str | int]) -> None:
    """Take a setting out of nested mappings, or the one above it that is not a mapping."""
    first, *below = place
    if below and isinstance(data.get(first), dict):
        _remove(data[first], below)
    else:
        data.pop(first, None)


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
        data: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=False)
    except NOT_UNDERSTOOD as error:
        raise ConfigError(Source.problems or _explain(error)) from error
    problems = [*Source.problems, *namesakes(chosen, Source.own)]
    if problems := [*problems, *(f"{group}: a run has one {group}; name one" for group in several)]:
        raise ConfigError(problems)
    return data, sweep


def _of_files(choices: tuple[str, ...], folders: tuple[str, ...]) -> tuple[DictConfig, dict[str, str], list[str]]:
    """(what the chosen files set, the sweep of an experiment's file, the groups of which several files are chosen)."""
    # Not `initialize`, which reads the source of every calling frame to find its caller.
    with warnings.catch_warnings(), initialize_config_dir(MERGED, job_name="evalengine", version_base="1.3"):
        warnings.simplefilter("error", UserWarning)  # Hydra warns of a search path that does not exist
        places = [*(re.sub(r"^(file://)?(?=/)", "evalengine://", folder) for folder in folders), "evalengine://"]
        texts = [*choices, f"{SEARCHED}=[{','.join(map(quoted, places))}]"]
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


class Source(ConfigSource):
    """`evalengine://FOLDER`: a folder of groups; `evalengine://`: tasks that are files anywhere, of installed packages,
    or lm-eval's.

    Hydra's sources show a traceback for a YAML mistake, expand aliases until the memory ends, and take a task's file
    without its `# @package` line as settings of all tasks, in silence. A file is read and checked when Hydra requests
    it, and what is wrong is collected, for one list of problems.
    """

    problems: ClassVar[list[str]] = []  # of the files that Hydra requested
    chosen: ClassVar[list[str]] = []  # the tasks that the overrides choose
    own: ClassVar[dict[str, list[str]]] = {}  # a choice that is no shipped task -> the names of its tasks and groups

    @staticmethod
    def scheme() -> str:
        return "evalengine"

    def load_config(self, config_path: str) -> ConfigResult:
        group, name = config_path.split("/", 1) if "/" in config_path else ("", config_path)
        path = self._file(config_path) if self.path else None
        try:
            package, content = self.settings(group, name, path)
        except (OSError, ValueError) as error:
            found = error.problems if isinstance(error, ConfigError) else [f"{path}: {error}" if path else str(error)]
            self.problems.extend(f"{group}={name}: {problem.removeprefix(f'{name}: ')}" for problem in found)
            package, content = "_global_", {}
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(content), {"package": package})

    def settings(self, group: str, name: str, path: Path | None) -> tuple[str | None, dict[str, Any]]:
        """(the package, the settings). path: None for a task that is not a file. Raises OSError, or ValueError
        saying what is wrong with them."""
        if path is None:
            return "_global_", self.of_tasks(name, _tasks_elsewhere(name))
        package = package_of(path)
        if group == "task" and package is None:
            from evalengine.tasks.lm_eval_yaml import is_lm_eval

            if is_lm_eval(read_yaml(path, tags=True)):
                return "_global_", self.of_tasks(name, _tasks_in(path))
        if group == "task" and package is not None and self.path == MERGED:
            content = settings_in(name)  # Hydra takes 1.2 s for a group of 57 files, and this 0.2 s
            for part in () if package == "_global_" else package.split("."):
                content = content[part]
            return package, content
        is_part = "/" in name and name not in self.chosen  # included in a task's file, it needs no package
        return package, _checked(read_yaml(path), package, "" if is_part else group, name)

    def of_tasks(self, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of tasks and groups that a choice adds, as OmegaConf gives them back unchanged."""
        self.own[name] = [*content["tasks"], *content.get("groups", {})]
        settings: dict[str, Any] = literal(content)
        return settings

    def available(self) -> bool:
        return not self.path or Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        return Path(self.path, config_path).is_dir() if self.path else config_path == "task"

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.partition("/")
        if group == "task" and _is_elsewhere(name):
            return not self.path
        return self._file(config_path) is not None if self.path else group == "task" and name in added(TASKS)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return sorted(file.stem for file in Path(self.path, config_path).glob("*.yaml")) if self.path else []

    def _file(self, config_path: str) -> Path | None:
        bare = re.sub(r"\.ya?ml$", "", config_path)
        return next((path for suffix in YAML_SUFFIXES if _is_file(path := Path(self.path, f"{bare}{suffix}"))), None)


class Places(SearchPathPlugin):
    """Has `Source` read the shipped folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.path == MERGED:
                element.path = f"evalengine://{MERGED}"


@lru_cache(None)  # Hydra looks for plugins at the first call
def register() -> None:
    """Adds these plugins to Hydra's."""
    for plugin in (Source, Places):
        Plugins.instance().register(plugin)


def namesakes(chosen: Sequence[str], own: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A sentence for two choices with a task or group of one name: Hydra would make one task with the settings of both.
    Two shipped choices mean the same task by the same name. own: the names of each choice that is not shipped."""
    shipped = [choice for choice in chosen if choice not in own and not _is_elsewhere(choice)]
    seen = {name: choice for choice in shipped for name in (choice, *names_in(choice))}
    for choice in dict.fromkeys(choice for choice in chosen if choice in own):
        taken = [name for name in own[choice] if seen.setdefault(name, choice) != choice]
        if taken:
            name, others = taken[0], "" if len(taken) == 1 else f" (and {len(taken) - 1} more names)"
            fix = "choose one of them" if choice.startswith(LM_EVAL) else "rename one of them"
            yield f"task={choice}: its name is {name}, as is task={seen[name]}'s{others}; {fix}"


def _is_elsewhere(name: str) -> bool:
    """Whether the name is lm-eval's, or a path, and so means no file in Hydra's folders."""
    return name.startswith(LM_EVAL) or (name.endswith(YAML_SUFFIXES) and ("/" in name or _is_file(name)))


def _is_file(path: str | Path) -> bool:
    """Whether there is something to read. False for names that are too long, or contain a null character."""
    return exists(path) and not isdir(path)


def _tasks_elsewhere(name: str) -> dict[str, Any]:
    """`tasks` and `groups` of a choice that is not a file. Raises ConfigError if it cannot be used."""
    if name.startswith(LM_EVAL):
        composed = load("evalengine.integrations.lm_eval_tasks.index:composed")
        theirs: dict[str, Any] = composed(name.removeprefix(LM_EVAL))
        return theirs
    if _is_elsewhere(name):
        path = Path(name).expanduser()
        if not _is_file(path):
            near = difflib.get_close_matches(path.name, [f.name for f in path.parent.glob("*.y*ml")], 2)
            raise ConfigError(f"no such file{f'; did you mean {near[0]}?' if near else ''}")
        return _tasks_in(path)
    from evalengine.tasks.registry import class_defaults

    cls = added(TASKS)[name].value
    settings = asdict(class_defaults(cls, f"the entry point {TASKS} of {name}"))
    return {"tasks": {name: {**settings, "cls": cls}}}


def _tasks_in(file: Path) -> dict[str, Any]:
    """`tasks`, and `groups` if it is a group of lm-eval's form, of a YAML file in either form. Raises ConfigError."""
    from evalengine.tasks.lm_eval_yaml import is_group, read_task

    try:
        package, content = package_of(file), read_yaml(file, tags=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if package is None and is_group(content):
        members: dict[str, Any] = load("evalengine.integrations.lm_eval_tasks.group:read_group")(file)
        return members
    if package is None or not package.startswith("tasks."):
        return {"tasks": dict([read_task(file)])}
    if not isinstance(content, dict) or "defaults" in content:
        raise ConfigError(
            f"{file}: must hold a task's settings and no defaults; a list of tasks is chosen by name, from a folder of "
            "hydra.searchpath"
        )
    return {"tasks": {package.removeprefix("tasks."): content}}


def _checked(content: Any, package: str | None, group: str, name: str) -> dict[str, Any]:
    """The file's settings. Raises ValueError saying what is wrong with them."""
    if content is None and group in PACKAGES:
        raise ValueError("it is empty")
    if not isinstance(content, dict | None):
        raise ValueError("must hold settings, name: value, a line each")
    settings: dict[str, Any] = content or {}
    wanted = PACKAGES.get(group, ".*") if group == "experiment" or {*settings} - {"defaults"} else ".*"
    if not re.fullmatch(wanted, package or ""):
        line_is = f"says '# @package {package}'" if package else "has no '# @package' line"
        line = "_global_" if group == "experiment" else f"tasks.{name}"
        raise ValueError(f"it {line_is}, so its settings would go elsewhere; begin it with '# @package {line}'")
    return settings
