"""`evalengine.evaluate`: runs tasks on a model from Python, by the code of `python -m evalengine`.

Python's arguments are settings by their dotted names, and the command line's words, by which a run records them:
{"limit": 8, "engine": {"max_num_seqs": 4}} -> {"limit": 8, "engine.max_num_seqs": 4} -> limit=8 engine.max_num_seqs=4
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalengine.api.perform import perform
from evalengine.config.check import no_model
from evalengine.config.compose import compose_jobs
from evalengine.config.overrides import escape_problems, is_text, word
from evalengine.config.schema import ModelConfig
from evalengine.config.shipped import GROUPS, shipped_model
from evalengine.errors import ConfigError
from evalengine.util.validation import integer, number, shown

if TYPE_CHECKING:
    from evalengine.engine.llm import LLM
    from evalengine.report.python.results import Results

_NAME = re.compile(r"[A-Za-z_][\w./-]*")  # a setting's name
_CURE = r'write "\n", neither "\\n" nor r"\n"; where the two are meant, double the backslash'

OF_THE_ENGINE = ("engine", "cluster", "batch_invariant", "numerics")  # settings that are fixed once an LLM is loaded


def evaluate(
    model: str | os.PathLike[str] | ModelConfig | LLM | None = None,
    tasks: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, Mapping[str, Any]] | None = None,
    /,
    **settings: Any,
) -> Results:
    """Runs tasks on a model and returns what the run left in its folder.

    Both may be given by their names, too: `evaluate(model="tinymath", tasks="arithmetic")`.

    Args:
        model: a name of `conf/model/`, a folder, a Hub id, a `.gguf` file, a `ModelConfig`; or an `LLM` that is loaded
            already, whose weights and KV pool are used, and which stays open.
        tasks: a task's name, the path of a YAML file, or a list of them; or a mapping of names to settings of each
            task: `{"gsm8k": {"num_fewshot": 5}, "arithmetic": {}}`, which may also follow a list of all the tasks:
            `evaluate(model, ["gsm8k", "arithmetic"], tasks={"gsm8k": {"num_fewshot": 5}})`.
        settings: the command line's settings by their names: `limit=8`; a group's settings as a mapping:
            `engine={"max_num_seqs": 4}`, `task={"num_fewshot": 5}` (of every task); or by its dotted name, which
            Python takes as `**{"engine.max_num_seqs": 4}`. A `ModelConfig` names a model's revision or tokenizer.

    Progress goes to standard error (`progress=False`: none). The same call resumes an interrupted run.

    Raises:
        ConfigError: settings, models, tasks and rows that cannot be honoured, all at once; nothing was written then.
        EvalEngineError: a damaged file, a failed request, a disk that refuses; the same call resumes.
    """
    problems: list[str] = []
    model = settings.pop("model", None) if model is None else model
    tasks = settings.pop("tasks", None) if tasks is None else tasks
    for name, example in (("model", '{"name": "mine"}'), ("tasks", '{"gsm8k": {"num_fewshot": 5}}')):
        if not isinstance(settings.get(name, {}), Mapping):
            value = shown(settings.pop(name))
            problems.append(f"{name}={value}: is given already; here it must be settings, such as {example}")
    of_tasks: Mapping[str, Any] = tasks if isinstance(tasks, Mapping) else settings.pop("tasks", {})
    problems += [
        f"tasks.{name}={shown(own)}: must be settings, such as {{'num_fewshot': 5}}"
        for name, own in of_tasks.items()
        if not isinstance(own, Mapping)
    ]
    llm, chosen = _loaded(model), task_word(list(tasks) if isinstance(tasks, Mapping) else tasks, problems)
    of_each = {f"tasks.{name}": own for name, own in of_tasks.items() if isinstance(own, Mapping)}
    given = flat({**of_each, **settings}, problems)
    of_model = _of_model(model, llm, given, problems)
    problems += [f"{name}: is given twice" for name in given.keys() & of_model.keys()]
    given = {**of_model, **given}
    files = [name for name in given if name in GROUPS or name.startswith("hydra.")]
    chosen += [word(name, given.pop(name)) for name in files]
    if "experiment" in settings:
        problems.append("experiment: is several runs; call evaluate once for each, or give it on the command line")
    if problems:
        raise ConfigError(problems)
    try:
        (job,) = compose_jobs(chosen, settings=given)
    except ConfigError as error:
        raise ConfigError([_in_python(problem) for problem in error.problems]) from error
    from evalengine.report.python.results import load_run

    return load_run(perform(job.config, [*chosen, *(word(name, value) for name, value in given.items())], llm))


def _in_python(problem: str) -> str:
    """A problem with the setting that it suggests as Python's argument: `task={"num_fewshot": ...}`."""
    if not re.match(r"\w+: no such setting", problem):  # a dotted name is in a mapping already
        return problem
    return re.sub(r"\b[a-z_]+(?:\.\w+)+(?= or |\?$)", lambda name: _as_argument(name[0]), problem)


