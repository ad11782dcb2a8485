"""What a task's file runs when it is named (tasks/README.md, "What a task's file can do")."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine.compose import compose_jobs
from evalengine.errors import ConfigError
from evalengine.tasks.registry import load_task

HEAD = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
doc_to_target: a
"""
ROWS = '{"q": "a", "a": "b"}\n'


def read(folder: Path, patch: pytest.MonkeyPatch, lines: str) -> str:
    """The problem with a task file, or its first prompt; the module beside it leaves a trace when it is imported."""
    patch.chdir(folder)
    patch.syspath_prepend(folder)
    (folder / "trusted.py").write_text("open('trace', 'w').close()\n")
    (folder / "rows.jsonl").write_text(ROWS)
    (folder / "mine.yaml").write_text(HEAD + lines)
    try:
        (job,) = compose_jobs(["task=./mine.yaml"])
        task = load_task("mine", job.config.tasks["mine"])
        task.load()
    except ConfigError as error:
        return str(error)
    return task.instances()[0][0].context


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        ("doc_to_text: '{{q}}'\nprocess_docs: !function trusted.docs", "!function trusted.docs (Python code)"),
        ("doc_to_text: !function trusted.docs", "!function trusted.docs (Python code)"),
        ("doc_to_text: '{{q.__class__.__mro__}}'", "access to attribute '__class__' of 'str' object is unsafe"),
        ("doc_to_text: '{{cycler.__init__.__globals__}}'", "access to attribute '__init__'"),
        ("doc_to_text: '{{q.format_map(q)}} {{\"{0.__class__}\".format(q)}}'", "unsafe"),
        ("doc_to_text: '${oc.env:HOME} {{q}}'", "${oc.env:HOME} a"),
    ],
)
def test_a_file_in_lm_evals_keys_runs_nothing(
    lines: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer in read(tmp_path, monkeypatch, lines)
    assert not (tmp_path / "trace").exists()


def test_a_file_that_names_a_class_imports_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class's module is imported, whatever is in it: such a file needs as much trust as a script."""
    problem = read(tmp_path, monkeypatch, "doc_to_text: '{{q}}'\ncls: trusted:Nothing")
    assert "trusted:Nothing is not a module:Class" in problem and (tmp_path / "trace").exists()
