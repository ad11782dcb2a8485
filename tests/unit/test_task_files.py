"""Tasks by the path of a YAML file: what they become, and how mistakes are said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalengine.config.compose import compose_jobs, read_config
from evalengine.config.schema import TaskConfig, to_yaml
from evalengine.errors import ConfigError
from evalengine.tasks import lm_eval_yaml
from evalengine.tasks.registry import class_defaults, load_task

BASE: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
    "test_split": "test",
    "doc_to_text": "${question} {{question}}",
    "doc_to_target": "answer",
}


def written(folder: Path, name: str = "mine.yaml", **changes: Any) -> Path:
    """Writes the file of a task, BASE with `changes` (None takes a key out), beside one row."""
    (folder / "rows.jsonl").write_text(json.dumps({"question": "Why?", "answer": "So."}) + "\n")
    content = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    (folder / name).write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder / name


def only(file: Path, *overrides: str) -> tuple[str, TaskConfig]:
    """The name and the settings of the only task that the file becomes."""
    (job,) = compose_jobs([f"task={file}", *overrides])
    ((name, config),) = job.config.tasks.items()
    return name, config


def test_a_file_becomes_a_task_whose_settings_can_be_overridden(tmp_path: Path) -> None:
    file = written(tmp_path, generation_kwargs={"until": "\n", "do_sample": False, "temperature": 0.7})
    name, config = only(file, "task.generation.max_gen_toks=7", "tasks.mine.num_fewshot=0")
    assert (name, config.split, config.generation.until, config.generation.max_gen_toks) == ("mine", "test", ["\n"], 7)
    assert config.generation.temperature is None, "lm-eval generates greedily with do_sample=false"
    task = load_task(name, config)
    task.load()
    ((request,),) = task.instances()
    assert request.context == "${question} Why?", "a template's ${} is no reference to a setting"


def test_the_resolved_settings_are_read_back(tmp_path: Path) -> None:
    (job,) = compose_jobs([f"task={written(tmp_path, metadata={'version': '2.5'})}"])
    (tmp_path / "config.yaml").write_text(to_yaml(job.config), encoding="utf-8")
    assert read_config(tmp_path / "config.yaml") == job.config
    assert job.config.tasks["mine"].version == 2.5


def test_a_file_with_our_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "any.yaml"
    file.write_text("# @package tasks.ours\ncls: gsm8k:GSM8K\ndataset: {path: rows.jsonl}\nsplit: test\n")
    name, config = only(file)
    assert (name, config.cls, config.dataset.path) == ("ours", "gsm8k:GSM8K", "rows.jsonl")
    file.write_text("# @package tasks.ours\ndefaults: [gsm8k]\n")
    with pytest.raises(ConfigError, match="must hold a task's settings and no defaults"):
        only(file)


def test_lists_and_sweeps(tmp_path: Path) -> None:
    """A path is in lists and in sweeps as a task's name does."""
    file = written(tmp_path)
    (job,) = compose_jobs([f"task=[{file},arc_easy]"])
    assert [*job.config.tasks] == ["mine", "arc_easy"]
    jobs = compose_jobs([f"task={file},arc_easy,[{file},gsm8k]"], multirun=True)
    assert [[*job.config.tasks] for job in jobs] == [["mine"], ["arc_easy"], ["mine", "gsm8k"]]
    quoted = written(tmp_path, "with a space.yaml")
    with pytest.raises(ConfigError, match="a task's name is part of file names"):
        only(Path(f"'{quoted}'"))  # the file is found, but its stem is no task's name


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "gsm8k.yaml")
    with pytest.raises(ConfigError, match=r"gsm8k.yaml: its name is gsm8k, as is task=gsm8k's; rename one of them"):
        compose_jobs([f"task=[{file},gsm8k]"])


OWN = """
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Instance
from evalengine.tasks.metric import Metric

class Nothing(Task):
    pass

class Part(Task):
    columns = ("question",)
    def question(self, doc): return doc["question"]
    def target(self, doc): return "So."
    def requests(self, doc_id, doc, prompts): return [Instance(self.name, doc_id, 0, "loglikelihood", *prompts, " So.")]
    def filtered(self, doc, responses): return {"none": [response.is_greedy for response in responses]}
    def score(self, doc, answers): return {"acc": float(answers[0])}

class Whole(Part):
    output_type = "loglikelihood"
    metrics = {"acc": Metric()}
"""


