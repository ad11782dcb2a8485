"""tasks/README.md, run as it is written: its files, its commands, and the lines that it shows of their output."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.command import ROOT, call

PAGE = (ROOT / "tasks" / "README.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S)
CUT = "tasks.arithmetic.generation.max_gen_toks=8"
COMMANDS = re.findall(r"^\$ python -m evalengine (.*)\n(.*)\n", PAGE, re.M)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files, in which the page's package looks installed."""
    for name, content in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    ((group, entries),) = re.findall(
        r'^\[project\.entry-points\."(.*)"\]\n(.*)', (tmp_path / "pyproject.toml").read_text()
    )
    installed = tmp_path / "mypackage-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\n{entries.replace(chr(34), '')}\n")
    return tmp_path


def squeezed(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def test_the_page_has_files_and_commands() -> None:
    assert [name for name, _ in FILES] == [
        *("capitals.yaml", "capitals.jsonl", "examples.jsonl", "mypackage/tasks.py", "sorted_capitals.yaml"),
        "pyproject.toml",
    ]
    assert len(COMMANDS) == 3


@pytest.mark.parametrize(("words", "shown"), COMMANDS)
def test_a_command_of_the_page(words: str, shown: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    done = call(*words.split())
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypackage"]:
        del sys.modules[name]
    assert done.code == 0, done.err
    assert squeezed(shown) in squeezed(done.out)
    assert "6 requests of 3 documents" in done.out


def test_a_list_and_a_folder_of_the_search_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine" / "task").mkdir(parents=True)
    for name in ("capitals.yaml", "capitals.jsonl", "examples.jsonl"):
        (folder / "mine" / "task" / name).write_bytes((folder / name).read_bytes())
        (folder / name).rename(folder / f"moved-{name}")
    search = f"hydra.searchpath=[file://{folder}/mine]"
    monkeypatch.chdir(folder)
    done = call(
        "task=[arithmetic,capitals]",
        search,
        "limit=2",
        "task.num_fewshot=0",
        CUT,
    )
    assert done.code == 0, done.err
    assert "arithmetic+capitals" in done.out and "6 requests of 4 documents" in done.out


def test_what_the_page_says_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, functions and metrics that are not supported are refused in one line that names each."""
    file = folder / "more.yaml"
    file.write_text(
        "include: capitals.yaml\nprocess_docs: !function utils.docs\nsurprise: 1\n"
        "metric_list: [{metric: bleu}, {metric: acc}]\n"
    )
    monkeypatch.chdir(folder)
    done = call("task=./more.yaml")
    assert done.code == 2 and done.out == "" and len(done.err.splitlines()) == 1
    for reason in ("process_docs: !function utils.docs", "surprise (no such key)", "bleu is not built"):
        assert reason in done.err
