"""Prompts are the same whether this process writes them or one beside it, which does so while the weights load."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.engine import loaded_model
from evalengine.engine.llm import LLM
from evalengine.errors import ConfigError
from evalengine.harness import plan
from evalengine.harness.identity import deferred_llm
from evalengine.harness.plan import build_plan, plan_and_load, prepare
from evalengine.integrations.lm_eval_tasks.task import LmEvalTask
from evalengine.tasks.base import Task
from evalengine.util import forked
from evalengine.util.forked import ForkedTask
from tests.e2e.command import write_tasks


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of the processes that wrote the prompts, in order; two documents earn a process."""
    wrote: list[int] = []

    def result(self: ForkedTask[object], real: Callable[[ForkedTask[object]], object] = ForkedTask.result) -> object:
        process = self._process or os.getpid()
        try:
            made = real(self)
        except ConfigError:
            wrote.append(process)
            raise
        if isinstance(made, tuple):
            wrote.append(process)
        return made

    monkeypatch.setattr(ForkedTask, "result", result)
    monkeypatch.setattr(forked, "cores", lambda: 3)
    monkeypatch.setattr(plan, "MANY_DOCUMENTS", 2)
    return wrote


def prepared(*settings: str) -> tuple[Config, list[Task], LLM]:
    (job,) = compose_jobs(["engine.device=cpu", *settings])
    checkpoint, tasks = prepare(job.config)
    return job.config, tasks, deferred_llm(job.config, checkpoint)


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        (("limit=1",), 0),
        (("limit=3",), 1),
        (("limit=3", "task=[arithmetic,two,three]"), 3),
        (("limit=2", "task=[arithmetic,two,three]"), 3),
        (("limit=1", "task=[arithmetic,two,three]"), 1),
    ],
)
def test_the_plan_is_the_same_whoever_writes_the_prompts(
    settings: tuple[str, ...], processes: int, shared: list[int], tmp_path: Path
) -> None:
    for name, file in zip(("two", "three"), write_tasks(tmp_path, "two", "three"), strict=True):
        settings = tuple(setting.replace(name, file) for setting in settings)
    config, tasks, llm = prepared(*settings)
    with llm:
        made = plan_and_load(config, tasks, llm)
        assert llm.num_kv_blocks, "the weights are loaded"
        assert len({*shared} - {os.getpid()}) == processes
        wanted = build_plan(config, tasks, llm)
    assert made.prompts_sha256 == wanted.prompts_sha256
    numbers = [item.request.request_id for item in made.requests]
    assert numbers == sorted({*numbers}), "each process numbers its own, in the plan's order"
    same = [replace(item.request, request_id=number) for number, item in enumerate(made.requests)]
    assert same == [item.request for item in wanted.requests]
    assert [planned.instances for planned in made.tasks] == [planned.instances for planned in wanted.tasks]
    assert made.requests[-1].instance is made.tasks[-1].instances[-1][-1], "answers are looked up by their instances"


def test_what_is_wrong_with_prompts_is_told_as_ever(shared: list[int]) -> None:
    config, tasks, llm = prepared("limit=3", "engine.max_model_len=256", "long_prompts=error", "task.num_fewshot=8")
    with llm, pytest.raises(ConfigError, match="document 0: the prompt has") as elsewhere:
        plan_and_load(config, tasks, llm)
    with pytest.raises(ConfigError) as here:
        build_plan(config, tasks, llm)
    assert shared != [os.getpid()] and elsewhere.value.problems == here.value.problems


