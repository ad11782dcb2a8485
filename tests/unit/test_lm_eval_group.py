"""A group's YAML file in lm-eval's form: its members, what they are together, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.errors import ConfigError
from tests.e2e.command import finished

TASK = """task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: NAME.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: q
doc_to_choice: options
doc_to_target: gold
"""
ROWS = {"one": 2, "two": 3}  # task -> documents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, count in ROWS.items():
        rows = [json.dumps({"q": f"{n} is", "options": ["odd", "even"], "gold": n % 2}) + "\n" for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        (tmp_path / f"file_of_{name}.yaml").write_text(TASK.replace("NAME", name))
    return tmp_path


def composed(folder: Path, content: str) -> Config:
    (folder / "all.yaml").write_text(content)
    return compose_jobs([f"task={folder}/all.yaml"])[0].config


def test_members_are_tasks_of_files_in_the_folder(folder: Path) -> None:
    config = composed(folder, "group: both\ngroup_alias: Both\ntask: [one, {group: inner, task: [two]}]\n"
                              "aggregate_metric_list: [{metric: acc, weight_by_size: false}]\n"
                              "metadata: {version: 2}\n")  # fmt: skip
    assert [*config.tasks] == ["one", "two"] and [*config.groups] == ["both", "inner"]
    both = config.groups["both"]
    assert (both.tasks, both.alias, both.version) == (["one", "inner"], "Both", 2)
    assert both.aggregate_metric_list == [{"metric": "acc", "weight_by_size": False}]


def test_a_group_has_the_mean_of_its_tasks(folder: Path) -> None:
    (folder / "all.yaml").write_text("group: both\ntask: [one, two]\naggregate_metric_list: [{metric: acc}]\n")
    run = finished(folder / "runs", "progress=false", f"task={folder}/all.yaml")
    values = [run.results[name]["acc,none"] for name in ROWS]
    mean = sum(value * count for value, count in zip(values, ROWS.values(), strict=True)) / sum(ROWS.values())
    assert run.results["both"]["acc,none"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("group: both\ntask: [{task: one, num_fewshot: 5}]\n", "changes a task's settings within the group"),
        ("group: both\ntask: one\n", "task: must list the group's tasks"),
        ("group: both\ntask: [one]\nnum_fewshot: 2\n", "num_fewshot (no such key of a group"),
        ("group: both\ntask: [one, {group: both, task: [two]}]\n", "group both: is in the file twice"),
        ("group: both\ntask: [{group: inner, task: []}]\n", "group inner: task: must list"),
        ("group: [a]\ntask: [one]\n", "group: must be the group's name"),
    ],
)
def test_what_is_not_built_is_rejected(folder: Path, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        composed(folder, content)


def test_two_tasks_of_one_name_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"tasks": {"one": {"cls": "other"}}, "groups": {"theirs": {"tasks": ["one"]}}}
    monkeypatch.setattr("evalengine.integrations.lm_eval_tasks.group.composed", lambda name: other)
    for members, second in (("one, theirs", "theirs"), ("theirs, one", "one")):
        with pytest.raises(ConfigError, match=f"task: {second}: contains one, which the group already has"):
            composed(folder, f"group: both\ntask: [{members}]\n")


def test_a_name_that_nothing_has_is_rejected(folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
    with pytest.raises(ConfigError, match=r"task: no_such_task_anywhere: lm-eval .* has no task, group or tag"):
        composed(folder, "group: both\ntask: [one, no_such_task_anywhere]\n")
