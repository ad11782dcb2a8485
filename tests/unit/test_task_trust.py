"""What a task's file runs when it is named (tasks/README.md, "What a task's file can do")."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.errors import ConfigError
from evalengine.tasks import lm_eval_yaml
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


TEMPLATES = [
    ("doc_to_text: '{{q.__class__.__mro__}}'", "access to attribute '__class__' of 'str' object is unsafe"),
    ("doc_to_text: '{{cycler.__init__.__globals__}}'", "access to attribute '__init__'"),
    ("doc_to_text: '{{q.format_map(q)}} {{\"{0.__class__}\".format(q)}}'", "unsafe"),
    ("doc_to_text: '${oc.env:HOME} {{q}}'", "${oc.env:HOME} a"),
]
CODE = ("doc_to_text: '{{q}}'\nprocess_docs: !function trusted.docs", "doc_to_text: !function trusted.docs")
LM_EVAL_S = "\nmetric_list: [{metric: exact_match, aggregation: median}]"  # which lm-eval has, and this package has not


@pytest.mark.parametrize(("lines", "answer"), TEMPLATES)
def test_a_file_in_lm_evals_keys_runs_nothing(
    lines: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer in read(tmp_path, monkeypatch, lines)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(("lines", "answer"), TEMPLATES)
def test_lm_eval_runs_templates_in_the_sandbox_too(
    lines: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
    assert answer in read(tmp_path, monkeypatch, lines + LM_EVAL_S)
    assert "lm-eval" in read(tmp_path, monkeypatch, f"doc_to_text: '{{{{nothing}}}}'{LM_EVAL_S}"), "lm-eval runs it"
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("lines", CODE)
def test_a_function_is_imported_by_lm_eval_once_the_task_is_used(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naming the file imports nothing. Without lm-eval, its functions are refused, and not looked up."""
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
    with monkeypatch.context() as patch:
        patch.setattr(lm_eval_yaml, "find_spec", lambda name: None)
        assert "!function trusted.docs (Python code)" in read(tmp_path, monkeypatch, lines)
        assert not (tmp_path / "trace").exists()
    compose_jobs(["task=./mine.yaml"])
    assert not (tmp_path / "trace").exists()
    assert "has no function 'docs'" in read(tmp_path, monkeypatch, lines)
    assert (tmp_path / "trace").exists()


def test_a_file_that_names_a_class_imports_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class's module is imported, whatever is in it: such a file needs as much trust as a script."""
    problem = read(tmp_path, monkeypatch, "doc_to_text: '{{q}}'\ncls: trusted:Nothing")
    assert "trusted:Nothing is not a module:Class" in problem and (tmp_path / "trace").exists()