def _as_argument(name: str) -> str:
    """A dotted name as Python's argument: `task={"generation": {"top_p": ...}}`."""
    first, *below = name.split(".")
    return first + "=" + "".join(f'{{"{part}": ' for part in below) + "..." + "}" * len(below)


def _loaded(model: Any) -> LLM | None:
    """The model if it is an LLM. Its module is not imported for the test: an import takes seconds."""
    module = sys.modules.get("evalengine.engine.llm")
    return model if module is not None and isinstance(model, module.LLM) else None


def _of_model(model: Any, llm: LLM | None, given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The settings that name the model; for an LLM also those of its engine."""
    if llm is not None:
        return _of_llm(llm, given, problems)
    if isinstance(model, ModelConfig):
        return flat({"model": {key: item for key, item in asdict(model).items() if key != "name" or item}}, problems)
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        problems.append(no_model(model, "a path, a Hub id, a name of conf/model/, a ModelConfig or an LLM"))
        return {}
    try:
        named = isinstance(model, str) and shipped_model(model) is not None
    except ConfigError as error:
        problems.extend(error.problems)
        return {}
    return {"model" if named else "model.path": os.fspath(model)}


def _of_llm(llm: LLM, given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The settings that describe this very engine, so that the run's files say what computed it."""
    for name in given:
        if name.split(".")[0] in OF_THE_ENGINE or (name.split(".")[0] == "model" and name != "model.name"):
            problems.append(f"{name}: this LLM is loaded with its own settings; make another one, or give its path")
    level = llm.settings.numerics
    model = {item.name: getattr(llm.model_config, item.name) for item in fields(ModelConfig) if item.name != "name"}
    name = Path(llm.model_config.name).name if llm.model_config.name != llm.model_config.path else ""
    if name and "model.name" not in given:
        model["name"] = name
    own = {"model": model, "engine": asdict(llm.config), "batch_invariant": level != "fast", "numerics": level}
    return {key: value for key, value in flat(own, problems).items() if key not in given}


def flat(settings: Mapping[str, Any], problems: list[str], above: str = "") -> dict[str, Any]:
    """The settings by their dotted names, with plain values: paths are texts, tuples lists, NumPy's numbers Python's.
    Each bad name or value, and what is given twice, adds a sentence to `problems`."""
    read: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(f"{above}{shown(name)}: must be a setting's name")
            continue
        name = f"{above}{_in_full(name, value) if not above else name}"
        above_others = isinstance(value, Mapping) and not name.endswith("judge.scale")  # whose keys are labels
        one = flat(value, problems, f"{name}.") if above_others else {name: plain(value, name, problems)}
        problems.extend(f"{twice}: is given twice" for twice in read.keys() & one.keys())
        read |= one
    return read


def _in_full(name: str, value: Any) -> str:
    """The name, of which some stand for longer ones as on the command line."""
    if name == "cache" and not isinstance(value, Mapping):
        return "cache.path"
    return "task.judge" if name == "judge" else name


def plain(value: Any, where: str, problems: list[str]) -> Any:
    """The value as YAML can hold it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        problems.extend(escape_problems(text, where, _CURE) if is_text(where) else ())
        return text
    if isinstance(value, Mapping):
        return {str(key): plain(item, where, problems) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, problems) for item in value]
    if (read := integer(value) if integer(value) is not None else number(value)) is None:
        problems.append(f"{where}={shown(value)}: must be a text, a number, true or false, None, a list or a mapping")
    return read


def task_word(tasks: Any, problems: list[str]) -> list[str]:
    """The word `task=...` for a name, a file's path, or several of them."""
    chosen = [tasks] if isinstance(tasks, str | os.PathLike) else tasks
    if not (isinstance(chosen, Sequence) and chosen and all(isinstance(task, str | os.PathLike) for task in chosen)):
        problems.append(
            f"tasks={shown(tasks)}: must be a task's name, the path of a YAML file, or a list of them; "
            "`python -m evalengine tasks` lists the names"
        )
        return []
    texts = [os.fspath(task) for task in chosen]
    return [word("task", texts[0] if len(texts) == 1 else texts)]
