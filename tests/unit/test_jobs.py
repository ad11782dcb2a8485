"""The settings of many tasks are composed by a process of its own while this one imports what a run needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from evalengine.cli import jobs
from evalengine.config.compose import Job, compose_jobs
from evalengine.errors import ConfigError
from evalengine.util import forked
from evalengine.util.command import Namespace


def words(*settings: str) -> Namespace:
    return Namespace(settings=[*settings], multirun=False, cfg=False, version=False, argv=[*settings])


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that are imported early, in a process that seems to have no torch yet."""
    names: list[str] = []
    monkeypatch.setattr("evalengine.api.perform.preload", lambda: names.append("torch"))
    for begun in ("begin_imports", "wake_gpu"):  # a second torch in this process would break the tests after these
        monkeypatch.setattr(jobs, begun, lambda *_: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return names


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The runs that would be made."""
    runs: list[Job] = []

    def keep(composed: list[Job], argv: Sequence[str]) -> int:
        runs.extend(composed)
        return 0

    monkeypatch.setattr(jobs, "_run_all", keep)
    return runs


@pytest.mark.parametrize("cores", [1, 2])
def test_many_tasks_are_composed_beside_the_imports(
    cores: int, imported: list[str], started: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (forked, jobs):
        monkeypatch.setattr(module, "cores", lambda: cores)
    settings = ["task=mmlu", "limit=3"]
    assert jobs.main(words(*settings)) == 0
    assert started == compose_jobs(settings) and len(imported) == cores - 1


def test_few_tasks_are_composed_here(imported: list[str], started: list[Job]) -> None:
    assert jobs.main(words("task=[gsm8k,arc_easy]")) == 0
    assert [*started[0].config.tasks] == ["gsm8k", "arc_easy"] and imported == []


def test_what_is_wrong_is_said_as_ever(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (forked, jobs):
        monkeypatch.setattr(module, "cores", lambda: 2)  # It is 1 where an earlier test has imported Ray.
    settings = ["task=mmlu", "limit=0", "seed=-1"]
    told = []
    for attempt in (lambda: jobs.main(words(*settings)), lambda: compose_jobs(settings)):
        with pytest.raises(ConfigError) as caught:
            attempt()
        told.append(caught.value.problems)
    assert told[0] == told[1] and len(told[0]) == 2 and imported
