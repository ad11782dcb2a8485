"""A YAML file of one's own that asks for what only lm-eval has is run by lm-eval's code, with lm-eval's results.

Its functions lie beside it, as in lm-eval. Needs lm-eval (`pip install evalengine[lm-eval]`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from evalengine.errors import ConfigError
from evalengine.integrations.lm_eval_tasks.task import LmEvalTask
from tests.e2e.command import finished
from tests.parity.agreement import FakeChat, answer_task, check_equal, evaluate_by_lm_eval
from tests.parity.test_templated import CHOICE, TEXT, our_task, speak, write

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")

FUNCTIONS = """
def docs(split):
    return split.map(lambda row: {"topic": row["topic"].upper(), "choices": row["options"]})


def text(doc):
    return "So: " + doc["question"]


def scores(doc, results):
    return {"length": len(results[0]), "right": float(doc["letter"] in results[0])}


def longest(values):
    return max(values)
"""
SPLITS = {"test_split": "test", "training_split": "train"}
BY_CODE = """
process_results: !function more.scores
metric_list:
  - {metric: length, aggregation: !function more.longest, higher_is_better: false}
  - {metric: right, aggregation: mean, higher_is_better: true}
"""
WITHOUT_TEXT = {key: value for key, value in TEXT.items() if key != "doc_to_text"}
CASES: dict[str, tuple[dict[str, Any], str]] = {  # the settings, and lines that hold functions
    "f1": (
        {
            **CHOICE,
            **SPLITS,
            "doc_to_choice": ["even", "odd"],
            "doc_to_target": "{{gold % 2}}",
            "metric_list": [{"metric": "acc"}, {"metric": "f1"}],
        },
        "",
    ),
    "rows": ({**CHOICE, **SPLITS, "description": "{{topic}}\n"}, "process_docs: !function more.docs"),
    "texts": ({**WITHOUT_TEXT, **SPLITS}, "doc_to_text: !function more.text"),
    "letters": (
        {
            **TEXT,
            **SPLITS,
            "filter_list": [
                {
                    "name": "letter",
                    "filter": [{"function": "multi_choice_regex", "group_select": -1}, {"function": "take_first"}],
                }
            ],
        },
        "process_docs: !function more.docs",
    ),
    "scores": ({**TEXT, **SPLITS}, BY_CODE),
}


def own_file(folder: Path, name: str, content: dict[str, Any], lines: str = "") -> Path:
    """Writes a task's file, its rows, and the module of its functions."""
    (folder / "more.py").write_text(FUNCTIONS)
    file = write(folder, name, content)
    file.write_text(f"{file.read_text()}{lines}\n")
    return file


@pytest.mark.parametrize("name", CASES)
def test_what_only_lm_eval_has_is_lm_eval_s(name: str, tmp_path: Path) -> None:
    file = own_file(tmp_path, name, *CASES[name])
    shots, chat = (0, True) if name == "letters" else (2, False)
    reference = evaluate_by_lm_eval(file, shots, speak, apply_chat_template=chat)
    task = our_task(file, shots, chat=FakeChat() if chat else None)
    assert isinstance(task, LmEvalTask)
    check_equal(reference, name, task, answer_task(task, speak))
    assert task.version == 1.5


def test_a_run_is_the_same_wherever_the_file_lies(tmp_path: Path) -> None:
    """A run's identity and digest count what the file and its functions say, not where they lie."""
    (tmp_path / "here").mkdir()
    own_file(tmp_path / "here", "mine", {**CHOICE, **SPLITS}, "process_docs: !function more.docs")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    first, second = (
        finished(tmp_path / f"out_{place}", f"task={tmp_path / place / 'own.yaml'}", "limit=2")
        for place in ("here", "there")
    )
    assert first.digest == second.digest and first.manifest["run_id"] == second.manifest["run_id"]
    with (tmp_path / "there" / "more.py").open("a") as file:
        file.write("# another program\n")
    other = finished(tmp_path / "other", f"task={tmp_path / 'there' / 'own.yaml'}", "limit=2")
    assert other.digest == first.digest and other.manifest["run_id"] != first.manifest["run_id"]


@pytest.mark.parametrize(
    ("content", "lines", "message"),
    [
        ({"metric_list": [{"metric": "accc"}]}, "", "lm-eval .* has no metric accc$"),
        ({"metric_list": [{"metric": "acc", "aggregation": "middle"}]}, "", "has no aggregation middle$"),
        ({}, "process_docs: !function more.nothing", "cannot read the task: AttributeError: .* 'nothing'"),
        (
            {},
            "process_docs: !function more.docs\nsurprise: 1",
            "surprise .no such key.*Take these out, or name",
        ),
        ({"doc_to_image": "x"}, "process_docs: !function more.docs", "doc_to_image; process_docs: !function more.docs"),
        ({}, "process_docs: !function more.docs\ncls: a:B", "process_docs: !function more.docs .Python code"),
    ],
)
def test_what_lm_eval_has_not_either_is_refused(
    content: dict[str, Any], lines: str, message: str, tmp_path: Path
) -> None:
    file = own_file(tmp_path, "mine", {**CHOICE, **SPLITS, **content}, lines)
    with pytest.raises(ConfigError, match=message):
        our_task(file, 0)
