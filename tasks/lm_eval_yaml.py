"""A task's YAML file in lm-evaluation-harness's names (0.4.13, `TaskConfig`) -> the settings of our `TaskConfig`.

Keys that such a file sets and this package does not have are refused, all of them at once: a key that is ignored in
silence would give other prompts or other scores under the same name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evalengine.config.schema import LM_EVAL_LENGTHS, LM_EVAL_OWN, TaskConfig, TemplateConfig
from evalengine.errors import ConfigError
from evalengine.tasks.filters import Unbuilt, filter_problems
from evalengine.tasks.instance import OUTPUT_TYPES
from evalengine.tasks.metric import metric_problems
from evalengine.util.plain_files import Tagged, read_yaml
from evalengine.util.plugins import load

TEXTS = ("doc_to_text", "doc_to_target", "doc_to_choice")
SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
# lm-eval's keys that change neither prompts nor scores.
WITHOUT_EFFECT = ("tag", "should_decontaminate", "doc_to_decontamination_query")
KNOWN = {
    *("task", "task_alias", "include", "dataset_path", "dataset_name", "dataset_kwargs", "description", "output_type"),
    *("num_fewshot", "target_delimiter", "fewshot_delimiter", "fewshot_config", "generation_kwargs", "repeats"),
    *("gen_prefix", "filter_list", "metric_list", "metadata", *TEXTS, *SPLITS, *LM_EVAL_OWN, *WITHOUT_EFFECT),
}
NOT_BUILT = {  # key -> the values that have no effect
    "process_docs": (None,),
    "process_results": (None,),
    "custom_dataset": (None,),
    "class": (None,),
    "use_prompt": (None,),
    "doc_to_image": (None,),
    "doc_to_audio": (None,),
    "unsafe_code": (None, False),
}
NOBODY_S = ("use_prompt", "doc_to_image", "doc_to_audio")  # those that lm-eval would not run on this engine, either
ROWS_BY_CODE = ("custom_dataset", "class")  # keys whose Python code gives the rows
FEWSHOT = ("sampler", "split", "samples", *TEXTS, "target_delimiter", "fewshot_delimiter")
GENERATION_KWARGS = ("until", "do_sample", "temperature", "top_k", "top_p", *LM_EVAL_LENGTHS)
BUILDERS = ("json", "csv", "parquet", "arrow", "text")  # builders whose rows are in dataset_kwargs.data_files
MAX_INCLUDES = 10
BY_LM_EVAL = "evalengine.integrations.lm_eval_tasks.index:file_settings"


def is_lm_eval(content: Any) -> bool:
    """Whether a file's content is a task in lm-eval's names: this package has no settings of these names."""
    return isinstance(content, dict) and bool({*content} & {"task", "include", "dataset_path", "doc_to_text"})


def is_group(content: Any) -> bool:
    """Whether a file's content is a group in lm-eval's names."""
    return isinstance(content, dict) and "group" in content


def read_task(file: Path) -> tuple[str, dict[str, Any]]:
    """(the task's name, its settings as those of `TaskConfig`). What lm-eval has and this package has not is left to
    the installed lm-eval, with the whole task: `evalengine.integrations.lm_eval_tasks`.

    Raises ConfigError: the file cannot be read, or uses what is not built; one sentence names all of that.
    """
    content = _read(file, ())
    name = content.get("task") or file.stem
    problems = list(_problems(content))
    theirs = bool(problems) and all(isinstance(problem, Unbuilt) for problem in problems) and "cls" not in content
    if theirs and find_spec("lm_eval") is not None:
        return str(name), _by_lm_eval(content, file, str(name))
    if problems:
        install = "let lm-eval run it (pip install 'evalengine[lm-eval]'), " if theirs else ""
        raise ConfigError(
            f"{file}: it uses what is not built: {'; '.join(problems)}. Take these out, {install}or name a class "
            "of your own (cls: mypackage.module:Class)"
        )
    given = {key: content.get(key) for key in ("fewshot_delimiter", "target_delimiter", "filter_list", "metric_list")}
    fewshot = {key: value for key, value in (content.get("fewshot_config") or {}).items() if key in FEWSHOT}
    fewshot.pop("split", None)
    split, exemplars = evaluated_split(content), exemplar_split(content)
    settings = {
        "cls": content.get("cls") or "templated:Templated",
        "alias": content.get("task_alias"),
        "version": (content.get("metadata") or {}).get("version"),
        "dataset": _dataset(content, str(name), file.parent, {split, exemplars}),
        "split": split,
        "fewshot_split": exemplars,
        "num_fewshot": content.get("num_fewshot"),
        "description": content.get("description"),
        "generation": generation_of(content.get("generation_kwargs") or {}),
        **({"gen_prefix": content["gen_prefix"]} if content.get("gen_prefix") else {}),
        **({} if content.get("repeats") in (None, 1) else {"repeats": content["repeats"]}),
        "template": {
            **{key: content.get(key) for key in ("output_type", *TEXTS)},
            **{key: value for key, value in given.items() if value is not None},
            "fewshot_config": fewshot,
            # As lm-eval does, also where neither split is given.
            "spare_exemplar": exemplar_split(content, named=True) == content.get("test_split"),
        },
        **{key: content[key] for key in LM_EVAL_OWN[1:] if key in content},
    }
    return str(name), settings


def _by_lm_eval(content: dict[str, Any], file: Path, name: str) -> dict[str, Any]:
    """The settings of a task that lm-eval's own code runs, over the rows that the file names. Raises ConfigError."""
    splits = {evaluated_split(content), exemplar_split(content)}
    by_code = any(content.get(key) is not None for key in ROWS_BY_CODE)
    dataset = {} if by_code else _dataset(content, name, file.parent, splits)
    own = {key: content[key] for key in LM_EVAL_OWN[1:] if key in content}
    return {**load(BY_LM_EVAL)(content, dataset, file), **own}


def installed(config: TaskConfig) -> tuple[TemplateConfig, str | None]:
    """(the template, the description), with null texts and exemplars read from the file of the installed lm-eval that
    the template names: prompts by other authors are not part of this project.

    Raises ValueError if lm-eval is not installed, or its file is of another version.
    """
    given = config.template
    if given.lm_eval_file is None:
        return given, config.description
    content = installed_content(given.lm_eval_file)
    own = {key: content.get(key) for key in TEXTS if getattr(given, key) is None}
    samples = (content.get("fewshot_config") or {}).get("samples")
    few = given.fewshot_config
    if few.samples is None and isinstance(samples, Tagged):
        samples = returned(samples, installed_file(given.lm_eval_file).parent)
    if few.samples is None and isinstance(samples, list):
        few = replace(few, samples=samples)
    description = content.get("description") if config.description is None else config.description
    if wrong := [str(value) for value in (description, *own.values()) if isinstance(value, Tagged)]:
        raise ValueError(f"lm_eval_file={given.lm_eval_file}: holds {', '.join(wrong)}, which is Python code")
    return replace(given, fewshot_config=few, **own), description


def installed_file(name: str) -> Path:
    """A file below the installed lm-eval's tasks/. Raises ValueError without lm-eval."""
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"lm_eval_file={name}: is read from lm-eval, which is not installed: pip install 'evalengine[lm-eval]'"
        )
    return Path(spec.submodule_search_locations[0]) / "tasks" / name


