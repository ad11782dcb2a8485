"""HellaSwag and ARC: rows to requests, and scores, by hand and on the real rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.compose import compose_jobs
from evalengine.config.shipped import outline
from evalengine.errors import ConfigError
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Response
from evalengine.tasks.multiple_choice import clean_wikihow
from evalengine.tasks.registry import load_task

SWAG: dict[str, Any] = {
    "ind": 4,
    "activity_label": "Cooking",
    "ctx_a": "[header] How to boil [title] Fill a pot.",
    "ctx_b": "the Cook",
    "endings": ["sings  .", "aa", "boils [substeps] water.", " stirs "],
    "source_id": "wikihow~4",
    "label": "2",
}
ARC_ROW: dict[str, Any] = {
    "id": "x",
    "question": "Why?",
    "choices": {"text": ["Because.", "No.", "Yes, since it is."], "label": ["1", "2", "3"]},
    "answerKey": "2",
}


def shipped(name: str, folder: Path, *overrides: str, **arguments: Any) -> Task:
    config = compose_jobs([f"task={name}", *overrides])[0].config if overrides else outline(name)
    task = load_task(name, config.tasks[name], data_dir=str(folder), **arguments)
    task.load()
    return task


def write(folder: Path, name: str, split: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def responses(*loglikelihoods: float) -> list[Response]:
    return [Response(loglikelihood=value) for value in loglikelihoods]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("  a b ", "a b"),
        ("Fill. [title] Stir.", "Fill.. Stir."),  # ".  Stir" before the double space is halved
        ("[header] How", " How"),
        ("a [x] b", "a b"),
        ("a    b", "a  b"),  # spaces are halved once only
        ("[a] [b]", " "),
        ("", ""),
    ],
)
def test_wikihow_markup(text: str, clean: str) -> None:
    """Marks in brackets are taken out, and a title's mark becomes a full stop."""
    assert clean_wikihow(text) == clean


def test_hellaswag_by_hand(tmp_path: Path) -> None:
    write(tmp_path, "hellaswag", "validation", [SWAG])
    task = shipped("hellaswag", tmp_path)
    (requests,) = task.instances()
    assert {r.context for r in requests} == {"Cooking: How to boil. Fill a pot. The cook"}
    assert [r.continuation for r in requests] == [" sings .", " aa", " boils water.", " stirs"]
    assert [(r.index, r.kind) for r in requests] == [(i, "loglikelihood") for i in range(4)]
    assert task.target(task.docs[0]) == 2
    assert list(task.docs[0]) == [*SWAG, "query", "choices", "gold"]
    assert task.filtered(task.docs[0], responses(-1, -2, -3, -4)) == {
        "none": [(-1, False), (-2, False), (-3, False), (-4, False)]
    }


def test_arc_by_hand(tmp_path: Path) -> None:
    write(tmp_path, "arc_easy", "test", [ARC_ROW])
    task = shipped("arc_easy", tmp_path)
    (requests,) = task.instances()
    assert [(r.context, r.continuation) for r in requests] == [
        ("Question: Why?\nAnswer:", " Because."),
        ("Question: Why?\nAnswer:", " No."),
        ("Question: Why?\nAnswer:", " Yes, since it is."),
    ]
    assert task.target(task.docs[0]) == 1


@pytest.mark.parametrize(
    ("loglikelihoods", "acc", "acc_norm"),
    [
        ((-9.0, -2.0, -8.0), 1.0, 0.0),  # per character, they are -1.125, -0.667, -0.471
        ((-8.0, -0.5, -17.0), 1.0, 1.0),
        ((-1.0, -0.3, -30.0), 1.0, 1.0),
        ((-2.0, -2.0, -2.0), 0.0, 0.0),  # ties go to the lowest index
        ((-3.0, -2.0, -2.0), 1.0, 0.0),
        ((float("-inf"), -2.0, float("-inf")), 1.0, 1.0),
    ],
)
def test_accuracies(loglikelihoods: tuple[float, ...], acc: float, acc_norm: float, tmp_path: Path) -> None:
    """acc chooses the greatest loglikelihood, acc_norm the greatest per character."""
    write(tmp_path, "arc_easy", "test", [ARC_ROW])  # the second choice is right; the choices have 8, 3, 17 characters
    task = shipped("arc_easy", tmp_path)
    assert task.process_results(task.docs[0], responses(*loglikelihoods)) == {
        ("acc", "none"): acc,
        ("acc_norm", "none"): acc_norm,
    }


def test_an_empty_choice_is_never_preferred_by_length(tmp_path: Path) -> None:
    write(tmp_path, "hellaswag", "validation", [{**SWAG, "endings": ["[x]", "bb", "c", "d"]}])
    task = shipped("hellaswag", tmp_path)
    assert task.process_results(task.docs[0], responses(-0.1, -9, -3, -9))["acc_norm", "none"] == 1.0


