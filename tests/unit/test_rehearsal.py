"""The end of a run is tried before its first request: a document that cannot be scored or written is named then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.schema import DatasetConfig, TaskConfig, TemplateConfig
from evalengine.errors import ConfigError
from evalengine.harness.plan import rehearse
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Instance
from evalengine.tasks.registry import load_task
from evalengine.tasks.rows import Doc
from evalengine.tasks.templated import Templated

NUMBER = {"name": "number", "filter": [{"function": "regex", "regex_pattern": "[0-9]+"}, {"function": "take_first"}]}


class Sums(Templated):
    columns = ("question", "answer")
    fixed = TemplateConfig(doc_to_text="question", doc_to_target="answer", filter_list=[NUMBER])


class Broken(Sums):
    """A task whose score fails for a row that it accepted when the rows were read."""

    def score(self, doc: Doc, answers: list[str]) -> dict[str, Any]:
        return {"exact_match": 1 / len(doc["question"])}


class Unwritable(Sums):
    """A task with a document that holds half a surrogate pair, which UTF-8 cannot encode."""

    def document(self, row: Doc) -> Doc:
        return {**row, "half": "\ud800"} if row["question"] == "b" else row


class Twice(Sums):
    """A task whose two requests of a document have one number, so that their answers are indistinguishable."""

    def requests(self, doc_id: int, doc: Doc, prompts: list[str]) -> list[Instance]:
        return [*super().requests(doc_id, doc, prompts), *super().requests(doc_id, doc, ["another"])]


class Needy(Sums):
    """A task whose scorer looks for its data only where there is a text to score."""

    def score(self, doc: Doc, answers: list[str]) -> dict[str, Any]:
        if doc["question"] != "a" and "[invalid]" not in answers:
            raise LookupError("\n" + "*" * 70 + "\n  No data.\n" + "*" * 70)
        return super().score(doc, answers)


def loaded(cls: type[Task] | str, folder: Path, *rows: dict[str, Any]) -> Task:
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TaskConfig(cls=cls if isinstance(cls, str) else "x", dataset=DatasetConfig(path=str(folder)), split="test")
    task = load_task("mine", config) if isinstance(cls, str) else cls("mine", config)
    task.load()
    return task


def test_what_a_task_cannot_score_or_write_is_named(tmp_path: Path) -> None:
    rows = [{"question": text, "answer": "1"} for text in ("a", "", "b")]
    for cls, document, why in (
        (Broken, 1, "ZeroDivisionError"), (Unwritable, 2, "UnicodeEncodeError"), (Twice, "0 and 2 more", "ValueError")
    ):  # fmt: skip
        task = loaded(cls, tmp_path, *rows)
        with pytest.raises(ConfigError) as error:
            rehearse(task, task.instances())
        (problem,) = error.value.problems
        assert problem.startswith(f"tasks.mine: document {document} cannot be scored or written ({why}: ")
    task = loaded("gsm8k:GSM8K", tmp_path, *rows)
    rehearse(task, task.instances())


def test_what_a_scorer_needs_for_a_text_is_missed_before_the_run(tmp_path: Path) -> None:
    """A scorer that fails for a text, and not for an empty one, is found; one reason is said once."""
    task = loaded(Needy, tmp_path, *({"question": text, "answer": "1"} for text in "abc"))
    with pytest.raises(ConfigError) as error:
        rehearse(task, task.instances())
    assert error.value.problems == [
        "tasks.mine: document 1 and 1 more cannot be scored or written (LookupError: No data.)"
    ]


def test_empty_pages_are_scored_and_nothing_but_empty_pages_is_refused(tmp_path: Path) -> None:
    task = loaded("wikitext:WikiText", tmp_path, {"page": ""}, {"page": " = A = \n"})
    rehearse(task, task.instances())
    with pytest.raises(ConfigError) as error:
        rehearse(task, task.instances(1))
    assert error.value.problems == [
        "tasks.mine: the 1 evaluated documents are empty, and bits_per_byte, byte_perplexity would divide by their "
        "words or bytes: give documents with text, or raise limit"
    ]
