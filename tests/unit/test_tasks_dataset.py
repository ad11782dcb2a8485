"""Where rows come from, in which order of precedence, and what is said when there are none."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from evalengine.config.schema import DatasetConfig
from evalengine.errors import ConfigError
from evalengine.tasks.dataset import load_rows, text_lines
from evalengine.tasks.rows import Rows, content_hash
from evalengine.util.hub import PROBE_SECONDS

ROWS = [{"question": f"q{i}", "answer": f"a\n#### {i} – é"} for i in range(7)]
HUB = DatasetConfig(path="openai/gsm8k", name="main", revision="a" * 40, folder="gsm8k")


def load(config: DatasetConfig, split: str = "test", **arguments: Any) -> Rows:
    return load_rows(config, split, **{"data_dir": None, "read_text": text_lines, **arguments})


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network and an empty cache, whose folder it returns."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_cache(cache: Path, rows: list[dict[str, Any]], revision: str) -> None:
    """What `datasets` leaves in its cache after it loaded openai/gsm8k's main/test at `revision`."""
    folder = cache / "openai___gsm8k" / "main" / "0.0.0" / revision
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(str(cache / "made"))
    folder.mkdir(parents=True)
    info = {
        "builder_name": "parquet",
        "config_name": "main",
        "dataset_name": "gsm8k",
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
        "features": {column: {"dtype": "string", "_type": "Value"} for column in rows[0]},
        "splits": {"test": {"name": "test", "num_bytes": 1, "num_examples": len(rows), "dataset_name": "gsm8k"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    (cache / "made" / "data-00000-of-00001.arrow").rename(folder / "gsm8k-test.arrow")


@pytest.mark.parametrize(
    "form", ["jsonl", "json", "csv", "tsv", "parquet", "folder", "parquet-folder", "saved", "saved-dict"]
)
def test_every_local_form_gives_the_same_rows(form: str, tmp_path: Path) -> None:
    made, path = datasets.Dataset.from_list(ROWS), tmp_path / f"mine.{form}"
    match form:
        case "jsonl":
            jsonl(path, ROWS)
        case "json":
            path.write_text(json.dumps(ROWS), encoding="utf-8")
        case "csv":
            made.to_csv(str(path))
        case "tsv":
            made.to_csv(str(path), sep="\t")
        case "parquet":
            made.to_parquet(str(path))
        case "folder":
            jsonl(path / "test.jsonl", ROWS)
        case "parquet-folder":
            path.mkdir()
            made.to_parquet(str(path / "test-00000-of-00001.parquet"))
        case "saved":
            made.save_to_disk(str(path))
        case "saved-dict":
            datasets.DatasetDict({"test": made}).save_to_disk(str(path))
    loaded = load(DatasetConfig(path=str(path)))
    assert loaded.rows == ROWS
    assert loaded.source.startswith(str(path))
    assert loaded.revision is None
    assert content_hash(loaded.rows) == content_hash(ROWS)


def test_precedence(tmp_path: Path, offline: Path) -> None:
    """Each wins over those before: the Hub's cache, the folder in data_dir, its file, a path, an absolute file."""
    fake_cache(offline, ROWS[:1], "a" * 40)
    jsonl(tmp_path / "data/gsm8k/test.jsonl", ROWS[:2])
    jsonl(tmp_path / "data/elsewhere/t.jsonl", ROWS[:3])
    path = jsonl(tmp_path / "explicit.jsonl", ROWS[:4])
    absolute = jsonl(tmp_path / "absolute.jsonl", ROWS[:5])
    data_dir = str(tmp_path / "data")
    files = {"test": "elsewhere/t.jsonl"}
    assert len(load(HUB).rows) == 1
    assert len(load(HUB, data_dir=data_dir).rows) == 2
    assert len(load(DatasetConfig("openai/gsm8k", folder="gsm8k", files=files), data_dir=data_dir).rows) == 3
    assert len(load(DatasetConfig(str(path), folder="gsm8k", files=files), data_dir=data_dir).rows) == 4
    files = {"test": str(absolute)}
    assert len(load(DatasetConfig(str(path), folder="gsm8k", files=files), data_dir=data_dir).rows) == 5


def test_few_shot_rows_beside_a_single_file(tmp_path: Path) -> None:
    """The exemplars come from data_dir; without it, the error says where they can come from."""
    path = jsonl(tmp_path / "mine.jsonl", ROWS)
    config = DatasetConfig(str(path), folder="gsm8k")
    jsonl(tmp_path / "data/gsm8k/train.jsonl", ROWS[:2])
    assert len(load(config, "train", data_dir=str(tmp_path / "data"), evaluated=False).rows) == 2
    with pytest.raises(ConfigError, match=r"dataset\.files\.train or task\.fewshot_file .* task\.num_fewshot=0"):
        load(config, "train", evaluated=False)


def test_offline_the_cache_must_hold_the_pinned_revision(offline: Path) -> None:
    fake_cache(offline, ROWS, "a" * 40)
    loaded = load(HUB)
    assert (loaded.rows, loaded.source, loaded.revision) == (ROWS, "hub:openai/gsm8k/main", "a" * 40)
    assert load(DatasetConfig(path="openai/gsm8k", name="main")).revision == "a" * 40  # an unpinned one is recorded
    other = DatasetConfig(path="openai/gsm8k", name="main", revision="b" * 40)
    with pytest.raises(ConfigError, match=f"cache holds revision {'a' * 40} instead of {'b' * 40}"):
        load(other)


def test_no_source_at_all_names_the_three_ways(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(HUB, data_dir=str(tmp_path))
    message = str(error.value)
    assert len(error.value.problems) == 1
    for part in (
        "HF_HUB_OFFLINE is set",
        "data_dir=FOLDER",
        "gsm8k/test.jsonl",
        str(tmp_path),
        "task.dataset.path=",
        "Hub",
    ):
        assert part in message
    with pytest.raises(ConfigError, match=r"few-shot exemplars \(task\.num_fewshot=0 needs none\)"):
        load(HUB, "train", evaluated=False)


def test_an_unreachable_hub_fails_fast_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: refused at once
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 cannot be reached"):
        load(HUB)
    assert time.monotonic() - start < PROBE_SECONDS + 3
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("t.jsonl", b"", "has no rows"),
        ("t.jsonl", b"\n \n", "has no rows"),
        ("t.json", b"[]", "has no rows"),
        ("t.jsonl", b'{"a": 1}\n\n{"a": \n', r"t\.jsonl:3: not JSON"),
        ("t.jsonl", b'{"a": 1}\n[1]\n', r"t\.jsonl:2: a row must be a JSON object, this is list"),
        ("t.jsonl", b'{"a": "\xff"}\n', r"t\.jsonl cannot be read: .*utf-8"),
        ("t.json", b'{"a": 1}', "must be a JSON array of objects"),
        ("t.json", b'[{"a": 1},\n', r"t\.json:2: not JSON"),
        ("t.parquet", b"not parquet", r"t\.parquet cannot be read"),
        ("t.pickle", b"x", "unknown kind of file"),
    ],
)
def test_damaged_files(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    """A damaged file is refused by its name, and by the line where there is one."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load(DatasetConfig(path=str(tmp_path / name)))


@pytest.mark.parametrize("path", ["./mine.jsonl", "mine.jsonl", "/nowhere/at/all", "~/no such folder", "a/b/c"])
def test_a_local_path_that_is_missing_is_not_looked_up_on_the_hub(path: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.dataset\.path=.* does not exist"):
        load(DatasetConfig(path=path))


def test_missing_data_dir_and_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data_dir=.* does not exist"):
        load(HUB, data_dir=str(tmp_path / "nowhere"))
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="no split 'dev'; it has test"):
        load(DatasetConfig(path=str(tmp_path / "saved")), "dev")
    with pytest.raises(ConfigError, match=r"dev\.jsonl|cannot be read"):
        load(DatasetConfig(path="asset:tinymath"), "dev")


def test_content_hash_depends_on_order_and_content_but_not_on_key_order() -> None:
    assert content_hash(ROWS) != content_hash(ROWS[::-1])
    assert content_hash(ROWS) != content_hash(ROWS[:-1])
    assert content_hash([{"a": 1, "b": "x"}]) == content_hash([{"b": "x", "a": 1}])
    assert content_hash([{"a": "1"}]) != content_hash([{"a": 1}])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"n": [1.0, float("nan")]}, "row 1 cannot be used: column 'n' holds nan, which is no number"),
        ({"n": [{"a": [float("inf")]}, None]}, "row 0 cannot be used: column 'n' holds inf"),
        ({"n": ["a", None], "b": [b"\xff", None], "t": [datetime(2024, 1, 1), None]}, ""),
    ],
)
def test_values_of_other_formats(columns: dict[str, list[object]], message: str, tmp_path: Path) -> None:
    """Values that JSON lacks are hashed, but numbers that are not finite are refused."""
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    if not message:
        assert len(content_hash(load(DatasetConfig(path=str(file))).rows)) == 64
        return
    with pytest.raises(ConfigError) as error:
        load(DatasetConfig(path=str(file)))
    assert message in str(error.value) and str(file) in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("rows.parquet", b""), ("rows.parquet", b"PAR1" * 9), ("rows.arrow", b"ARROW1xx"), ("rows.csv", b"")),
        *(("rows.csv", b'a,b\n"x,1\n'), ("rows.csv", b"\xff\xfe\0"), ("rows.json", b"[" * 9999)),
        ("rows.json", b"1" * 5000),
        *(("dataset_dict.json", b"{"), ("state.json", b"[]")),
    ],
)
def test_files_that_no_reader_takes(name: str, content: bytes, tmp_path: Path) -> None:
    """Such a file is refused by its name, in one line."""
    (tmp_path / name).write_bytes(content)
    path = tmp_path / name if name.startswith("rows") else tmp_path
    with pytest.raises(ConfigError, match=f"{path}: .*|{path} cannot be read: .+") as error:
        load(DatasetConfig(path=str(path)))
    assert "\n" not in str(error.value)
