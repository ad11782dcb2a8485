"""Finished runs with one thing changed: a value of a JSON file, a column of the records, a byte, a line, a file.

Every reader refuses with one sentence that names the file; none takes the run for what it was.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.cli.commands import compare, report
from evalengine.errors import ConfigError
from evalengine.records.manifest_data import MANIFEST
from evalengine.records.schema import RequestRecord, read_records, write_records
from evalengine.report.gate.gate import gate
from evalengine.report.html.run_page import write_run_report
from evalengine.report.read.baseline import write_baseline
from evalengine.report.read.load import load_run, load_run_data
from evalengine.report.run_table import print_report
from evalengine.util.command import exit_code
from tests.fuzz.cases import Case, cases
from tests.report.written_run import Doc, write_choices, write_generations
from tests.run_double import bind_again, generated, write_run

ODD_VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**400, "", "x", [], {}, [[]], {"a": {}}),
    *(float("nan"), float("inf"), "0" * 64, "\ud800", "results_2026-01-01T00-00-00.json"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, whole, with their pages: `run` and `other`."""
    root = tmp_path_factory.mktemp("runs")
    for name, score in (("run", 1.0), ("other", 0.0)):
        write_generations(root / name, [Doc("one two"), Doc("three", score=score), Doc("ü🙂", answer="6")])
        (root / name / "config.yaml").write_text("limit: 3\nseed: 0\n")
        bind_again(root / name)
        write_run_report(root / name)
    return root


# -- one change --------------------------------------------------------------------------------------------------------


def _json_value(file: Path, case: Case) -> str:
    """Puts another value at a random place of the file's JSON (of one line, where it has many)."""
    lines = file.read_text().split("\n") if file.suffix == ".jsonl" else [file.read_text()]
    number = case.choice([n for n, line in enumerate(lines) if line.strip()])
    value = json.loads(lines[number])
    place, where = value, []
    while True:
        keys: list[Any] = [*place] if isinstance(place, dict) else [*range(len(place))]
        key = case.choice(keys)
        where.append(key)
        if not isinstance(place[key], dict | list) or not place[key] or case.random() < 0.2:
            break
        place = place[key]
    if case.random() < 0.2:
        del place[key]
    else:
        old = json.dumps(place[key])
        new = case.choice(ODD_VALUES)
        place[key] = new if json.dumps(new) != old else "other"
    lines[number] = json.dumps(value, indent=None if len(lines) > 1 else case.choice([None, 2]))
    file.write_text("\n".join(lines))
    return f"{file.name}: {where}"


def _column(file: Path, case: Case) -> str:
    """Writes valid records, one of which differs in one field."""
    rows = read_records(file)
    number = case.randrange(len(rows))
    row = rows[number]
    name = case.choice(sorted(vars(row)))
    value = getattr(row, name)
    if isinstance(value, str):
        value += "x"
    elif isinstance(value, bool):
        value = not value
    elif isinstance(value, int):
        value += 1
    elif isinstance(value, np.ndarray):
        value = np.nextafter(value, np.float32(0)) if len(value) else np.float32([1])
    elif value is None:  # this run has no use for the column
        value = {"thinking": "x", "thinking_tokens": 1, "thinking_truncated": True}.get(name, np.zeros(1, np.int32))
    else:
        value = [*value, 1]
    rows[number] = RequestRecord(**{**vars(row), name: value})
    try:
        write_records(file, rows)
    except (TypeError, ValueError, OSError):
        file.write_bytes(file.read_bytes()[:-1])
    return f"{file.name}: {name}"


def _bytes(file: Path, case: Case) -> str:
    """Flips, drops or adds a byte, or cuts the file."""
    data = bytearray(file.read_bytes())
    at = case.randrange(len(data))
    how = case.choice(["flip", "drop", "add", "cut"])
    if how == "flip":
        data[at] ^= 1 << case.randrange(8)
    elif how == "drop":
        del data[at]
    elif how == "add":
        data.insert(at, case.randrange(256))
    else:
        del data[at:]
    file.write_bytes(data)
    return f"{file.name}: {how} at {at}"


