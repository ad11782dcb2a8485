"""Builds lm-eval's own task objects from its settings, over rows of a local file or rows that lm-eval loads itself."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evalengine.errors import ConfigError, one_line
from evalengine.tasks.lm_eval_quiet import quiet
from evalengine.tasks.rows import Row
from evalengine.util.hub import offline_if_unreachable

NOT_OURS = ("tag", "group", "task_list")  # keys of a task's file that are no settings of the task


def build(settings: Mapping[str, Any], rows: Mapping[str, list[Row]] | None) -> Any:
    """lm-eval's task, loaded.

    rows: split -> its rows; None: lm-eval loads them itself, from the Hub or wherever the task's file says.
    Raises ConfigError: the rows cannot be had, a package is missing, or the task's own code fails on the rows.
    """
    import datasets

    own_settings = {key: value for key, value in settings.items() if key not in NOT_OURS}
    if own_settings.get("process_docs") is not None:
        own_settings["process_docs"] = _once_a_split(own_settings["process_docs"])
    bars, caching = datasets.is_progress_bar_enabled(), datasets.is_caching_enabled()
    try:
        datasets.disable_progress_bars()
        datasets.disable_caching()  # the cache may hold rows that an earlier process shuffled with other seeds
        with quiet():
            if rows is not None:
                return _constructed(own_settings, {split: _dataset(table, split) for split, table in rows.items()})
            with offline_if_unreachable():
                return _constructed(own_settings, None)
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"lm-eval's task needs a package that is not installed: {error}") from error
    except Exception as error:  # `datasets`, the Hub's client and the task's own code may raise anything
        raise ConfigError(_not_built(own_settings, one_line(error), rows is not None)) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
        if caching:
            datasets.enable_caching()


def _not_built(settings: Mapping[str, Any], reason: str, local: bool) -> str:
    if local:
        return f"lm-eval cannot make its documents of the local rows: {reason}"
    return (
        f"lm-eval cannot load its rows ({settings.get('dataset_path')}): {reason}. Without a network give them by "
        f"data_dir=FOLDER that holds {settings['task']}/<split>.jsonl, or tasks.NAME.dataset.folder=FOLDER_BELOW"
    )


def _constructed(settings: dict[str, Any], rows: Mapping[str, Any] | None) -> Any:
    """The task, constructed as lm-eval's factory does it: a class of the task's own may take no settings."""
    from lm_eval.api.task import ConfigurableTask

    cls = own = settings.get("class", ConfigurableTask)
    if rows is not None:

        def download(self: Any, *_: Any, **__: Any) -> None:
            import datasets

            self.dataset = datasets.DatasetDict(dict(rows))

        cls = type(own.__name__, (own,), {"download": download, "__module__": own.__module__})
    task = cls(config=settings) if "config" in inspect.signature(cls.__init__).parameters else cls()
    if getattr(task.config, "task", None) != settings["task"]:
        task.config.task = settings["task"]
    return task


def _once_a_split(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Runs `function` once for each split and keeps its result. lm-eval processes a split's documents anew wherever it
    needs them and relies on the cache of `datasets`; without that cache a task that shuffles would score other
    documents than it asked about."""
    processed_splits: dict[int, tuple[Any, Any]] = {}

    @functools.wraps(function)
    def processed(split: Any) -> Any:
        if id(split) not in processed_splits:
            processed_splits[id(split)] = split, function(split)
        return processed_splits[id(split)][1]

    return processed


def _dataset(rows: list[Row], split: str) -> Any:
    import datasets

    columns = {column: None for row in rows for column in row}
    try:
        return datasets.Dataset.from_list([{**columns, **row} for row in rows])
    except Exception as error:  # pyarrow raises for a column whose values have several types
        raise ConfigError(f"the rows of split '{split}' are no table: {' '.join(str(error).split())[:200]}") from error


def settings_sha256(settings: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a task's settings, with the whole source file of each function that they name. Where the files
    lie does not count."""
    metadata = settings.get("metadata")
    if isinstance(metadata, dict):
        settings = {**settings, "metadata": {key: v for key, v in metadata.items() if key != "config_source"}}
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False, default=_named)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _named(value: Any) -> Any:
    """A JSON value for what JSON cannot write: name and source of a function or class, else the text of the value."""
    function = value.func if isinstance(value, functools.partial) else value
    if not callable(function):
        return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
    described = {"function": getattr(function, "__qualname__", type(function).__name__), "source": _source(function)}
    if isinstance(value, functools.partial):
        described["arguments"] = [list(value.args), dict(value.keywords)]
    return described


def _source(function: Any) -> str | None:
    try:
        file = inspect.getsourcefile(function)
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None