@pytest.mark.parametrize("cores", [1, 3])
def test_rows_of_templates_are_checked_by_another_process(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_tasks(tmp_path, "two", "three")
    task = tmp_path / "three.yaml"
    task.write_text(task.read_text().replace("{{answer}}", "{{answer.split()[0]}}"))
    with (tmp_path / "three.jsonl").open("a") as rows:
        rows.write('{"question": "What is missing?", "answer": " "}\n')
    checkers = tmp_path / "checkers"

    def check(self: Task, limit: int | None, real: Callable[[Task, int | None], None] = Task.check) -> None:
        with checkers.open("a") as told:
            told.write(f"{os.getpid()}\n")
        real(self, limit)

    monkeypatch.setattr(Task, "check", check)
    monkeypatch.setattr(forked, "cores", lambda: cores)
    monkeypatch.setattr(plan, "MANY_DOCUMENTS", 2)
    settings = ["engine.device=cpu", f"task=[{','.join(files)}]", "model.path=/nowhere"]
    (job,) = compose_jobs(settings)
    with pytest.raises(ConfigError) as refused:
        prepare(job.config)
    model, row = refused.value.problems
    assert "/nowhere" in model and "three.jsonl:5" in row
    (checker,) = {*checkers.read_text().split()}
    assert checker != str(os.getpid())  # templates of a file have limits, which are those of a process
    (job,) = compose_jobs([*settings, "limit=4"])
    with pytest.raises(ConfigError) as refused:
        prepare(job.config)
    assert refused.value.problems == [model], "a row that is not evaluated"


def test_a_cache_may_spare_the_weights(shared: list[int], tmp_path: Path) -> None:
    config, tasks, llm = prepared("limit=3", f"cache={tmp_path}")
    plan_and_load(config, tasks, llm)
    assert llm.num_kv_blocks is None and shared == [], "nothing is done meanwhile"


def test_a_users_class_and_lm_evals_tasks_are_planned_where_they_are_scored(shared: list[int]) -> None:
    config, (task,), llm = prepared("limit=3")

    class Mine(type(task)):  # type: ignore[misc]
        pass

    task.__class__ = Mine
    with llm:
        plan_and_load(config, [task], llm)
    assert shared == [os.getpid()] and not vars(LmEvalTask).get("forks")


def test_exemplars_that_a_list_cannot_give_are_cured_task_by_task(tmp_path: Path) -> None:
    """What each message tells to write makes the run; the word for all tasks stays."""
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(" \n = A title = \n \n Some words .\n")
    (tmp_path / "lambada_openai").mkdir()
    rows = "".join(f'{{"text": "A passage of {number} words"}}\n' for number in range(5))
    (tmp_path / "lambada_openai" / "test.jsonl").write_text(rows)
    words = ["task=[arithmetic,wikitext,lambada_openai]", "task.num_fewshot=2", f"data_dir={tmp_path}"]
    with pytest.raises(ConfigError) as refused:
        prepared(*words)
    fixes = [re.findall(r"tasks\.\w+\.\w+=\w+", problem)[1:] for problem in refused.value.problems]
    assert [len(found) for found in fixes] == [1, 3] and "rows with the columns of the evaluated" in str(refused.value)
    for fix in fixes[1][::2]:
        _, tasks, _ = prepared(*words, fixes[0][0], fix)
        assert [task.num_fewshot for task in tasks] == [2, 0, 0 if "num_fewshot" in fix else 2]


@pytest.mark.parametrize(("device", "processes"), [("cpu", 0), ("cuda", 1)])
def test_few_documents_are_written_beside_a_gpus_model(
    device: str, processes: int, shared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's model takes so long to load that a process is earned by fewer documents."""
    monkeypatch.setattr(plan, "MANY_DOCUMENTS", 10)
    monkeypatch.setattr(plan, "FEW_DOCUMENTS", 3)
    config, tasks, llm = prepared("limit=3")
    parent = os.getpid()

    def architecture(device: torch.device) -> None:
        assert os.getpid() == parent, "CUDA fails in a forked process"

    monkeypatch.setattr(loaded_model, "gpu_architecture", architecture)
    llm.settings = replace(llm.settings, device=torch.device(device))
    monkeypatch.setattr(llm, "load", lambda: None)
    assert len(plan_and_load(config, tasks, llm).requests) == 3
    assert sum(process != os.getpid() for process in shared) == processes