def test_chat_mode_drops_the_delimiter(tmp_path: Path) -> None:
    write(tmp_path, "arc_easy", "test", [ARC_ROW] * 2)
    write(tmp_path, "arc_easy", "train", [{**ARC_ROW, "question": "Train?"}])
    task = shipped("arc_easy", tmp_path, "task.num_fewshot=1", chat=json.dumps)
    request = task.instances()[1][0]
    assert request.continuation == "Because."
    assert [m["content"] for m in json.loads(request.context)] == [
        "Question: Train?\nAnswer:",
        "No.",
        "Question: Why?\nAnswer:",
    ]


def arc(choices: dict[str, Any]) -> dict[str, Any]:
    """An ARC row in which `choices` replace members."""
    return {**ARC_ROW, "choices": {**ARC_ROW["choices"], **choices}}


@pytest.mark.parametrize(
    ("name", "split", "row", "problem"),
    [
        ("hellaswag", "validation", {**SWAG, "label": ""}, 'its label "" is no whole number'),  # as in the test split
        ("hellaswag", "validation", {**SWAG, "label": 1.5}, "its label 1.5 is no whole number"),
        ("hellaswag", "validation", {**SWAG, "label": "4"}, "gold answer 4 is not one of 4 choices"),
        ("hellaswag", "validation", {**SWAG, "endings": 5}, "has a 'endings' that is a number, not a list"),
        ("hellaswag", "validation", {**SWAG, "endings": ["a", None]}, "ending 1 is null, which is no text"),
        ("hellaswag", "validation", {**SWAG, "ctx_b": 5}, "has a 'ctx_b' that is a number, not text"),
        ("arc_easy", "test", {**ARC_ROW, "question": ["Why?"]}, "has a 'question' that is a list, not text or"),
        ("arc_easy", "test", {**ARC_ROW, "question": True}, "has a 'question' that is true or false, not text"),
        ("arc_easy", "test", {**ARC_ROW, "answerKey": "E"}, "doc_to_target: 'E' is not in list"),
        ("arc_easy", "test", {**ARC_ROW, "choices": ["a"]}, "has a 'choices' that is a list, not a mapping"),
        ("arc_easy", "test", arc({"text": ["a", None, "c"]}), "choice 1 is null, which is no text"),
        ("arc_easy", "test", arc({"text": ["a", 2, "c"]}), "choice 1 is 2, which is no text"),
        ("arc_easy", "test", arc({"text": "abc"}), "doc_to_choice: writes 'abc', which is no list"),
        ("arc_easy", "test", arc({"text": []}), r"doc_to_choice: gives '\[\]', not a list of answers"),
        ("arc_easy", "test", arc({"label": None}), "doc_to_target: 'None' has no attribute 'index'"),
        ("arc_easy", "test", {**ARC_ROW, "choices": {}}, "doc_to_target: 'dict object' has no attribute 'label'"),
    ],
)
def test_rows_that_cannot_be_scored(name: str, split: str, row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """The file, the row and what is wrong with it are named."""
    write(tmp_path, name, split, [row])
    with pytest.raises(ConfigError, match=rf"{split}\.jsonl:1: row 0 .*{problem}"):
        shipped(name, tmp_path)


def test_hellaswag_draws_a_spare_exemplar_and_arc_does_not(tmp_path: Path) -> None:
    write(tmp_path, "hellaswag", "validation", [SWAG])
    write(tmp_path, "hellaswag", "train", [SWAG] + [{**SWAG, "ctx_b": f"Nr {i}"} for i in range(3)])
    (requests,) = shipped("hellaswag", tmp_path, "task.num_fewshot=3").instances()
    assert requests[0].context.count("The cook") == 1  # all 4 rows are drawn, and the evaluated one is dropped
    write(tmp_path, "arc_easy", "test", [ARC_ROW])
    write(tmp_path, "arc_easy", "train", [ARC_ROW] * 2)
    (requests,) = shipped("arc_easy", tmp_path, "task.num_fewshot=2").instances()
    assert requests[0].context.count("Why?") == 3


@pytest.mark.parametrize(("name", "count"), [("hellaswag", 10042), ("arc_easy", 2376), ("arc_challenge", 1172)])
def test_real_rows(name: str, count: int, data_dir: Path) -> None:
    """Every real row becomes requests, and the right answers stand at every place."""
    task = shipped(name, data_dir)
    documents = task.instances()
    assert len(documents) == count
    assert all(2 < len(requests) < 6 for requests in documents)
    assert all(r.continuation.startswith(" ") and len(r.continuation) > 1 for requests in documents for r in requests)
    golds = [task.target(doc) for doc in task.docs]
    assert all(sum(gold == i for gold in golds) > count / 6 for i in range(4))
