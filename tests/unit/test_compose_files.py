"""A user's own configuration files: mistakes are sentences that name the file, bombs are refused before they expand."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.compose import Job, Source, _of_shipped_files, compose_jobs, read_config
from evalengine.errors import ConfigError

TASK = "cls: gsm8k:GSM8K\ndataset: {path: rows.jsonl}\nsplit: test\n"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def jobs(folder: Path, *overrides: str, multirun: bool = False) -> list[Job]:
    """Composes with the folder's files beside the shipped ones."""
    return compose_jobs([f"hydra.searchpath=[file://{folder}]", *overrides], multirun)


def written(folder: Path, name: str, text: str | bytes) -> Path:
    file = folder / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_a_shipped_file_that_could_not_be_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A composition without its settings is reported by each call, and not used once the file can be read."""
    shipped = ["task=gsm8k", "model=qwen3-1.7b"]
    read = Source.settings
    _of_shipped_files.cache_clear()

    def settings(source: Source, group: str, name: str, path: Path | None) -> Any:
        if group == "model":
            raise OSError("too many open files")
        return read(source, group, name, path)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Source, "settings", settings)
            with pytest.raises(ConfigError, match=r"model=qwen3-1\.7b: .*too many open files"):
                compose_jobs(shipped)
    assert compose_jobs(shipped)[0].config.model.path == "Qwen/Qwen3-1.7B"


@pytest.mark.parametrize("header", ["# @package tasks.mine\n", "#@package tasks.mine\n", "# @package tasks.other\n#\n"])
def test_a_task_of_ones_own(header: str, tmp_path: Path) -> None:
    """The package line names the task, and a suite of one's own can list it."""
    written(tmp_path, "task/mine", header + TASK)
    (job,) = jobs(tmp_path, "task=[mine,gsm8k]")
    assert [*job.config.tasks] == ["other" if "other" in header else "mine", "gsm8k"]
    written(tmp_path, "task/suite", "defaults: [mine, arc_easy]\n")
    (job,) = jobs(tmp_path, "task=suite")
    assert len(job.config.tasks) == 2


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "it has no '# @package' line"),
        ("# My task\n# @package tasks.mine\n", "it has no '# @package' line"),  # the line must come first for Hydra
        ("# @package task.mine\n", "it says '# @package task.mine'"),
        ("# @package _group_\n", "it says '# @package _group_'"),
    ],
)
@pytest.mark.parametrize("chosen", ["task=mine", "task=[gsm8k,mine]", "task=suite", "experiment=both"])
def test_a_task_without_its_package_line(header: str, message: str, chosen: str, tmp_path: Path) -> None:
    """The problem is the same however the task is chosen, and has the file and the fix."""
    file = written(tmp_path, "task/mine", header + TASK)
    written(tmp_path, "task/suite", "defaults: [mine, arc_easy]\n")
    written(tmp_path, "experiment/both", "# @package _global_\ndefaults: [override /task: [gsm8k, mine]]\n")
    with pytest.raises(ConfigError) as error:
        jobs(tmp_path, chosen)
    fix = "so its settings would go elsewhere; begin it with '# @package tasks.mine'"
    assert error.value.problems == [f"task=mine: {file}: {message}, {fix}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cls: [a\n", "expected ',' or ']'"),
        ("cls: a\ncls: b\n", "the key 'cls' stands twice"),
        ("- a\n- b\n", "must hold settings, name: value, a line each"),
        ("word", "must hold settings"),
        ("1: 2\n", "tasks.mine[1]=1: Keys should be strings"),
        ("[1]: 2\n", "unhashable key"),
        (b"cls: \x80\n", "can't decode byte 0x80"),
        ("cls: !!python/object:os.system a\n", "could not determine a constructor"),
        ("cls: ${nope}\n", "Interpolation key 'nope' not found full_key: tasks.mine.cls"),
        ("cls: ${tasks.mine.cls}\n", "tasks.mine.cls"),
        ("defaults: 5\ncls: a\n", "defaults"),
        ("defaults: [5]\n", "Unsupported type in defaults"),
        ("defaults: [{a: {b: c}}]\n", "in defaults : dict"),
        ("defaults: [nowhere]\n", "nowhere"),
        ("dataset: 5\n", "mine"),
        ("dataset:\n  file: x\n", "tasks.mine.dataset.file: no such setting; did you mean tasks.mine.dataset.files?"),
        ("version: [1]\n", "mine"),
        ("cls: null\n", "tasks.mine: "),
        (BOMB, "aliases expand it to"),
        ("a: &a [*a]\n", "holds the alias itself"),
        ("[" * 500, "nested too deeply"),
        ("cls: " + "[" * 300 + "]" * 300, "nested too deeply"),
    ],
)
def test_mistakes_in_a_task_of_ones_own(text: str | bytes, message: str, tmp_path: Path) -> None:
    """Each mistake is one line, and a bomb is refused before it expands."""
    written(tmp_path, "task/mine", b"# @package tasks.mine\n" + (text if isinstance(text, bytes) else text.encode()))
    begin = time.perf_counter()
    with pytest.raises(ConfigError) as error:
        jobs(tmp_path, "task=mine")
    assert message in str(error.value) and "\n" not in error.value.problems[0]
    assert time.perf_counter() - begin < 5


