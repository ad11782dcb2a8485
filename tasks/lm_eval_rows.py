"""Where the rows of lm-eval's tasks come from, if not from lm-eval: `data_dir`, or any file that the user names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalengine.config.schema import DatasetConfig
from evalengine.tasks.dataset import load_rows, local_source, read_local, text_lines
from evalengine.tasks.rows import Rows, check_rows

SUBJECT = "subject"  # the column that names a row's configuration
SOLE = (None, "", "default", "main")  # what a dataset's only configuration is called


def evaluated_split(settings: Mapping[str, Any]) -> str | None:
    """The split that lm-eval scores; None for a class that chooses its split itself."""
    return settings.get("test_split") or settings.get("validation_split")


def exemplar_split(settings: Mapping[str, Any]) -> str | None:
    """The split that lm-eval draws exemplars from; None if they are written out."""
    few = settings.get("fewshot_config")
    few = few if isinstance(few, dict) else {}
    if named := few.get("split") or settings.get("fewshot_split"):
        return str(named)
    if few.get("samples") is not None:
        return None
    return settings.get("training_split") or settings.get("validation_split") or settings.get("test_split")


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
