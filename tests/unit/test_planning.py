"""Prompts are the same whether this process writes them or one beside it, which does so while the weights load."""

from __future__ import annotations

import os

import pytest

from evalengine import beside
from evalengine.compose import compose_jobs
from evalengine.config import Config
from evalengine.engine.deferred import DeferredLLM
from evalengine.engine.llm import LLM
from evalengine.errors import ConfigError
from evalengine.harness import plan
from evalengine.harness.plan import build_plan, plan_and_load, prepare
from evalengine.tasks.base import Task
from evalengine.tasks.lm_eval_task import LmEvalTask


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that wrote prompts here; each of several documents earns one."""
    written: list[int] = []

    def sha256(requests: object, real: object = plan.requests_sha256) -> str:
        assert callable(real)
        written.append(os.getpid())
        return str(real(requests))

    monkeypatch.setattr(plan, "requests_sha256", sha256)
    monkeypatch.setattr(beside, "cores", lambda: 2)
    monkeypatch.setattr(plan, "MANY_DOCUMENTS", 2)
    return written


def prepared(*settings: str) -> tuple[Config, list[Task], DeferredLLM]:
    (job,) = compose_jobs(["engine.device=cpu", *settings])
    checkpoint, tasks = prepare(job.config)
    own = {"batch_invariant": True, "numerics": job.config.numerics, "engine": job.config.engine}
    return job.config, tasks, DeferredLLM(checkpoint, **own, make=lambda: LLM(checkpoint, **own))  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "elsewhere"), [(("limit=3",), True), (("limit=1",), False)])
def test_the_plan_is_the_same_from_either_process(
    settings: tuple[str, ...], elsewhere: bool, writers: list[int]
) -> None:
    config, tasks, llm = prepared(*settings)
    with llm:
        made = plan_and_load(config, tasks, llm)
        assert llm.num_kv_blocks, "the weights are loaded"
        assert writers == ([] if elsewhere else [os.getpid()])
        wanted = build_plan(config, tasks, llm)
    assert made.prompts_sha256 == wanted.prompts_sha256 and len(made.requests) == config.limit
    assert [request.request for request in made.requests] == [request.request for request in wanted.requests]
    assert [planned.instances for planned in made.tasks] == [planned.instances for planned in wanted.tasks]
    assert made.requests[0].instance is made.tasks[0].instances[0][0], "answers are looked up by their instances"


def test_what_is_wrong_with_prompts_is_told_as_ever(writers: list[int]) -> None:
    config, tasks, llm = prepared("limit=3", "engine.max_model_len=256", "long_prompts=error", "task.num_fewshot=8")
    with llm, pytest.raises(ConfigError, match="document 0: the prompt has") as elsewhere:
        plan_and_load(config, tasks, llm)
    with pytest.raises(ConfigError) as here:
        build_plan(config, tasks, llm)
    assert not writers and elsewhere.value.problems == here.value.problems


def test_a_cache_may_spare_the_weights(writers: list[int], tmp_path: object) -> None:
    config, tasks, llm = prepared("limit=3", f"cache={tmp_path}")
    plan_and_load(config, tasks, llm)
    assert llm.num_kv_blocks is None and writers == [os.getpid()]


def test_a_users_class_and_lm_evals_tasks_are_planned_where_they_are_scored(writers: list[int]) -> None:
    config, (task,), llm = prepared("limit=3")

    class Mine(type(task)):  # type: ignore[misc]
        pass

    task.__class__ = Mine
    with llm:
        plan_and_load(config, [task], llm)
    assert writers == [os.getpid()] and LmEvalTask.keeps_instances