def test_empty_files_and_an_experiment_without_its_package_line(tmp_path: Path) -> None:
    for group, text, message in (
        ("task", "", "it is empty"),
        ("task", "# @package tasks.mine\n", "it is empty"),
        ("experiment", "", "it is empty"),
        ("experiment", "limit: 3\n", "it has no '# @package' line, so"),
        ("experiment", "# @package other\nlimit: 3\n", "it says '# @package other', so"),
    ):
        file = written(tmp_path, f"{group}/mine", text)
        with pytest.raises(ConfigError) as error:
            jobs(tmp_path, f"{group}=mine")
        (problem,) = error.value.problems
        assert problem.startswith(f"{group}=mine: {file}: {message}")
        file.unlink()


def test_all_files_at_fault_are_named_at_once(tmp_path: Path) -> None:
    written(tmp_path, "task/mine", BOMB)
    written(tmp_path, "model/mine", "a: [")
    os.mkfifo(tmp_path / "task" / "pipe.yaml")
    with pytest.raises(ConfigError) as error:
        jobs(tmp_path, "task=[mine,pipe]", "model=mine")
    assert sorted(p.split(":")[0] for p in error.value.problems) == ["model=mine", "task=mine", "task=pipe"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hydra: {sweeper: {params: [1, 2]}}", "experiment/mine"),
        ("hydra: {sweeper: {params: {seed: 'range(0,1000000000)'}}}", "a sweep has at most 1,000 runs"),
        ("hydra: {sweeper: {params: {nothing: '1,2'}}}", "nothing: no such setting"),
        ("hydra: {sweeper: {params: {seed: '1,2,('}}}", "seed=1,2,("),
        (BOMB, "aliases expand it to"),
        ("seed: [", "experiment=mine: "),
    ],
)
def test_mistakes_in_an_experiment_of_ones_own(text: str, message: str, tmp_path: Path) -> None:
    written(tmp_path, "experiment/mine", "# @package _global_\n" + text + "\n")
    with pytest.raises(ConfigError) as error:
        jobs(tmp_path, "experiment=mine")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=range(0,1000000000)"], "a sweep has at most 1,000 runs"),
        (["seed=shuffle(range(0,1000000000))"], "only lists, choice() and range() can be swept"),
        (["seed=range(0,1e9,0.5)"], "a sweep has at most"),
        (["seed=range(0,100)", "limit=range(1,100)"], "a sweep has at most"),
        (["seed=range(0,10,0)"], "seed=range(0,10,0)"),
        (["seed=range(0,inf)"], "a sweep has at most"),
        (["seed=range(5,1)"], "sweeps no value at all"),
        (["seed=interval(0,1)"], "only lists, choice() and range() can be swept"),
    ],
)
def test_sweeps_without_end_are_refused_by_their_number(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_jobs(overrides, multirun=True)
    assert message in str(error.value)


def test_ordinary_sweeps_are_composed() -> None:
    swept = compose_jobs(["seed=range(0,3)", "limit=1,2"], multirun=True)
    assert [(job.config.seed, job.config.limit) for job in swept] == [(s, n) for s in range(3) for n in (1, 2)]
    assert [j.config.seed for j in compose_jobs(["seed=range(4,0,-2)"], multirun=True)] == [4, 2]


@pytest.mark.parametrize("text", [BOMB, "[", "- 1", "5", "tasks: {a: null}", "tasks: 5", "model: null", "{[1]: 2}"])
def test_a_runs_configuration_that_is_damaged_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml: ") as error:
        read_config(file)
    assert len(error.value.problems) == 1


def test_a_working_directory_that_was_deleted_is_one_line(tmp_path: Path) -> None:
    code = f"import os, evalengine.__main__ as m; os.rmdir({str(tmp_path)!r}); raise SystemExit(m.main(['limit=1']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "evalengine: the working directory no longer exists: change to one that does (cd)\n"
