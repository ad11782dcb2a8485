"""A judge's scale, its prompts, and its verdicts as they are read from likelihoods and from texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evalengine.api.evaluate import flat
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import DatasetConfig, GenerationConfig, JudgeConfig, TaskConfig
from evalengine.errors import ConfigError
from evalengine.harness.judging import sample_rows
from evalengine.tasks.instance import Response
from evalengine.tasks.judge import JudgeTask, Verdict, judge_problems, read_scale

ROW = {"doc": {"q": "2 + 2?", "response": "a column"}, "target": "4", "responses": ["five"], "reference": "four"}
WHOLE = {"model": "m", "template": "{{response}}", "scale": "yes_no"}


def made(tmp_path: Path, row: dict[str, Any] = ROW, **judge: Any) -> JudgeTask:
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    dataset = DatasetConfig(files={"judged": "t.jsonl"})
    generation = GenerationConfig(until=[]) if "extract" in judge else GenerationConfig()
    own = JudgeConfig(**{"template": "{{response}}", "scale": "yes_no", **judge})
    config = TaskConfig(cls="judge:JudgeTask", dataset=dataset, split="judged", generation=generation, judge=own)
    task = JudgeTask("t", config, data_dir=str(tmp_path))
    task.load()
    return task


def verdicts(task: JudgeTask, *answers: float | str) -> list[Verdict]:
    responses = [Response(text=a) if isinstance(a, str) else Response(loglikelihood=a) for a in answers]
    found: list[Verdict] = task.filtered(task.docs[0], responses)["judge"]
    return found


def test_scales_as_they_are_written() -> None:
    assert read_scale("yes_no").values == {"no": 0.0, "yes": 1.0}
    assert read_scale([1, 2, 10]).values == {"1": 1.0, "2": 2.0, "10": 10.0}
    assert read_scale(["bad", "fair", "good"]).values == {"bad": 0.0, "fair": 0.5, "good": 1.0}
    graded = read_scale({"good": 1, "bad": -1, "fair": 0.5})
    assert graded.categories == ["bad", "fair", "good"] and graded.ordered and not graded.pairs
    pairs = read_scale({"A": "first", "B": "second"})
    assert pairs.pairs and pairs.categories == ["B", "tie", "A"] and not pairs.ordered
    assert read_scale("pairs").categories == ["B", "tie", "A"] and not read_scale("yes_no").ordered


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ("stars", "'stars' is no list"),
        ([1], "has 1 label"),
        ([], "has 0 label"),
        (["a", "A", "b"], "A, a: stands there more than once"),
        ([True, False], "needs quotes"),
        (["a ", "b"], "white space"),
        ({"a": 1, "b": "first"}, "must all be numbers, or all of"),
        ({"a": 1, "b": float("nan")}, "must all be numbers"),
        ({"a": "first", "b": "tie"}, "one for second"),
        ({"a": {"b": 1}, "c": 2}, "must all be numbers"),
        ([1, float("inf")], "inf is no label"),
        ([[], {}], "[] is no label"),
    ],
)
def test_a_scale_that_is_none_is_refused(scale: Any, said: str) -> None:
    with pytest.raises(ValueError, match="scale: ") as refused:
        read_scale(scale)
    assert said in str(refused.value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["first", "tie"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4),
    max_leaves=8,
)


@example(["\n", "\n"])
@example(["\n", None])
@given(PLAIN)
@settings(max_examples=300, deadline=None)
def test_any_scale_is_read_or_refused_in_words(written: Any) -> None:
    try:
        scale = read_scale(written)
    except ValueError as error:
        assert all(line.startswith("scale: ") for line in str(error).split("\n"))
        return
    assert len(scale.values) > 1 and all(map(math.isfinite, scale.values.values()))
    assert {*scale.values} <= {*scale.categories}


def test_a_mapping_on_the_command_line_is_the_scale_as_a_whole() -> None:
    words = ["judge.model=self", "judge.scale={bad: 0, good: 1}", "judge.template='{{response}}\\n'"]
    (job,) = compose_jobs(words)
    judge = job.config.tasks["arithmetic"].judge
    assert judge.scale == {"bad": 0, "good": 1} and judge.template == "{{response}}\n"
    assert flat({"judge": {"scale": {"1": -1, "2": 2}}}, []) == {"task.judge.scale": {"1": -1, "2": 2}}


def test_everything_that_is_wrong_is_said_at_once() -> None:
    problems = judge_problems(
        JudgeConfig(template="{% if %}", scale=[1], extract="(", against="other", labelled="x",
                    generation=GenerationConfig(repeats=2))
    )  # fmt: skip
    settings = [problem.split(":")[0].split("=")[0] for problem in problems]
    assert settings == ["model", "scale", "template", "extract", "generation.repeats", "labelled"]
    assert [p.split(":")[0] for p in judge_problems(JudgeConfig())] == ["model", "template", "scale"]
    assert judge_problems(JudgeConfig(**WHOLE)) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"scale": "pairs"}, "against: names the other answer of a pair (a column, or a run's folder); it is not set"),
        ({"against": "gold"}, "against: names the other answer of a pair (a column, or a run's folder); this scale"),
        ({"generation": GenerationConfig(max_gen_toks=5)}, "generation: nothing is written"),
    ],
)
def test_settings_that_contradict_each_other(more: dict[str, Any], said: str) -> None:
    (problem,) = judge_problems(JudgeConfig(**{**WHOLE, **more}))
    assert problem.startswith(said)


def test_the_likeliest_label_is_the_verdict_and_of_equals_the_first(tmp_path: Path) -> None:
    task = made(tmp_path, scale=[1, 2, 3])
    assert [i.continuation for i in task.instances()[0]] == [" 1", " 2", " 3"]
    assert verdicts(task, -3.0, -1.0, -2.0) == [Verdict("2", 2.0)]
    assert verdicts(task, -1.0, -1.0, -2.0) == [Verdict("1", 1.0)]
    assert task.score(task.docs[0], verdicts(task, -3.0, -1.0, -2.0)) == {"score": 2.0}


def test_a_written_verdict_is_read_at_its_last_match(tmp_path: Path) -> None:
    task = made(tmp_path, scale=["bad", "good"], extract=r"Verdict: (\w+)")
    assert [i.kind for i in task.instances()[0]] == ["generate_until"]
    assert verdicts(task, "Verdict: bad? No. Verdict: Good.") == [Verdict("good", 1.0)]
    unread = verdicts(task, "Verdict: middling")
    assert unread == [Verdict("[invalid]", 0.0, unread=True)]
    assert task.score(task.docs[0], unread) == {"score": 0.0, "unread": 1.0}


def test_a_pair_is_asked_again_with_the_two_exchanged(tmp_path: Path) -> None:
    task = made(tmp_path, scale="pairs", template="A: {{response_a}} B: {{response_b}}")
    prompts = [*dict.fromkeys(i.context for i in task.instances()[0])]
    assert prompts == ["A: five B: four", "A: four B: five"]
    a, b, tie = (-1.0, -2.0, -3.0), (-2.0, -1.0, -3.0), (-2.0, -3.0, -1.0)
    assert verdicts(task, *a, *b) == [Verdict("A", 1.0)]  # the answer wins from either place
    assert verdicts(task, *b, *a) == [Verdict("B", 0.0)]
    assert verdicts(task, *tie, *tie) == [Verdict("tie", 0.5)]
    for flips in ((a, a), (b, b), (a, tie), (tie, b)):  # A both times is the first place, not the first answer
        found = verdicts(task, *flips[0], *flips[1])
        assert found == [Verdict("tie", 0.5, flipped=True)]
        assert task.score(task.docs[0], found) == {"win_rate": 0.5, "flipped": 1.0}


def test_a_pair_without_a_label_for_ties_still_ties_where_it_flips(tmp_path: Path) -> None:
    scale = {"1": "first", "2": "second"}
    task = made(tmp_path, scale=scale, template="{{response_a}}{{response_b}}", extract="([12x])")
    assert verdicts(task, "1", "1") == [Verdict("tie", 0.5, flipped=True)]
    assert verdicts(task, "1", "x") == [Verdict("[invalid]", 0.5, unread=True)]
    assert verdicts(task, "1", "2") == [Verdict("1", 1.0)]


def test_the_judges_names_hide_columns_which_stand_in_doc(tmp_path: Path) -> None:
    task = made(tmp_path, template="{{q}} {{response}} {{target}} {{doc.response}}")
    assert task.question(task.docs[0]) == "2 + 2? five 4 a column"


def test_several_answers_have_their_mean_and_a_labelled_text_does_not_count(tmp_path: Path) -> None:
    task = made(tmp_path, {**ROW, "responses": ["x", "y"], "labelled": "z", "label": "yes"})
    assert [i.context for i in task.instances()[0]] == ["x", "x", "y", "y", "z", "z"]
    found = verdicts(task, -2.0, -1.0, -1.0, -2.0, -2.0, -1.0)
    assert [v.label for v in found] == ["yes", "no", "yes"] and task.target(task.docs[0]) == "yes"
    assert task.score(task.docs[0], found) == {"score": 0.5}


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"{}\n"])
def test_damaged_samples_are_a_sentence(tmp_path: Path, content: bytes) -> None:
    """Those of an endpoint's run, which no digest covers."""
    date = "2026-01-01T00-00-00.000001"
    (tmp_path / f"results_{date}.json").write_text("{}")
    (tmp_path / f"samples_seats_{date}.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="samples_seats"):
        sample_rows(tmp_path, "seats")


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_answer_has_the_lowest_value_whatever_the_judge_says(tmp_path: Path, text: str) -> None:
    row = {**ROW, "responses": [text, "five"]}
    likeliest = made(tmp_path, row, scale={"bad": -1, "good": 2})
    found = verdicts(likeliest, -2.0, -1.0, -2.0, -1.0)
    assert found == [Verdict("[empty]", -1.0), Verdict("good", 2.0)]
    assert likeliest.score(likeliest.docs[0], found) == {"score": 0.5}
    reads = made(tmp_path, row, scale=["bad", "good"], extract=r"Verdict: (\w+)")
    assert verdicts(reads, "Verdict: good", "Verdict: good") == [Verdict("[empty]", 0.0), Verdict("good", 1.0)]
    assert verdicts(reads, "none", "none")[0] == Verdict("[empty]", 0.0), "it is not an unread one"


@pytest.mark.parametrize(("reference", "value"), [("four", 0.0), ("", 0.5)])
def test_an_empty_answer_of_a_pair_loses_unless_both_are_empty(tmp_path: Path, reference: str, value: float) -> None:
    row = {**ROW, "responses": [""], "reference": reference}
    task = made(tmp_path, row, scale="pairs", template="{{response_a}}{{response_b}}")
    first, second = (-1.0, -2.0, -3.0), (-2.0, -1.0, -3.0)
    found = verdicts(task, *first, *second)  # the judge prefers the empty one from either place
    assert found == [Verdict("[empty]", value)]
    assert task.score(task.docs[0], found) == {"win_rate": value, "flipped": 0.0}