def _lines(file: Path, case: Case) -> str:
    """Deletes or doubles a line, or exchanges two."""
    lines = file.read_text().splitlines(keepends=True)
    at = case.randrange(len(lines))
    how = case.choice(["delete", "double", "exchange"])
    if how == "exchange" and len({*lines}) > 1:
        other = case.choice([n for n, line in enumerate(lines) if line != lines[at]])
        lines[at], lines[other] = lines[other], lines[at]
    elif how == "double":
        lines.insert(at, lines[at])
    else:
        del lines[at]
    file.write_text("".join(lines))
    return f"{file.name}: {how} line {at}"


def _swap(file: Path, case: Case) -> str:
    """Puts the same file of another run in its place."""
    other = file.parent.parent / "other" / file.name
    if other.read_bytes() == file.read_bytes():
        return _bytes(file, case)
    shutil.copy(other, file)
    return f"{file.name}: the other run's"


def _gone(file: Path, case: Case) -> str:
    """Deletes the file."""
    file.unlink()
    return f"{file.name}: deleted"


def _change(folder: Path, case: Case) -> tuple[str, str]:
    """Changes one file; returns (its name, what was done)."""
    file = case.choice(sorted(folder.iterdir()))
    if case.random() < 0.1:
        name = case.choice(["results_2027-01-01T00-00-00.json", "samples_sums_2027-01-01T00-00-00.jsonl"])
        shutil.copy(next(folder.glob(f"{name.split('_')[0]}_*")), folder / name)
        return name, "added"
    ways: list[Callable[[Path, Case], str]] = [_bytes, _swap]
    if file.name != "report.html":  # a run is whole without its page
        ways.append(_gone)
    if file.suffix in (".json", ".jsonl"):
        ways += [_json_value] * 6
    if file.suffix == ".parquet":
        ways += [_column] * 6
    if file.suffix in (".jsonl", ".yaml", ".html"):
        ways += [_lines] * 2
    return file.name, case.choice(ways)(file, case)


# -- every reader ------------------------------------------------------------------------------------------------------


