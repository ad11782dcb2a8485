"""The outline of the shipped tasks is what Hydra composes; and one name cannot stand for two tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from evalengine.__main__ import main
from evalengine.config import shipped as task_outline
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.config.shipped import available, names_in, outline
from evalengine.errors import ConfigError
from evalengine.tasks.registry import task_class
from tests.unit.shipped_tasks import each_task


@pytest.mark.parametrize("name", each_task())
def test_an_outline_is_what_hydra_composes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra reads and merges every file itself, as it does where the files are not the shipped ones."""
    with monkeypatch.context() as patch:
        patch.setattr("evalengine.config.compose.Places.manipulate_search_path", lambda *_: None)
        (job,) = compose_jobs([f"task={name}"])
    composed, outlined = job.config, outline(name)
    assert outlined.tasks and (outlined.tasks, outlined.groups) == (composed.tasks, composed.groups)
    assert {child for group in outlined.groups.values() for child in group.tasks} <= {*outlined.tasks, *outlined.groups}


def test_every_file_has_an_outline() -> None:
    """The files that no quick test lets Hydra compose name classes that there are, too."""
    for name in available("task"):
        assert outline(name).tasks
        for settings in outline(name).tasks.values():
            task_class(str(settings.cls), name)


def test_an_outline_has_the_settings_that_a_group_gives_its_tasks(task_alone: Callable[[str], Config]) -> None:
    outlined, composed = outline("open_llm"), task_alone("open_llm")
    changed = replace(outlined.tasks["gsm8k"], num_fewshot=4)
    assert changed != composed.tasks["gsm8k"]
    assert outlined.tasks["winogrande"] != outline("winogrande").tasks["winogrande"]


def test_names_are_those_of_all_that_is_chosen() -> None:
    assert {"mmlu", "mmlu_stem", "mmlu_anatomy"} <= {*names_in("mmlu")} and len(names_in("mmlu")) == 57 + 5
    assert names_in("mmlu/anatomy") == ["mmlu_anatomy"] and names_in("no_such_task") == []
    (job,) = compose_jobs(["task=gsm8k.yml"])  # Hydra takes the name of a file, too
    assert [*job.config.tasks] == names_in("gsm8k.yaml") == ["gsm8k"]


def test_the_list_composes_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Composing made the list slow; the bound of its time is wide, as machines differ."""
    monkeypatch.setattr("evalengine.config.compose.compose_jobs", lambda *_: pytest.fail("composed by Hydra"))
    task_outline._read.cache_clear()
    begun = time.process_time()
    assert main(["tasks"]) == 0
    assert time.process_time() - begun < 10  # it takes a second on this project's slowest machine
    assert "mmlu (57 tasks)" in capsys.readouterr().out


@pytest.mark.parametrize("chosen", ["mmlu,{}", "{},mmlu", "mmlu/anatomy,{}", "open_llm,{}"])
def test_a_file_with_the_name_of_a_group_s_task_is_refused(chosen: str, tmp_path: object) -> None:
    file = f"{tmp_path}/own.yaml"
    with open(file, "w") as stream:
        stream.write("# @package tasks.mmlu_anatomy\ncls: gsm8k:GSM8K\ndataset: {path: rows.jsonl}\nsplit: test\n")
    other = chosen.replace("{}", "").strip(",")
    with pytest.raises(ConfigError) as error:
        compose_jobs([f"task=[{chosen.format(file)}]"])
    (problem,) = error.value.problems
    assert problem == f"task={file}: its name is mmlu_anatomy, as is task={other}'s; rename one of them"


def test_shipped_choices_may_overlap(tmp_path: object) -> None:
    file = f"{tmp_path}/own.yaml"
    with open(file, "w") as stream:
        stream.write("# @package tasks.own\ncls: gsm8k:GSM8K\ndataset: {path: rows.jsonl}\nsplit: test\n")
    (job,) = compose_jobs([f"task=[mmlu_stem,mmlu/anatomy,{file}]"])
    assert len(job.config.tasks) == 19 + 1
