"""Where a task's rows come from: a local file or folder, `data_dir`, or a pinned revision on the Hugging Face Hub.

Each split is read from the first of these that applies: `dataset.files[split]` if it is an absolute path,
`dataset.path` if it is local (`asset:<name>` is bundled with the package), `data_dir`, the Hub. JSON lines are read
here, so that an error can name the line; the other formats, folders and the Hub go through the `datasets` library.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from evalengine.config.schema import DatasetConfig
from evalengine.errors import ConfigError, readable
from evalengine.tasks.rows import Row, Rows, check_rows
from evalengine.util.hub import offline_if_unreachable
from evalengine.util.plain_files import parse_json, read_bytes

TextReader = Callable[[str], list[Row]]

BUILDERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
TEXT = (".txt", ".raw")
SUFFIXES = (".jsonl", ".json", *BUILDERS, *TEXT)


def text_lines(text: str) -> list[Row]:
    return [{"text": line} for line in text.split("\n")]


def load_rows(
    config: DatasetConfig, split: str, *, data_dir: str | None, read_text: TextReader, evaluated: bool = True
) -> Rows:
    """All rows of `split`.

    evaluated: whether it is the split that is scored; a `dataset.path` that is a single file holds that one only.
    read_text: how a raw text file becomes rows.

    Raises ConfigError: no source has the split, it is empty, a file in it cannot be read, or a row cannot be used.
    """
    local = local_source(config, split, data_dir, evaluated)
    if local is not None:
        bundled = config.path if config.path and local == _asset(config.path) else None
        rows = replace(read_local(local, split, read_text), source=bundled or str(local))
    else:
        rows = _read_hub(config, split, data_dir, evaluated)
    if not rows.rows:
        raise ConfigError(f"{rows.source} has no rows for split '{split}'")
    if config.where and not (rows := rows.where(config.where)).rows:
        condition = ", ".join(f"{name}={text}" for name, text in config.where.items())
        raise ConfigError(f"{rows.source} has no rows for split '{split}' with dataset.where {condition}")
    return check_rows(rows)


def local_source(config: DatasetConfig, split: str, data_dir: str | None, evaluated: bool) -> Path | None:
    """The local file or folder that holds `split`; None if only the Hub can."""
    named = config.files.get(split)
    if named is not None and Path(named).is_absolute():
        return _existing(Path(named), f"task.dataset.files.{split}")
    path = config.path or ""
    if asset := _asset(path):
        return asset
    here = Path(path).expanduser()
    with readable(path):
        is_here = here.exists()
    looks_local = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or path.endswith(SUFFIXES)
    if path and (is_here or looks_local):
        _existing(here, "task.dataset.path")
        if here.is_dir() or evaluated:
            return here
    if data_dir is not None:
        root = _existing(Path(data_dir).expanduser(), "data_dir")
        below = root / (named or f"{config.folder}/{split}.jsonl")
        if (named or config.folder) and below.exists():
            return below
    if here.is_file():
        raise ConfigError(
            f"the few-shot split '{split}' is not in the single file task.dataset.path={path}: "
            f"set task.dataset.files.{split} or task.fewshot_file to a file with exemplars, or task.num_fewshot=0"
        )
    return None


def _asset(path: str) -> Path | None:
    """The folder of `asset:<name>`, bundled with the package; None for any other path."""
    if not path.startswith("asset:"):
        return None
    return Path(str(resources.files("evalengine") / "assets" / path.removeprefix("asset:")))


def read_local(path: Path, split: str, read_text: TextReader) -> Rows:
    """The rows of a file, or of `split` in a folder. Raises ConfigError naming the file (and line) at fault."""
    if path.is_dir():
        return _read_folder(path, split, read_text)
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    if path.suffix in (".jsonl", ".json", *TEXT):
        if path.suffix == ".jsonl":
            stat = path.stat()  # tells the file from what it was before it was written anew
            return _read_json_lines(path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        text = _read_utf8(path)
        rows = _parsed(text, path) if path.suffix == ".json" else read_text(text)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"{path}: must be a JSON array of objects (for JSON lines name the file .jsonl)")
        return Rows(rows, str(path))
    if path.suffix not in BUILDERS:
        raise ConfigError(f"{path}: unknown kind of file; known are {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ConfigError(f"{path} cannot be read: it is not a regular file")
    separator = {"sep": "\t"} if path.suffix == ".tsv" else {}
    return _through_datasets(path, BUILDERS[path.suffix], data_files=str(path), split="train", **separator)


def _read_utf8(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


@lru_cache(2)  # MMLU's 57 tasks each take their part of the same two files; reading them each time took 1.3 s
def _read_json_lines(path: Path, stamp: tuple[int, ...]) -> Rows:
    lines = [(number, line) for number, line in enumerate(_read_utf8(path).split("\n"), 1) if line.strip()]
    rows = [_parsed(line, path, number) for number, line in lines]
    for (number, _), row in zip(lines, rows, strict=True):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: a row must be a JSON object, this is {type(row).__name__}")
    return Rows(rows, str(path), file=str(path), lines=[number for number, _ in lines])


def _parsed(text: str, path: Path, line: int | None = None) -> Any:
    """The JSON value of the whole file, or of the line of that number. Raises ConfigError that names the line."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = f"{path}:{line or error.lineno}"
        raise ConfigError(f"{place}: not JSON: {error.msg} (column {error.colno})") from error
    except ValueError as error:  # the JSON is nested too deeply, or a number is too long
        place = f"{path}:{line}" if line else str(path)
        raise ConfigError(f"{place}: not JSON that can be read: {error}") from error


