"""Groups equal lm-eval's own: the shipped groups' members, and a group's metrics and standard errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import DatasetConfig, GroupConfig, leaves
from evalengine.config.shipped import outline
from evalengine.harness.metrics import summarize
from evalengine.records.lm_eval import TaskResult, group_results
from evalengine.tasks.lm_eval_yaml import _read
from evalengine.tasks.registry import load_task
from evalengine.tasks.templates import Field
from tests.parity.agreement import answer_task, check_equal, evaluate_by_lm_eval
from tests.parity.local_tasks import task_manager

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")

SUBJECTS = {"anatomy": 9, "astronomy": 5, "virology": 7}  # subject -> number of questions
TREE = {"mmlu_stem": ["mmlu_anatomy", "mmlu_astronomy"], "mmlu_other": ["mmlu_virology"]}


def row(subject: str, n: int) -> dict[str, Any]:
    return {"question": f" What is {n}? ", "subject": subject, "choices": [f"{n}", "b", "c", "d"], "answer": n % 4}


def files_of(folder: Path, subjects: dict[str, int]) -> dict[str, str]:
    folder.mkdir()
    files = {}
    for split, extra in (("dev", 0), ("test", 1)):
        rows = [row(name, n + extra) for name, count in subjects.items() for n in range(count if extra else 5)]
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return files


METADATA = {"own": {"metadata": {"version": 2}}}


def write_lm_eval_group(folder: Path, weighted: bool) -> None:
    """Writes lm-eval's files for a group `own` of two groups of MMLU's subjects, with made-up rows."""

    for name in (name for children in TREE.values() for name in children):
        short = name.removeprefix("mmlu_")
        subject = {
            **_read(Path(task_manager().task_index[name].yaml_path), ()),
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files_of(folder / short, {short: SUBJECTS[short]})},
        }
        subject.pop("tag", None)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(subject))

    aggregate = [{"metric": "acc", "weight_by_size": weighted}]
    for name, children in {**TREE, "own": [*TREE]}.items():
        group = {"group": name, "task": children, "aggregate_metric_list": aggregate, **METADATA.get(name, {})}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(group))


@pytest.mark.parametrize(("weighted", "shots"), [(True, 0), (True, 5), (False, 2)])
def test_a_group_is_lm_eval_s(weighted: bool, shots: int, tmp_path: Path) -> None:
    """A group's metrics, standard errors, size, members and settings equal lm-eval's, also for a group of groups."""
    from lm_eval.tasks import TaskManager

    write_lm_eval_group(tmp_path, weighted)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    reference = evaluate_by_lm_eval("own", shots, str, task_manager=manager)
    files = files_of(tmp_path / "all", SUBJECTS)
    (job,) = compose_jobs([f"task=[{','.join(f'mmlu/{name}' for name in SUBJECTS)}]", f"task.num_fewshot={shots}"])
    results = []
    for name, config in job.config.tasks.items():
        dataset = DatasetConfig(path="none/none", files=files, where=config.dataset.where)
        task = load_task(name, replace(config, dataset=dataset))
        answered = answer_task(task, str)
        check_equal(reference, name, task, answered)
        metrics = summarize(task, [task.process_results(doc, answers) for doc, _, answers in answered])
        size = len(answered)
        assert config.alias == reference["results"][name]["alias"] != name
        results.append(TaskResult(name, 1.0, shots, metrics, task.higher_is_better(), {}, size, size, ""))
    aggregate = [{"metric": "acc", "weight_by_size": weighted}]
    groups = {name: GroupConfig(children, aggregate_metric_list=aggregate) for name, children in TREE.items()}
    groups["own"] = GroupConfig([*TREE], version=2, aggregate_metric_list=aggregate)
    for group in group_results(groups, results):
        expected = reference["results"][group.name]
        assert {key: pytest.approx(expected[key], rel=1e-12) for key in expected if "," in key} == group.metrics
        assert group.effective == expected["sample_len"]
        assert list(group.children) == reference["group_subtasks"][group.name]
        # lm-eval omits this for a group of groups, because it reads the group's before its members'.
        assert group.higher_is_better == reference["higher_is_better"].get(group.name, {"acc": True})
        assert group.num_fewshot == shots
        assert group.counts == expected["sample_count"] and group.version == reference["versions"][group.name]


def test_mmlu_is_lm_eval_s_57_subjects_in_its_groups() -> None:
    shipped = outline("mmlu")  # Hydra composes the same (unit/test_task_outline.py), in seconds.
    index, groups = task_manager().task_index, shipped.groups
    definitions = {name: _read(Path(entry.yaml_path), ()) for name, entry in index.items() if name in shipped.tasks}
    assert len(shipped.tasks) == len(definitions) == 57 and {*leaves("mmlu", groups)} == {*definitions}
    for name, content in definitions.items():
        config = shipped.tasks[name]
        subject = {"subject": content["dataset_name"]}
        assert (config.dataset.name, config.dataset.where) == (content["dataset_name"], subject)
        assert config.dataset.path == content["dataset_path"]
        assert Field("description", config.description).render(dict(subject)) == content["description"]
        assert name in groups[content["tag"].removesuffix("_tasks")].tasks
        assert config.alias == content["task_alias"]
        for key in ("doc_to_text", "doc_to_choice", "doc_to_target"):
            assert getattr(config.template, key) == content[key]


@pytest.mark.parametrize("name", ["bbh_cot_fewshot", "mmlu_pro", "leaderboard_musr", "minerva_math"])
def test_a_shipped_group_has_lm_eval_s_tasks(name: str) -> None:
    shipped = outline(name)
    definition = _read(Path(task_manager().task_index[name].yaml_path), ())
    group = shipped.groups[name]
    assert {*group.tasks} == {*definition["task"]} == {*shipped.tasks}
    entries = [{**entry, "aggregation": "mean"} for entry in group.aggregate_metric_list]
    assert entries == [{"aggregation": "mean", **entry} for entry in definition["aggregate_metric_list"]]
    assert str(group.version) == str((definition.get("metadata") or {}).get("version"))
    for task, config in shipped.tasks.items():
        assert config.alias == _read(Path(task_manager().task_index[task].yaml_path), ()).get("task_alias"), task


def test_mgsm_s_groups_are_lm_eval_s_tags() -> None:
    """Our MGSM groups have the tasks that lm-eval's tags have."""

    def tagged(tag: str) -> set[str]:
        """Returns the tag's tasks in lm-eval's folder mgsm/, as Spanish Bench puts a task of its own under a tag."""
        entries = task_manager().task_index.items()
        return {n for n, e in entries if e.yaml_path and "mgsm" in Path(e.yaml_path).parts and tag in e.tags}

    assert {*outline("mgsm_direct").tasks} == tagged("mgsm_direct")
    assert {*outline("mgsm_native_cot").tasks, *outline("mgsm_en_cot").tasks} == tagged("mgsm_cot_native")
