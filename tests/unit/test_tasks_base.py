"""What every task does: configuration, prompts, limits, fingerprints, the registry."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from evalengine.config.schema import DatasetConfig, GenerationConfig, TaskConfig
from evalengine.config.shipped import available
from evalengine.errors import ConfigError
from evalengine.tasks.base import Task
from evalengine.tasks.instance import Generation, Response
from evalengine.tasks.registry import load_task
from tests.unit.test_rehearsal import Sums

TEST = [{"question": f"q{i}?", "answer": f"r{i}\n#### {i}"} for i in range(5)]
TRAIN = [{"question": f"t{i}?", "answer": f"s{i}\n#### {i}"} for i in range(9)]


@pytest.fixture
def config(tmp_path: Path) -> TaskConfig:
    """gsm8k with five rows to evaluate and nine to draw exemplars from."""
    for split, rows in {"test": TEST, "train": TRAIN}.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetConfig(path=str(tmp_path))
    return TaskConfig(cls="gsm8k:GSM8K", dataset=dataset, split="test", fewshot_split="train", num_fewshot=2)


def loaded(config: TaskConfig, **arguments: Any) -> Task:
    task = load_task("mine", config, **arguments)
    task.load()
    return task


def test_prompts(config: TaskConfig) -> None:
    """A prompt is the description, the exemplars, and the document's question without its answer."""
    config = dataclasses.replace(config, description="Solve.\n\n", num_fewshot=1)
    (instance,) = loaded(config).instances()[3]
    assert instance.context.startswith("Solve.\n\nQuestion: t")
    assert instance.context.endswith("\n\nQuestion: q3?\nAnswer:")
    assert (instance.task, instance.doc_id, instance.index, instance.kind) == ("mine", 3, 0, "generate_until")


def test_chat_prompts(config: TaskConfig) -> None:
    """The exemplars are turns of the chat, or all of the plain prompt is one turn of the user."""

    def chat(messages: list[dict[str, str]]) -> str:
        return json.dumps(messages)

    task = loaded(config, chat=chat, system_instruction="Be brief.")
    messages = json.loads(task.instances(1)[0][0].context)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert messages[-1]["content"] == "Question: q0?\nAnswer:"
    flat = loaded(config, chat=chat, system_instruction="Be brief.", fewshot_as_multiturn=False)
    system, user = json.loads(flat.instances(1)[0][0].context)
    assert system == messages[0]
    plain = loaded(config).instances(1)[0][0].context
    assert user == {"role": "user", "content": plain}


def test_limit_keeps_the_prompts_and_a_second_call_repeats_them(config: TaskConfig) -> None:
    task = loaded(config)
    everything = task.instances()
    assert len(everything) == len(TEST)
    assert task.instances(3) == everything[:3]
    assert task.instances(99) == everything
    assert loaded(config, fewshot_seed=1).instances() != everything
    with pytest.raises(ConfigError, match=r"tasks\.mine: num_fewshot=10 needs 10 exemplars, but there are 9"):
        loaded(dataclasses.replace(config, num_fewshot=10)).instances()
    with pytest.raises(ConfigError, match="limit=0 must be at least 1"):
        task.instances(0)


def test_exemplars_from_the_evaluated_split_leave_the_document_out(config: TaskConfig) -> None:
    task = loaded(dataclasses.replace(config, fewshot_split="test", num_fewshot=4))
    for i, (instance,) in enumerate(task.instances()):
        assert instance.context.count(f"q{i}?") == 1
        assert instance.context.count("Question:") == 5


def test_exemplars_from_a_file_come_in_file_order(config: TaskConfig, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "[{question: a, answer: b}, {question: c, answer: d}, {question: e, answer: f}]"
    )
    task = loaded(dataclasses.replace(config, fewshot_file=str(tmp_path / "mine.yaml")))
    start = "Question: a\nAnswer: b\n\nQuestion: c\nAnswer: d\n\nQuestion: "
    assert all(instance.context.startswith(start + "q") for (instance,) in task.instances())