def _read_folder(folder: Path, split: str, read_text: TextReader) -> Rows:
    for suffix in SUFFIXES:
        if (file := folder / f"{split}{suffix}").is_file():
            return read_local(file, split, read_text)
    if not (folder / "dataset_dict.json").is_file() and not (folder / "state.json").is_file():
        return _through_datasets(folder, str(folder), split=split)
    import datasets

    with _format_errors(folder):
        saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise ConfigError(f"{folder} has no split '{split}'; it has {', '.join(saved)}")
            saved = saved[split]
        return Rows(list(saved), str(folder))


def _through_datasets(path: Path, builder: str, **arguments: Any) -> Rows:
    import datasets

    bars = datasets.is_progress_bar_enabled()
    # The rows are copied out of a cache folder that lives as long as this call: no stale cache is read, none is left.
    with tempfile.TemporaryDirectory() as cache, _format_errors(path):
        try:
            datasets.disable_progress_bars()  # a local file is read too quickly for a progress bar
            return Rows(list(datasets.load_dataset(builder, cache_dir=cache, **arguments)), str(path))
        finally:
            if bars:
                datasets.enable_progress_bars()


@contextmanager
def _format_errors(path: Path) -> Iterator[None]:
    """Turns whatever a format's parser raises into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        why = " ".join(str(error.__cause__ or error).split())[:400]
        raise ConfigError(f"{path} cannot be read: {why or type(error).__name__}") from error


def _read_hub(config: DatasetConfig, split: str, data_dir: str | None, evaluated: bool) -> Rows:
    try:
        rows, commit = load_from_hub(config, split)
        name = f"/{config.name}" if config.name else ""
        return Rows(rows, f"hub:{config.path}{name}", commit)
    except HubUnavailable as error:
        file = config.files.get(split) or f"{config.folder or '<name>'}/{split}.jsonl"
        looked = f" (looked for it in {data_dir})" if data_dir is not None else ""
        missing = "rows" if evaluated else "few-shot exemplars (task.num_fewshot=0 needs none)"
        gated = (
            f". The Hub gives {config.path} only to accounts that accepted its conditions: accept them on "
            f"https://huggingface.co/datasets/{config.path}, and set HF_TOKEN to a token of that account"
        )
        raise ConfigError(
            f"no {missing} for split '{split}' of {config.path}: {error}{gated if config.gated else ''}. Three ways "
            f"to give them: "
            f"(1) data_dir=FOLDER that holds {file}{looked}; "
            f"(2) task.dataset.path=FILE_OR_FOLDER, any jsonl, json, csv or parquet file or saved dataset; "
            f"(3) a network, for {config.path} from the Hugging Face Hub (or its cache, filled by an earlier run)"
        ) from error


def _existing(path: Path, setting: str) -> Path:
    if not path.exists():
        raise ConfigError(f"{setting}={path} does not exist")
    return path


class HubUnavailable(Exception):
    """The Hub cannot be reached and its local cache does not hold the rows."""


def load_from_hub(config: DatasetConfig, split: str) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of `split` and the commit that they belong to, from the Hub or, without a network, from its local cache.

    Raises HubUnavailable, also if only another commit than the pinned one can be had; ConfigError if the Hub has no
    such dataset, configuration, revision or split.
    """
    import datasets

    if not config.path:
        raise ConfigError("dataset.path is not set")
    with offline_if_unreachable() as offline:
        try:
            rows = datasets.load_dataset(config.path, config.name, split=split, revision=config.revision)
        except ValueError as error:  # the configuration or split is unknown; the message lists the known ones
            raise ConfigError(f"task.dataset.path={config.path}: {error}") from error
        except Exception as error:  # transport errors share no class: the Hub's client uses httpx or httpx2, by version
            if isinstance(error, FileNotFoundError) and not offline:
                raise ConfigError(f"task.dataset.path={config.path}: {error}") from error
            raise HubUnavailable(offline or f"{type(error).__name__}: {error.__cause__ or error}") from error
    commit = Path(rows.cache_files[0]["filename"]).parent.name if rows.cache_files else None
    # `datasets` takes any cached commit when the Hub fails to answer; its cache folder is named after the commit.
    if re.fullmatch(r"[0-9a-f]{40}", config.revision or "") and commit != config.revision:
        mismatch = f"the cache holds revision {commit} instead of {config.revision}"
        raise HubUnavailable(f"{offline}, and {mismatch}" if offline else mismatch)
    return list(rows), commit