@pytest.mark.parametrize(
    ("cls", "lacks"),
    [
        ("Nothing", "cls=own_tasks:Nothing: the class does not write filtered, question, requests, score, target"),
        ("Part", "cls=own_tasks:Part: the class does not set output_type, metrics"),
        ("Whole", None),
    ],
)
def test_what_a_class_of_ones_own_leaves_out_is_named(
    cls: str, lacks: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_tasks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    name, config = only(written(tmp_path, cls=f"own_tasks:{cls}", doc_to_text=None, doc_to_target=None))
    if lacks is not None:
        with pytest.raises(ConfigError) as error:
            load_task(name, config)
        assert [problem.removeprefix("tasks.mine.") for problem in error.value.problems] == [lacks]
        return
    task = load_task(name, config)
    task.load()
    assert [len(requests) for requests in task.instances()] == [1]


OTHERS = {"multiple_choice:ARC": 2, "arithmetic:Arithmetic": 1, "wikitext:WikiText": 1}  # class -> requests


@pytest.mark.parametrize("cls", OTHERS)
def test_a_file_may_name_any_task_class(cls: str, tmp_path: Path) -> None:
    """A class that writes its own prompts needs no template; one that the file holds all the same is refused by name.
    The file's splits say, as in lm-eval, whether one exemplar more is drawn."""
    without = {"doc_to_text": None, "doc_to_target": None, "cls": cls}
    shots = 0 if cls.startswith("wikitext") else 1
    name, config = only(written(tmp_path, fewshot_split="test", num_fewshot=shots, **without))
    row = {"answer": "1", "answerKey": "A", "choices": {"text": ["1", "2"], "label": ["A", "B"]}}
    lines = [json.dumps({**row, "page": f" = {n} = \n", "question": f"{n}?"}) for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    task = load_task(name, config)
    task.load()
    assert [len(requests) for requests in task.instances()] == [OTHERS[cls]] * 3 and task.draws_spare
    data = {"dataset_path": str(tmp_path / "rows.jsonl"), "dataset_kwargs": None}
    name, config = only(written(tmp_path, fewshot_split="train", **data, **{**without, "doc_to_target": "answer"}))
    with pytest.raises(ConfigError) as error:
        load_task(name, config)
    (problem,) = error.value.problems
    assert problem == (
        f"tasks.mine.template.doc_to_target: is for a subclass of Templated; cls={cls} writes its own prompts"
    )
    assert not load_task(name, replace(config, template=replace(config.template, doc_to_target=None))).draws_spare


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_split": None}, "test_split, validation_split: neither is set"),
        ({"dataset_path": None}, "dataset_path: is not set"),
        ({"dataset_kwargs": None}, "json needs dataset_kwargs.data_files"),
        ({"test_split": "dev"}, "data_files: has no dev; it has test"),
        ({"dataset_kwargs": {"data_files": {"test": "https://a.b/c.jsonl"}}}, "is not one local file"),
        ({"dataset_kwargs": {"data_files": {"test": ["a", "b"]}}}, "is not one local file"),
        ({"dataset_kwargs": 5}, "dataset_kwargs: must hold settings"),
        ({"include": "nowhere.yaml"}, "nowhere.yaml: [Errno 2]"),
        ({"include": "mine.yaml"}, "go round in a circle"),
        ({"output_type": "guess"}, "output_type: guess (there are"),
        ({"metadata": {"version": "new"}}, "metadata.version: new is no number"),
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs.num_beams"),
        ({"fewshot_config": {"process_docs": "f"}}, "fewshot_config.process_docs. Take these out, let lm-eval run it"),
        ({"filter_list": [{"name": "a", "filter": [{"function": "take_first"}, {"function": "regex"}]}]}, "come last"),
        ({"filter_list": [{"name": "a", "filter": [{"function": "take_first_k"}]}]}, "needs k"),
        ({"filter_list": "regex"}, "must be a list of {name, filter}"),
        ({"metric_list": [{"metric": "exact_match", "aggregation": "median"}]}, "aggregation median is not built"),
        ({"metric_list": []}, "must be a list of {metric"),
        ({"unsafe_code": True, "doc_to_image": "x"}, "doc_to_image; unsafe_code"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, **changes)
    monkeypatch.setattr(lm_eval_yaml, "find_spec", lambda name: None)  # else lm-eval runs what it has
    with pytest.raises(ConfigError) as error:
        only(file)
    (problem,) = error.value.problems
    assert problem.startswith(f"task={file}: ") and message in problem and "\n" not in problem


def test_a_missing_file_is_named_with_one_that_is_nearly_called_so(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ConfigError, match=r"no such file; did you mean mine.yaml\?"):
        only(tmp_path / "mime.yaml")
    with pytest.raises(ConfigError, match="no such task"):
        compose_jobs(["task=mime.yaml"])


def test_a_class_without_defaults_is_no_entry_point() -> None:
    with pytest.raises(ConfigError, match="has no `defaults`, a TaskConfig"):
        class_defaults("gsm8k:GSM8K", "entry")
    with pytest.raises(ConfigError, match="nor of a package that can be imported"):
        class_defaults("no_such_package.tasks:Mine", "entry")
    with pytest.raises(ConfigError, match="is not a Task"):
        class_defaults("json:dumps", "entry")