def installed_content(name: str) -> dict[str, Any]:
    """The settings of a task's file of the installed lm-eval. Raises ValueError without lm-eval or that file."""
    try:
        return _read(installed_file(name), ())
    except ConfigError as error:
        raise ValueError(f"lm_eval_file={name}: {error}") from error


def _read(file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's settings, merged over the settings of the file that it includes."""
    if len(seen) > MAX_INCLUDES or file.resolve() in seen:
        raise ConfigError(f"{seen[0]}: its includes go round in a circle, or are more than {MAX_INCLUDES}")
    try:
        content = read_yaml(file, tags=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file}: must hold a task's settings, name: value, a line each")
    include = content.pop("include", None)
    if include is None:
        return content
    if not isinstance(include, str):
        raise ConfigError(f"{file}: include: names one file, not {str(include)[:60]}")
    return {**_read(file.parent / include, (*seen, file.resolve())), **content}


def _problems(content: dict[str, Any]) -> Iterator[str]:
    """Yields everything in the file that is not built; each problem begins with the key."""
    for key, value in content.items():
        if key in ("metric_list", "filter_list"):
            continue  # the entries of these are checked below
        if tag := _tagged(value):
            yield Unbuilt(f"{key}: {tag} (Python code)")
        elif key in NOT_BUILT:
            if value not in NOT_BUILT[key]:
                yield key if key in NOBODY_S else Unbuilt(key)
        elif key not in KNOWN:
            yield f"{key} (no such key)"
    for where, allowed in (("dataset_kwargs", ("data_files", "revision", "trust_remote_code")),
                           ("fewshot_config", FEWSHOT), ("generation_kwargs", GENERATION_KWARGS)):  # fmt: skip
        inner = content.get(where)
        if inner is not None and not isinstance(inner, dict):
            yield f"{where}: must hold settings"
        else:
            own = str if where == "generation_kwargs" else Unbuilt
            yield from (own(f"{where}.{key}") for key, value in (inner or {}).items() if key not in allowed and value)
    yield from _shape_problems(content)
    kind = content.get("output_type") or "generate_until"
    if kind not in OUTPUT_TYPES:
        yield f"output_type: {kind} (there are {', '.join(OUTPUT_TYPES)})"
    elif content.get("metric_list") is not None and not (content["metric_list"] == [] and content.get("judge")):
        yield from metric_problems(content["metric_list"], kind)
    if content.get("filter_list") is not None:
        yield from filter_problems(content["filter_list"])


def _shape_problems(content: dict[str, Any]) -> Iterator[str]:
    metadata, version = content.get("metadata"), None
    if isinstance(metadata, dict):
        version = metadata.get("version")
    elif metadata is not None:
        yield "metadata: must hold settings"
    if version is not None and not (isinstance(version, (int, float)) or re.fullmatch(r"[0-9.]+", str(version))):
        yield f"metadata.version: {version} is no number"
    by_code = any(content.get(key) is not None for key in ROWS_BY_CODE)
    if not by_code and (not isinstance(content.get("dataset_path"), str) or not content["dataset_path"]):
        yield "dataset_path: is not set"
    if content.get("class") is None and content.get("test_split") is None and content.get("validation_split") is None:
        yield "test_split, validation_split: neither is set, so nothing is evaluated"
    for key in SPLITS:
        if content.get(key) is not None and not isinstance(content[key], str):
            yield f"{key}: must be a split's name"
    name = content.get("task")
    if name is not None and not isinstance(name, str):
        yield "task: must be the task's name"


def _tagged(value: Any) -> Tagged | None:
    """The first tag in a value, however deep it lies."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, Tagged):
            return inner
        if isinstance(inner, dict):
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            waiting.extend(inner)
    return None


def evaluated_split(content: Mapping[str, Any]) -> str | None:
    """The split that lm-eval scores; None for a class that chooses its split itself."""
    return content.get("test_split") or content.get("validation_split")


def exemplar_split(content: Mapping[str, Any], *, named: bool = False) -> str | None:
    """The split that lm-eval draws exemplars from; None if they are written out. named: None also if the settings leave
    the split to lm-eval."""
    few = content.get("fewshot_config")
    few = few if isinstance(few, dict) else {}
    own = few.get("split") or content.get("fewshot_split")
    if own or named or few.get("samples") is not None:
        return own
    return content.get("training_split") or content.get("validation_split") or content.get("test_split")


def _dataset(content: dict[str, Any], name: str, folder: Path, splits: set[str | None]) -> dict[str, Any]:
    """Where the rows are. Raises ConfigError for data files that name none of the splits."""
    dataset_kwargs = content.get("dataset_kwargs") or {}
    dataset = {
        "path": content["dataset_path"],
        "name": content.get("dataset_name"),
        "revision": dataset_kwargs.get("revision"),
        "folder": name,
    }
    files = dataset_kwargs.get("data_files")
    if files is None and content["dataset_path"] in BUILDERS:
        raise ConfigError(f"dataset_path: {content['dataset_path']} needs dataset_kwargs.data_files, a file a split")
    if files is None:
        return dataset
    named = files if isinstance(files, dict) else {"train": files}
    file_of = {split: file[0] if isinstance(file, list) and len(file) == 1 else file for split, file in named.items()}
    if missing := sorted(split for split in splits if split and split not in file_of):
        raise ConfigError(
            f"dataset_kwargs.data_files: has no {', '.join(missing)}; it has {', '.join(map(str, file_of))}"
        )
    if wrong := [str(file) for file in file_of.values() if not isinstance(file, str) or re.search(r"://|[*?]", file)]:
        raise ConfigError(f"dataset_kwargs.data_files: {wrong[0][:80]} is not one local file for a split")
    # A path is relative to the current folder, as lm-eval reads it, or else to the YAML file's.
    here = {split: Path(file).expanduser() for split, file in file_of.items()}
    return {**dataset, "files": {k: str((p if p.exists() else folder / p).resolve()) for k, p in here.items()}}


def generation_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's `generation_kwargs` as settings of `GenerationConfig`, without those that are not set."""
    until = kwargs.get("until")
    temperature = float(kwargs.get("temperature") or 0.0)
    settings = {
        "until": [*until] if isinstance(until, list | tuple) else None if until is None else [until],
        "max_gen_toks": next((kwargs[key] for key in LM_EVAL_LENGTHS if kwargs.get(key) is not None), None),
        "temperature": None if kwargs.get("do_sample") is False or not temperature else temperature,
        "top_k": kwargs.get("top_k"),
        "top_p": kwargs.get("top_p"),
    }
    return {key: value for key, value in settings.items() if value is not None}


def returned(named: Tagged, folder: Path) -> Any:
    """The value of `!function module.name`. folder: the YAML file's.

    Raises ValueError for a function that does anything but return a literal, and for a function that is not there.
    """
    module, _, name = named.value.rpartition(".")
    file = folder / f"{module}.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{named}: {file} cannot be read ({error})") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and len(node.body) == 1:
            only = node.body[0]
            if isinstance(only, ast.Return) and only.value is not None:
                try:
                    return ast.literal_eval(only.value)
                except ValueError:
                    break
    raise ValueError(f"{named}: it is no function that only returns a value, and none is run")