def test_exemplars_are_not_read_when_none_are_used(config: TaskConfig, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("broken")
    with pytest.raises(ConfigError, match=r"tasks\.mine: .*train\.jsonl:1: not JSON"):
        loaded(config)
    assert loaded(dataclasses.replace(config, num_fewshot=0)).instances(1)[0][0].context == "Question: q0?\nAnswer:"


def test_generation_settings(config: TaskConfig) -> None:
    """Settings reach the requests; each repeat is a request of its own, and a score is the mean over them."""
    assert loaded(config).instances(1)[0][0].generation == Generation(until=("\n\n",))
    settings = GenerationConfig(max_gen_toks=7, until=["x"], temperature=0.5, top_k=3, top_p=0.9, repeats=3)
    task = loaded(dataclasses.replace(config, generation=settings))
    instances = task.instances(2)[1]
    assert [(i.index, i.repeat, i.doc_id) for i in instances] == [(0, 0, 1), (0, 1, 1), (0, 2, 1)]
    assert instances[0].generation == Generation(("x",), 7, 0.5, 3, 0.9)
    responses = [Response("#### 1"), Response("#### 2"), Response("1")]
    assert task.filtered(task.docs[1], responses)["strict-match"] == ["1", "2", "[invalid]"]
    values = task.process_results(task.docs[1], responses)
    assert {key: value for key, value in values.items() if key[0] == "exact_match"} == {
        ("exact_match", "strict-match"): pytest.approx(1 / 3),
        ("exact_match", "flexible-extract"): pytest.approx(2 / 3),
    }


def test_fingerprint_sees_every_change(config: TaskConfig, tmp_path: Path) -> None:
    before = loaded(config).fingerprint()
    assert (before["rows"], before["fewshot_rows"], before["revision"]) == (5, 9, None)
    assert loaded(config).fingerprint() == before
    assert loaded(config).fingerprint(3)["sha256"] != before["sha256"]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*TEST[1:], TEST[0]]))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRAIN[::-1]))
    after = loaded(config).fingerprint()
    assert after["sha256"] != before["sha256"]
    assert after["fewshot_sha256"] != before["fewshot_sha256"]
    assert loaded(dataclasses.replace(config, num_fewshot=0)).fingerprint()["fewshot_sha256"] is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"split": None}, "tasks.mine.split: is not set"),
        ({"fewshot_split": None}, "num_fewshot=2: no exemplars are given; set tasks.mine.fewshot_split=test"),
        ({"generation": GenerationConfig(repeats=2)}, "generation.repeats=2: at temperature 0"),
        ({"cls": "wikitext:WikiText"}, "num_fewshot=2: this task has no few-shot form"),
        (
            {"cls": "wikitext:WikiText", "num_fewshot": 0, "generation": GenerationConfig(top_k=1)},
            "generation: is for tasks",
        ),
        ({"cls": "nowhere:GSM8K"}, "cls=nowhere:GSM8K is not a module:Class"),
        ({"cls": "gsm8k:Nothing"}, "cls=gsm8k:Nothing is not a module:Class"),
        ({"cls": "gsm8k"}, "cls=gsm8k is not a module:Class"),
        ({"cls": "base:Doc"}, "cls=base:Doc is not a Task"),
    ],
)
def test_settings_that_cannot_be_honoured(changes: dict[str, Any], problem: str, config: TaskConfig) -> None:
    """Each is refused with one problem."""
    with pytest.raises(ConfigError) as error:
        load_task("mine", dataclasses.replace(config, **changes))
    assert problem in str(error.value)
    assert len(error.value.problems) == 1


def test_all_problems_are_listed_at_once(config: TaskConfig) -> None:
    broken = dataclasses.replace(config, split=None, fewshot_split=None, generation=GenerationConfig(repeats=2))
    with pytest.raises(ConfigError) as error:
        load_task("mine", broken)
    assert len(error.value.problems) == 3


def test_unknown_task_lists_the_known_ones() -> None:
    known = available("task")
    assert {"gsm8k", "gsm8k_cot", "hellaswag", "arc_easy", "arc_challenge", "wikitext", "arithmetic"} <= set(known)
    with pytest.raises(ConfigError, match=f"task=gsm9k: there is no such task; available are {', '.join(known)}"):
        load_task("gsm9k", TaskConfig())


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "q"}, "row 5 has no 'answer' \\(it is absent or null\\); it has 'question'"),
        ({"question": None, "answer": "a"}, "row 5 has no 'question'"),
        ({}, "row 5 has no 'question', 'answer' \\(it is absent or null\\); it has nothing"),
    ],
)
def test_rows_without_a_column(row: dict[str, Any], problem: str, config: TaskConfig, tmp_path: Path) -> None:
    """The row, the missing columns and those that it has are named."""
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=problem):
        loaded(config)


@pytest.mark.parametrize(
    ("cls", "split", "fewshot_split", "spare"),
    [
        ("gsm8k:GSM8K", "test", "train", False),
        ("gsm8k:GSM8K", "validation", "train", False),  # lm-eval would call validation the test split
        ("gsm8k:GSM8K", "test", "test", True),
        ("multiple_choice:HellaSwag", "validation", "train", True),
        ("multiple_choice:ARC", "validation", "train", False),
        ("winogrande:WinoGrande", "validation", "train", True),
    ],
)
def test_one_exemplar_more_is_drawn_where_lm_eval_does(cls: str, split: str, fewshot_split: str, spare: bool) -> None:
    task = load_task("mine", TaskConfig(cls=cls, split=split, fewshot_split=fewshot_split, num_fewshot=1))
    assert task.draws_spare == spare
    config = dataclasses.replace(task.config, fewshot_file="exemplars.jsonl")
    assert not load_task("mine", config).draws_spare


@pytest.mark.parametrize(("split", "spare"), [("test", False), ("validation", True), ("dev", True)])
def test_a_new_task_without_a_test_split_draws_one_more_by_itself(split: str, spare: bool) -> None:
    class Mine(Sums):
        spare_exemplar = None

    assert Mine("mine", TaskConfig(split=split, fewshot_split="train", num_fewshot=1)).draws_spare == spare


def test_several_contexts_of_one_text(tmp_path: Path) -> None:
    """WinoGrande's two requests differ in the context and score one continuation."""
    row = {"sentence": "Ann gave Bob a coat as _ was cold.", "option1": "Ann", "option2": "Bob", "answer": "2"}
    (tmp_path / "validation.jsonl").write_text(json.dumps(row))
    config = TaskConfig(cls="winogrande:WinoGrande", dataset=DatasetConfig(path=str(tmp_path)), split="validation")
    task = loaded(config)
    ((first, second),) = task.instances()
    assert (first.context, first.continuation) == ("Ann gave Bob a coat as Ann", " was cold.")
    assert (second.context, second.continuation, second.index) == ("Ann gave Bob a coat as Bob", " was cold.", 1)
    assert task.target(task.docs[0]) == "was cold."
    for best in (0, 1):
        responses = [Response(loglikelihood=-1.0 if i == best else -2.0) for i in range(2)]
        assert task.process_results(task.docs[0], responses) == {("acc", "none"): float(best == 1)}
    for broken in ({"answer": "3"}, {"answer": ""}, {"sentence": "no blank"}, {"option1": 5}):
        (tmp_path / "validation.jsonl").write_text(json.dumps({**row, **broken}))
        with pytest.raises(ConfigError, match=r"validation\.jsonl:1: row 0"):
            loaded(config)