def _exit(work: Callable[[], int]) -> tuple[int, str]:
    """A command's exit code, and what it wrote to standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code(work)
    return code, err.getvalue()


def _same_value(file: Path, other: Path) -> bool:
    """Whether two files hold the same JSON value."""
    try:
        return bool(json.loads(file.read_bytes()) == json.loads(other.read_bytes()))
    except (OSError, ValueError):
        return False


def test_no_change_passes_any_reader(whole: Path, tmp_path: Path) -> None:
    for case in cases("run_folder", 120):
        root = tmp_path / case.name.replace("/", "-")
        shutil.copytree(whole, root)
        folder = root / "run"
        name, done = _change(folder, case)
        with case.named(done):
            if name == MANIFEST and _same_value(folder / name, whole / "run" / name):
                continue  # white space: the manifest is bound by its content
            with pytest.raises(ConfigError) as caught:
                load_run(folder)
            assert name in str(caught.value) or MANIFEST in str(caught.value), str(caught.value)
            readers: list[Callable[[], int]] = [
                lambda folder=folder: compare([str(folder), str(whole / "run")]),  # type: ignore[misc]
                lambda folder=folder, root=root: write_baseline(load_run(folder), root / "b.json"),  # type: ignore[misc]
                lambda folder=folder: gate(whole / "run", folder).exit_code,  # type: ignore[misc]
                lambda folder=folder: print_report(folder) or 0,  # type: ignore[misc,func-returns-value]
                lambda folder=folder, root=root: report([str(folder), "-o", str(root / "p.html")]),  # type: ignore[misc]
            ]
            code, err = _exit(case.choice(readers))
            assert code == 2 and "Traceback" not in err, err
        shutil.rmtree(root)


def test_an_edited_page_is_written_anew(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole / "run", tmp_path / "run"))
    shutil.copy(whole / "other" / "report.html", folder / "report.html")
    with pytest.raises(ConfigError, match=r"report\.html: not the page .* write it anew: python -m evalengine report"):
        load_run(folder)
    assert _exit(lambda: report([str(folder)])) == (0, "")
    assert load_run(folder).digest == load_run(whole / "run").digest
    (folder / "report.html").unlink()
    load_run(folder)


def test_a_manifest_without_its_hashes_is_told_by_the_page(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole / "run", tmp_path / "run"))
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"], manifest["sha256"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        load_run(folder)


def test_unbound_runs_are_read_or_refused_with_a_sentence(tmp_path: Path) -> None:
    """Of an older run not every edit can be seen; what is seen is a sentence, and what is read is used without harm."""
    generations = write_run(tmp_path / "made", [generated(doc) for doc in range(3)], bound=False)
    choices = write_choices(tmp_path / "choices", [[-1.0, -2.0], [-3.0, -1.5]], targets=[0, 1])
    manifest = json.loads((choices / MANIFEST).read_text())
    del manifest["files"], manifest["sha256"]
    (choices / MANIFEST).write_text(json.dumps(manifest))
    for case in cases("unbound_run", 150):
        source = case.choice([generations, choices])
        folder = Path(shutil.copytree(source, tmp_path / case.name.replace("/", "-")))
        if lm_eval := case.random() < 0.4:  # lm-eval leaves none of these files
            for name in ("digest.txt", "records.parquet", MANIFEST):
                (folder / name).unlink()
        (folder / "tokens.json").unlink(missing_ok=True)
        file = case.choice(sorted(file for file in folder.iterdir() if file.suffix in (".json", ".jsonl")))
        done = _json_value(file, case)
        with case.named(f"{source.name} {lm_eval} {done}"):
            against = str(folder if lm_eval else source)
            code, err = _exit(lambda folder=folder, a=against: compare([str(folder), a, "--allow"]))  # type: ignore[misc]
            assert code in (0, 1, 2) and "Traceback" not in err, err
            code, err = _exit(lambda folder=folder: report([str(folder), "-o", str(tmp_path / "page.html")]))  # type: ignore[misc]
            assert code in (0, 2) and "Traceback" not in err, err
        shutil.rmtree(folder)


NESTED = ["[" * 5000, '{"a":' * 3000, "1" * 5000, "\x00", '{"results": NaN}', "[" * 300 + "]" * 300]


@pytest.mark.parametrize("text", NESTED)
def test_nested_and_endless_json_is_a_sentence(whole: Path, tmp_path: Path, text: str) -> None:
    for bound in (True, False):
        for file in sorted((whole / "run").glob("*.json*")):
            folder = Path(shutil.copytree(whole / "run", tmp_path / f"{bound}-{file.name}"))
            if not bound:
                (folder / "report.html").unlink()
                manifest = json.loads((folder / MANIFEST).read_text())
                del manifest["files"], manifest["sha256"]
                (folder / MANIFEST).write_text(json.dumps(manifest))
            (folder / file.name).write_text(text)
            with pytest.raises(ConfigError, match=file.name.split("_")[0]):
                load_run_data(folder).pieces  # noqa: B018


@pytest.mark.slow  # the same as above in a process of python -O
def test_edited_records_are_refused_without_asserts(whole: Path, tmp_path: Path) -> None:
    """`python -O` takes assertions out of the program; nothing that refuses a file may be one."""
    folder = Path(shutil.copytree(whole / "run", tmp_path / "run"))
    file = folder / "records.parquet"
    rows = read_records(file)
    write_records(file, [RequestRecord(**{**vars(rows[0]), "text": "another"}), *rows[1:]])
    command = [sys.executable, "-O", "-m", "evalengine", "compare", str(folder), str(whole / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "records.parquet: not the file that the run wrote" in done.stderr, done.stderr
