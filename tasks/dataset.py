"""Where a task's rows come from: a local file or folder, `data_dir`, or a pinned revision on the Hugging Face Hub.

The first that applies, for each split: `dataset.files[split]` if it is an absolute path, `dataset.path` if it is local
(`asset:<name>` is bundled with the package), `data_dir`, the Hub. JSON lines are read here, so that an error can name
the line; the other formats, folders and the Hub go through the `datasets` library.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from evalengine.config import DatasetConfig
from evalengine.errors import ConfigError

Row = dict[str, Any]
TextReader = Callable[[str], list[Row]]

BUILDERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
TEXT = (".txt", ".raw")
SUFFIXES = (".jsonl", ".json", *BUILDERS, *TEXT)


@dataclass(frozen=True)
class Rows:
    """The rows of one split, in order, and where they were found."""

    rows: list[Row]
    source: str  # a file or folder, or hub:<id>/<configuration>
    revision: str | None = None  # the Hub commit; None for local rows, whose origin nobody has checked


def content_hash(rows: Iterable[Row]) -> str:
    """SHA-256 over the rows in order. Key order does not count, so the Hub's rows and a local copy of them agree."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)
        digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def text_lines(text: str) -> list[Row]:
    return [{"text": line} for line in text.split("\n")]


def load_rows(
    config: DatasetConfig, split: str, *, data_dir: str | None, read_text: TextReader, evaluated: bool = True
) -> Rows:
    """All rows of `split`.

    evaluated: whether it is the split that is scored; a `dataset.path` that is a single file holds that one only.
    read_text: how a raw text file becomes rows.

    Raises ConfigError: no source has the split, it is empty, or a file in it cannot be read.
    """
    local = local_source(config, split, data_dir, evaluated)
    if local is not None:
        bundled = config.path if config.path and local == _asset(config.path) else None
        found = Rows(read_local(local, split, read_text), bundled or str(local))
    else:
        found = _read_hub(config, split, data_dir, evaluated)
    if not found.rows:
        raise ConfigError(f"{found.source} has no rows for split '{split}'")
    return found


def local_source(config: DatasetConfig, split: str, data_dir: str | None, evaluated: bool) -> Path | None:
    """The local file or folder that holds `split`; None if only the Hub can."""
    named = config.files.get(split)
    if named is not None and Path(named).is_absolute():
        return _existing(Path(named), f"task.dataset.files.{split}")
    path = config.path or ""
    if asset := _asset(path):
        return asset
    here = Path(path).expanduser()
    if path and (here.exists() or _looks_local(path)):
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


def read_local(path: Path, split: str, read_text: TextReader) -> list[Row]:
    """The rows of a file, or of `split` in a folder. Raises ConfigError naming the file (and line) at fault."""
    if path.is_dir():
        return _read_folder(path, split, read_text)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    if path.suffix in (".jsonl", ".json", *TEXT):
        text = _read_utf8(path)
        if path.suffix == ".jsonl":
            return [_parse(line, f"{path}:{n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        if path.suffix == ".json":
            return _read_json(path, text)
        return read_text(text)
    if path.suffix not in BUILDERS:
        raise ConfigError(f"{path}: unknown kind of file; known are {', '.join(SUFFIXES)}")
    separator = {"sep": "\t"} if path.suffix == ".tsv" else {}
    return _through_datasets(path, BUILDERS[path.suffix], data_files=str(path), split="train", **separator)


def _read_utf8(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be a JSON object, this is {type(row).__name__}")
    return row


def _read_json(path: Path, text: str) -> list[Row]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: must be a JSON array of objects (for JSON lines name the file .jsonl)")
    return rows


def _read_folder(folder: Path, split: str, read_text: TextReader) -> list[Row]:
    for suffix in SUFFIXES:
        if (file := folder / f"{split}{suffix}").is_file():
            return read_local(file, split, read_text)
    if not (folder / "dataset_dict.json").is_file() and not (folder / "state.json").is_file():
        return _through_datasets(folder, str(folder), split=split)
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ConfigError(f"{folder} has no split '{split}'; it has {', '.join(saved)}")
        saved = saved[split]
    return list(saved)


def _through_datasets(path: Path, builder: str, **arguments: Any) -> list[Row]:
    import datasets

    bars = datasets.is_progress_bar_enabled()
    # rows are copied out: leave nothing behind, trust no stale cache
    with tempfile.TemporaryDirectory() as cache:
        try:
            datasets.disable_progress_bars()  # reading a local file is no progress to watch
            return list(datasets.load_dataset(builder, cache_dir=cache, **arguments))
        except Exception as error:  # whatever the format's parser raises
            raise ConfigError(f"{path} cannot be read: {error.__cause__ or error}") from error
        finally:
            if bars:
                datasets.enable_progress_bars()


def _read_hub(config: DatasetConfig, split: str, data_dir: str | None, evaluated: bool) -> Rows:
    from evalengine.tasks.hub import HubUnavailable, load_from_hub

    try:
        rows, commit = load_from_hub(config, split)
        name = f"/{config.name}" if config.name else ""
        return Rows(rows, f"hub:{config.path}{name}", commit)
    except HubUnavailable as error:
        file = config.files.get(split) or f"{config.folder or '<name>'}/{split}.jsonl"
        looked = f" (looked for it in {data_dir})" if data_dir is not None else ""
        what = "rows" if evaluated else "few-shot exemplars (task.num_fewshot=0 needs none)"
        raise ConfigError(
            f"no {what} for split '{split}' of {config.path}: {error}. Three ways to give them: "
            f"(1) data_dir=FOLDER that holds {file}{looked}; "
            f"(2) task.dataset.path=FILE_OR_FOLDER, any jsonl, json, csv or parquet file or saved dataset; "
            f"(3) a network, for {config.path} from the Hugging Face Hub (or its cache, filled by an earlier run)"
        ) from error


def _looks_local(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or path.endswith(SUFFIXES)


def _existing(path: Path, setting: str) -> Path:
    if not path.exists():
        raise ConfigError(f"{setting}={path} does not exist")
    return path
