"""What a user reads after a mistake in a judge's settings, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import call, with_more_template
from tests.e2e.test_judge import JUDGE, words, write_task
from tests.e2e.test_judge import task as task  # a fixture


def test_everything_that_is_wrong_with_a_judge_is_listed_before_anything_runs(tmp_path: Path) -> None:
    judge = {
        "model": "./nowhere",
        "template": "{{question}} {{missing}} {{absent}}",
        "scale": [1, 2],
        "labels": "grade",
        "labelled": "unlabelled",
        "system_instruction": "Be fair.",
    }
    done = call(*words(write_task(tmp_path, judge), tmp_path / "out"))
    assert done.code == 2 and not (tmp_path / "out").exists()
    for said in (
        "judge.template: does not show response",
        "judge.template: there is no column absent in document 0, which has doc, gold, grade, other, question, ",
        "judge.template: there is no column missing",
        "judge.labelled: there is no column unlabelled",
        "judge.labels=grade: the scale (1, 2) has no 3",
        "judge.model=./nowhere: model.path=./nowhere: no model found",
    ):
        assert said in done.err, done.err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("judge.scale=[1]", "tasks.seats.judge.scale: has 1 label"),
        ("judge.extract='('", "tasks.seats.judge.extract: '(' is no regular expression"),
        ("judge.template='{{'", "tasks.seats.judge.template: is no Jinja2 template"),
        ("judge.against=nobody", "tasks.seats.judge.against: names the other answer of a pair"),
        ("judge.model=smolm2-135m", "judge.model=smolm2-135m: "),
        ("judge.modle=x", "task.judge.modle: no such setting; did you mean task.judge.model"),
        ("judge.max_model_len=1000000", "judge.model=self: judge.max_model_len=1000000: must be in"),
        ("judge.system_instruction=x", "judge.system_instruction: only a chat template shows it"),
    ],
)
def test_a_wrong_setting_is_named(task: str, setting: str, said: str, tmp_path: Path) -> None:
    done = call(*words(task, tmp_path, setting))
    assert done.code == 2 and said in done.err, done.err


def test_a_conversation_that_the_judges_template_refuses_is_told_before_the_first_answer(tmp_path: Path) -> None:
    strict = with_more_template(tmp_path / "strict", "{{ raise_exception('no graders here') }}")
    file = write_task(tmp_path, {**JUDGE, "model": str(strict), "apply_chat_template": True})
    done = call(*words(file, tmp_path / "out"))
    assert done.code == 2 and "judge: " in done.err and "no graders here" in done.err, done.err
    assert not (tmp_path / "out").exists()
    args = {"apply_chat_template": True, "chat_template_args": {"effort": "high"}}
    done = call(*words(write_task(tmp_path, {**JUDGE, **args}), tmp_path / "out"))
    assert "chat_template_args.effort" in done.err and "does not read it" in done.err, done.err
    done = call(*words(write_task(tmp_path, {**JUDGE, "chat_template_args": {"effort": 1}}), tmp_path / "out"))
    assert "judge.chat_template_args: has no effect without a chat template" in done.err, done.err


def test_a_task_that_writes_nothing_has_no_judge(tmp_path: Path) -> None:
    done = call(*words(write_task(tmp_path, output_type="loglikelihood", generation_kwargs=None), tmp_path / "out"))
    assert "tasks.seats.judge: scores answers that were written" in done.err, done.err


def test_a_task_without_metrics_and_without_a_judge_is_refused(tmp_path: Path) -> None:
    done = call(*words(write_task(tmp_path, {}, metric_list=[]), tmp_path / "out"))
    assert done.code == 2 and "metric_list: must be a list of {metric" in done.err, done.err
    done = call(*words(write_task(tmp_path, {"model": "self"}, metric_list=[]), tmp_path / "out"))
    assert "metric_list: names no metric, and no judge scores the answers" in done.err, done.err
    assert "judge.template: is not set" in done.err and "judge.scale: is not set" in done.err
