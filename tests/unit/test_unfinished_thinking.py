"""An answer whose thinking did not end gets no credit, whatever scores it."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoTokenizer

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config, DatasetConfig, GenerationConfig, JudgeConfig, TaskConfig, TemplateConfig
from evalengine.engine.request import GenerateRequest, SamplingParams
from evalengine.errors import ConfigError
from evalengine.harness.judging import Judge
from evalengine.harness.outcome import (
    Findings,
    Thought,
    find,
    task_results,
    thoughts,
    uncredited,
    verdicts,
)
from evalengine.harness.requests import HarnessRequest, Plan, TaskPlan
from evalengine.records.lm_eval import TaskResult, sample_row
from evalengine.records.schema import Answer
from evalengine.tasks.base import Task
from evalengine.tasks.instance import ProgramVerdict, Response
from evalengine.tasks.judge import CLS
from evalengine.tasks.metric import Metric, MetricValue
from evalengine.tasks.registry import load_task
from evalengine.tasks.rows import Doc
from evalengine.tasks.templated import Templated

TOKENIZER: Any = AutoTokenizer.from_pretrained(str(files("evalengine.assets") / "tinymath"))
END = "</think>"
WARM = GenerationConfig(temperature=1.0)
PARAMS = SamplingParams(stop=("\n\n",), think_end_token=END)


class Errors(Templated):
    """Counts errors, so that lower is better: an empty text has none."""

    metrics: ClassVar[dict[str, Metric]] = {"errors": Metric("mean", higher_is_better=False)}

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        return {"errors": float(len(answers[0]))}


class Instructions(Templated):
    """Scores each of several instructions, all of which an empty text follows."""

    metrics: ClassVar[dict[str, Metric]] = {"each": Metric()}

    def score(self, doc: Doc, answers: list[Any]) -> dict[str, MetricValue]:
        return {"each": [True, not answers[0]]}


def made(folder: Path, row: dict[str, Any] | None = None, cls: str = "templated:Templated", **own: Any) -> Task:
    file = folder / "test.jsonl"
    file.write_text(json.dumps(row or {"q": "1 + 1", "a": "2"}) + "\n")
    template = TemplateConfig(doc_to_text="{{q}}", doc_to_target="{{a}}") if "judge" not in own else TemplateConfig()
    config = TaskConfig(cls=cls, dataset=DatasetConfig(path=str(file)), split="test", template=template, **own)
    task = load_task("mine", config)
    task.load()
    return task


def answered(task: Task, *texts: tuple[str, str], prompt: str = "1 + 1") -> tuple[Plan, dict[Any, Answer]]:
    """A plan of the task's one document, with (text, finish reason) as the answers to its requests."""
    instances, requests, answers = task.instances(), [], {}
    for number, (instance, (text, reason)) in enumerate(zip(instances[0], texts, strict=True)):
        key = ("mine", 0, instance.index, instance.repeat)
        ids, prompt_ids = TOKENIZER.encode(text), TOKENIZER.encode(prompt)
        request = GenerateRequest(number, prompt_ids, PARAMS)
        requests.append(HarnessRequest(key, instance, request, 0))
        answer = text.rpartition(END)[2].strip()
        logprobs = np.zeros(len(ids), dtype=np.float32)
        answers[key] = Answer(ids, logprobs, reason, answer, None)
    return Plan([TaskPlan(task, instances)], requests), answers


def scored(task: Task, *texts: tuple[str, str], config: Config | None = None, prompt: str = "1 + 1") -> TaskResult:
    config = config or Config()
    plan, answers = answered(task, *texts, prompt=prompt)
    return task_results(plan, answers, find(plan, answers, config, TOKENIZER))[0]


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_unfinished_thinking_gets_no_credit(tmp_path: Path, reason: Any) -> None:
    task = made(tmp_path)
    result = scored(task, ("2", reason))
    assert result.metrics["exact_match,none"] == 0.0
    (sample,) = map(sample_row, result.samples)
    assert sample["resps"] == [["2"]] and sample["filtered_resps"] == [""]
    assert (result.thinking_truncated, result.unanswered) == ((1, {}) if reason == "length" else
                                                              (0, {"unended_thinking": 1}))  # fmt: skip
    assert sample.get("unanswered", {}) == result.unanswered
    assert scored(task, (f"So.{END}\n2", reason)).metrics["exact_match,none"] == 1.0
    config = Config(score_unfinished_thinking=True)
    assert scored(task, ("2", reason), config=config).metrics["exact_match,none"] == 1.0


@pytest.mark.parametrize(("prompt", "credit"), [("1<think>\n\n</think>\n\n", 1.0), ("1</think> 2 <think>", 0.0)])
def test_a_prompt_may_have_ended_the_thinking(tmp_path: Path, prompt: str, credit: float) -> None:
    """As templates write it for enable_thinking=false; of an earlier turn it says nothing about this one."""
    for reason in ("stop", "length"):
        result = scored(made(tmp_path), ("2", reason), prompt=prompt)
        assert result.metrics["exact_match,none"] == credit
        assert (not result.thinking_truncated and not result.unanswered) == bool(credit)


