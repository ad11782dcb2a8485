"""From the engine's answers to metrics: what the end-to-end runs cannot reach."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evalengine.config.schema import DatasetConfig, TaskConfig, TemplateConfig
from evalengine.engine.request import GenerateRequest, ScoreRequest
from evalengine.errors import EvalEngineError
from evalengine.harness import outcome
from evalengine.harness.outcome import task_results
from evalengine.harness.requests import HarnessRequest, Plan, TaskPlan
from evalengine.records.lm_eval import TaskResult
from evalengine.records.schema import Answer
from evalengine.tasks.base import Task
from evalengine.tasks.registry import load_task
from evalengine.util import limits


def loaded(folder: Path, name: str, cls: str, version: float, rows: str) -> Task:
    file = folder / "test.jsonl"
    file.write_text(rows)
    task = load_task(name, TaskConfig(cls=cls, version=version, dataset=DatasetConfig(path=str(file)), split="test"))
    task.load()
    return task


def test_an_empty_page_has_no_request_and_adds_nothing(tmp_path: Path) -> None:
    rows = '{"page": ""}\n{"page": "two words"}\n'
    task = loaded(tmp_path, "wikitext", "wikitext:WikiText", 2.0, rows)
    instances = task.instances(None)
    key = ("wikitext", 1, 0, 0)
    answer = Answer([5, 6], np.array([-1, -2], dtype=np.float32), "length", "", False)
    plan = Plan([TaskPlan(task, instances)], [HarnessRequest(key, instances[1][0], ScoreRequest(0, [0], [5, 6]), 0)])
    (result,) = task_results(plan, {key: answer})
    assert result.metrics["bits_per_byte,none"] == pytest.approx(3 / len("two words") / math.log(2))
    assert result.effective == 2


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({"filter_list": [{"name": "bad", "filter": [{"function": "regex", "regex_pattern": "(a|a)*b"}]}]},
         "filter_list.bad"),
        ({"metric_list": [{"metric": "exact_match", "regexes_to_ignore": ["(a|a)*b"]}]}, "metric_list"),
    ],
)  # fmt: skip
def test_patterns_have_limits_for_each_answer(
    own: dict[str, Any], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pattern is harmless until an answer has many of its letters."""
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    (tmp_path / "test.jsonl").write_text('{"q": "a", "a": "b"}\n{"q": "a", "a": "b"}\n')
    template = TemplateConfig(doc_to_text="{{q}}", doc_to_target="{{a}}", **own)
    config = TaskConfig(cls="templated:Templated", dataset=DatasetConfig(path=str(tmp_path)), split="test",
                        template=template)  # fmt: skip
    task = load_task("mine", config)
    task.load()
    instances = task.instances(None)
    keys = [("mine", number, 0, 0) for number in range(2)]
    plan = Plan([TaskPlan(task, instances)], [HarnessRequest(key, instances[key[1]][0], GenerateRequest(0, [0]), 0)
                                              for key in keys])  # fmt: skip

    def score(*texts: str) -> list[TaskResult]:
        answers = {key: Answer([5], np.array([-1], dtype=np.float32), "stop", text, None)
                   for key, text in zip(keys, texts, strict=True)}  # fmt: skip
        return task_results(plan, answers)

    (result,) = score("b", "aaab")
    assert [sample.doc_id for sample in result.samples] == [0, 1]
    with pytest.raises(EvalEngineError, match=rf"tasks.mine: the answer to document 1 .*{wanted}: is not finished"):
        score("b", "a" * 60)


def test_tasks_with_limits_are_scored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scoring of either kind may use all cores."""
    tasks = [SimpleNamespace(name=str(n), needs_limits=n % 2 == 1, can_fork=False) for n in range(4)]

    def scored(own: TaskPlan, *_: object) -> Any:
        begin = time.monotonic()
        time.sleep(0.05)
        return SimpleNamespace(name=own.task.name, begin=begin, end=time.monotonic())

    monkeypatch.setattr(outcome, "_task_result", scored)
    results: Any = task_results(Plan([TaskPlan(task, [[]]) for task in tasks], []), {})
    assert [result.name for result in results] == ["0", "1", "2", "3"]
    assert results[3].end <= results[0].begin


def test_an_answer_that_cannot_be_scored_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = loaded(tmp_path, "mine", "gsm8k:GSM8K", 3.0, '{"question": "1 + 1?", "answer": "2"}\n')
    instances = task.instances(None)
    key = ("mine", 0, 0, 0)
    answer = Answer([5], np.array([-1], dtype=np.float32), "length", "2", None)
    plan = Plan([TaskPlan(task, instances)], [HarnessRequest(key, instances[0][0], GenerateRequest(0, [0]), 0)])
    assert task_results(plan, {key: answer})[0].effective == 1
    monkeypatch.setattr(type(task), "score", lambda self, doc, answers: [][0])
    with pytest.raises(EvalEngineError) as error:
        task_results(plan, {key: answer})
    assert str(error.value) == (
        "tasks.mine: the answer to document 0 cannot be scored (IndexError: list index out of range). All answers are "
        "saved: fix this and rerun the command to score them"
    )