def test_a_begun_answer_may_follow_that_end(tmp_path: Path) -> None:
    task = made(tmp_path, gen_prefix="Answer:")
    result = scored(task, ("2", "stop"), prompt="1<think>\n\n</think>\n\nAnswer:")
    assert result.metrics["exact_match,none"] == 1.0


def test_an_empty_text_that_would_be_right_gets_no_credit_either(tmp_path: Path) -> None:
    assert scored(made(tmp_path, {"q": "1", "a": ""}), ("", "stop")).metrics["exact_match,none"] == 0.0
    worse = scored(made(tmp_path, cls=f"{__name__}:Errors"), ("three", "stop"))
    assert worse.metrics["errors,none"] == 5.0, "the empty text has the fewest errors"
    task = made(tmp_path, cls=f"{__name__}:Instructions")
    assert task.without_credit(task.docs[0], [Response("x")], [Response()]) == {("each", "none"): [0.0, 0.0]}


def test_unfinished_thinking_itself_is_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where higher is better: some scorers take seconds for a long text. The empty text is scored once."""
    task, seen = made(tmp_path), list[str]()
    judge = task.judge  # type: ignore[attr-defined]
    monkeypatch.setattr(type(task), "needs_limits", False)  # scored in this process
    monkeypatch.setattr(task, "judge", lambda doc: lambda text: seen.append(text) or judge(doc)(text))
    assert scored(task, ("2", "length")).metrics["exact_match,none"] == 0.0
    assert seen == [""]


def test_of_several_samples_the_finished_ones_count(tmp_path: Path) -> None:
    task = made(tmp_path, repeats=4, generation=WARM)
    done, cut = (f"So.{END}2", "stop"), ("2", "length")
    result = scored(task, cut, done, cut, cut)
    assert result.metrics["avg@4,none"] == 0.25 and result.metrics["pass@4,none"] == 1.0
    assert result.metrics["maj@4,none"] == 0.0 and result.thinking_truncated == 3


def test_programs_of_unfinished_thinking_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"q": "Give 1.", "a": "assert x == 1", "test_list": ["assert x == 1"]}
    task = made(tmp_path, row, "code:MBPP", repeats=2, generation=WARM)
    plan, answers = answered(task, ("x = 1", "length"), (f"So.{END}x = 1", "stop"))
    thought = thoughts(plan, answers, TOKENIZER)
    denied = uncredited(thought, Config())
    run: list[str] = []

    def passed(programs: dict[str, Any], *_: Any) -> dict[str, ProgramVerdict]:
        run.extend(programs)
        return dict.fromkeys(programs, ProgramVerdict("passed"))

    monkeypatch.setattr("evalengine.integrations.sandbox.run.run_programs", passed)
    monkeypatch.setattr("evalengine.harness.outcome.isolated", lambda config: True)
    found = verdicts(plan, answers, Config(progress=False), denied)
    assert len(run) == 1 and [*found] == [("mine", 0, 0, 1)]
    (result,) = task_results(plan, answers, Findings(thought, denied, found))
    assert result.metrics["pass_at_1,none"] == 0.5
    assert sample_row(result.samples[0])["outcomes"] == ["not run", "passed"]


def test_a_judges_unfinished_thinking_is_unread(tmp_path: Path) -> None:
    judge = JudgeConfig(template="{{response}}", scale=[1, 2, 3], extract=r"(\d)")
    row = {"doc": {"q": "1"}, "target": "2", "responses": ["x"]}
    task = made(tmp_path, row, CLS, judge=judge)
    result = scored(task, ("Not 3, not", "length"))
    assert (result.metrics["score,judge"], result.metrics["unread,judge"]) == (1.0, 1.0)
    assert scored(task, (f"Hm.{END}3", "stop")).metrics["score,judge"] == 3.0


def no_run(config: Config) -> Path:
    raise FileNotFoundError("no run")


def test_a_judge_does_not_read_the_thinking(tmp_path: Path) -> None:
    plan, answers = answered(made(tmp_path), ("2", "length"))
    (key,) = answers
    denied = uncredited({key: Thought("2", 1, True)}, Config())
    settings = {"mine": JudgeConfig(template="{{response}}", scale=[1, 2, 3], extract=r"(\d)")}
    judge = Judge(Config(progress=False), settings, None, False, None, {})
    with pytest.raises(FileNotFoundError, match="no run"):
        judge.judge(plan, answers, denied, tmp_path, no_run)
    (row,) = (tmp_path / "judge" / "mine.jsonl").read_text().splitlines()
    assert json.loads(row)["responses"] == [""] and answers[key].text == "2"
    assert len(plan.requests) == 1


def test_the_setting_needs_an_end_of_thinking() -> None:
    with pytest.raises(ConfigError, match="score_unfinished_thinking=true: needs an end of thinking"):
        compose_jobs(["score_unfinished_thinking=true"])
