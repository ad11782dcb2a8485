"""A template's text is that of its own row, also where the last row had the same; rows are chosen by their columns.
Templates and patterns of a file have limits of time and memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.errors import ConfigError
from evalengine.harness.plan import load_tasks, prepare
from evalengine.integrations.endpoint.plan import endpoint_plan
from evalengine.tasks.rows import Rows
from evalengine.tasks.templates import Field
from evalengine.util import limits
from evalengine.util.forked import ForkedTask

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'a' * 10**10 }}"
BACKTRACKING = "(.|.)*#"  # takes hours for any text without a "#"
TASK = {"task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        "test_split": "test", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}  # fmt: skip
JUDGE = {"model": "m", "api": "http://127.0.0.1:9/v1", "scale": "yes_no", "extract": "(yes|no)"}


def filters(**step: Any) -> list[dict[str, Any]]:
    return [{"name": "bad", "filter": [step]}]


def in_file(folder: Path, **settings: Any) -> str:
    """The word that names a task's file in the current folder, after writing it with two rows."""
    same = {"choices": ["x"], "prompt": "", "test": "", "entry_point": ""}
    rows = [{"q": "one?", "a": "1", **same}, {"q": "two?", "a": "2", **same}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text(json.dumps(TASK | settings))
    return "task=./mine.yaml"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"doc_to_text": HUGE}, "row 0 is not as expected: doc_to_text: needs more than 1024 MiB of memory"),
        ({"doc_to_text": ENDLESS}, "row 0 is not as expected: doc_to_text: is not finished after 0.1 s"),
        ({"doc_to_text": ENDLESS, "cls": "code:HumanEval"}, "row 0 is not as expected: doc_to_text: is not finished"),
        ({"doc_to_target": "{% if a == '2' %}" + HUGE + "{% endif %}"}, "row 1 is not as expected: doc_to_target: "),
        ({"doc_to_text": "{{ q * 10**7 }}"}, "doc_to_text: makes a text of more than 16,777,216 characters"),
        ({"doc_to_text": "{{ ('a' * 60) | regex_replace('(a|a)*b', '') }}"}, "row 0 is not as expected: doc_to_text: "),
        ({"description": ENDLESS}, "row 0 is not as expected: description: is not finished after"),
        ({"fewshot_config": {"doc_to_text": ENDLESS, "samples": [{"q": "", "a": ""}]}, "num_fewshot": 1},
         "fewshot_config.doc_to_text: is not finished"),
        ({"filter_list": filters(function="regex", regex_pattern=BACKTRACKING)}, "filter_list.bad: is not finished"),
        ({"filter_list": filters(function="multi_choice_regex", regexes_to_ignore=[BACKTRACKING])},
         "row 0 is not as expected: filter_list.bad: is not finished"),
        ({"metric_list": [{"metric": "exact_match", "regexes_to_ignore": [BACKTRACKING]}]},
         "row 0 is not as expected: metric_list: is not finished"),
        ({"judge": {**JUDGE, "template": "{{response}}" + ENDLESS}},
         "judge.template: is not finished after 0.1 s of processor time (document 0)"),
    ],
)  # fmt: skip
def test_templates_and_patterns_of_a_file_have_limits(
    settings: dict[str, Any], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "16,777,216" not in wanted:  # such a text takes up to 0.1 s of a busy processor
        monkeypatch.setattr(limits, "SECONDS", 0.1)
    (job,) = compose_jobs([in_file(tmp_path, **settings)])
    with pytest.raises(ConfigError) as error:
        prepare(job.config)
    assert wanted in str(error.value)


@pytest.mark.parametrize("cls", ["ifeval:IFEval", "minerva:Minerva"])
def test_a_class_that_calls_lm_evals_scorer_needs_its_file(
    cls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (job,) = compose_jobs([in_file(tmp_path, cls=cls)])
    with pytest.raises(ConfigError, match=f"tasks.mine.cls={cls}: is for this package's tasks alone"):
        prepare(job.config)


@pytest.mark.parametrize("plan", [load_tasks, endpoint_plan])
def test_every_plan_has_the_limits(
    plan: Callable[[Config], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [in_file(tmp_path, doc_to_text=HUGE), "model.api=http://127.0.0.1:9/v1", "model.name=m"]
    with pytest.raises(ConfigError, match="doc_to_text: needs more than 1024 MiB"):
        plan(compose_jobs(words)[0].config)


@pytest.mark.parametrize("nested", ["not " * 7000 + "1", "-" * 7000])
@pytest.mark.parametrize("confined", [False, True])
def test_deep_nesting_is_no_lack_of_memory(nested: str, confined: bool) -> None:
    """Python's parser raises MemoryError for it at once."""
    text = f"[{nested}]"

    def work() -> tuple[Any, str]:
        target = Field("doc_to_target", "{{a}}").target({"a": text}, frozenset(), counts=False)
        with pytest.raises(ValueError, match="which is no list") as error:
            Field("doc_to_choice", "{{a}}").choices({"a": text}, frozenset())
        return target, str(error.value)

    with ForkedTask(work, worthwhile=False, limited=confined) as done:
        assert done.result() == (text, f"doc_to_choice: writes {text[:80]!r}, which is no list")


@pytest.mark.parametrize("source", ["{{ 'a' * 10**9 }}", "{{ 'a' | center(10**9) }}", "{{ '%1000000000d' % 1 }}"])
def test_a_template_computes_nothing_before_it_has_limits(source: str) -> None:
    tracemalloc.start()
    try:
        assert Field("doc_to_text", "{% if false %}" + source + "{% endif %}" + str(tracemalloc)).names == frozenset()
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "expression",
    [
        *("'a' * 3", "2 ** 3", "7 % 4", "'%05.1f' % 3.14159", "'ab' | center(8)", "[3, 1] | sort | join('-')"),
        *("['a', 'b'] | map('upper') | list", "['a', 'b'] | map('replace', 'a', 'c') | join", "'x<y' | escape"),
        *("[{'k': 1}, {'k': 2}] | selectattr('k', 'equalto', 2) | list", "[1, 2, 3] | select('odd') | list"),
        *("{'b': 1} | tojson", "[{'k': 1}] | map(attribute='k') | sum", "[{'k': 1}] | groupby('k')", "1 | default(2)"),
        *("'a b c' | wordwrap(3)", "q | replace('o', '0') | title", "{'a': 1} | dictsort", "'1' | int + 1"),
    ],
)
def test_filters_and_operators_are_jinja2_s(expression: str) -> None:
    plain = ImmutableSandboxedEnvironment().from_string("{{ " + expression + " }}").render(q="one two")
    assert Field("doc_to_text", "{{ " + expression + " }}").render({"q": "one two"}) == plain


def test_each_row_has_its_own_text() -> None:
    field = Field("description", "about {{ subject }}{% if more is defined %} and {{ more }}{% endif %}")
    rows = [
        *({"subject": "a"}, {"subject": "a"}, {"subject": "a", "more": "b"}, {"subject": "a", "more": 1}),
        *({"subject": "a", "more": True}, {"subject": "a", "more": 1.0}, {"subject": "b"}, {"subject": "a"}),
    ]
    assert [field.render(row) for row in rows] == [
        *("about a", "about a", "about a and b", "about a and 1"),
        *("about a and True", "about a and 1.0", "about b", "about a"),
    ]


def test_equal_rows_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the columns that the template reads count."""
    field = Field("description", "about {{ subject }}")
    assert field.render({"subject": "a", "question": "1"}) == "about a"
    monkeypatch.setattr(field, "_template", object())
    assert field.render({"subject": "a", "question": "2"}) == "about a"
    with pytest.raises(ValueError, match="description"):
        field.render({"subject": "b", "question": "2"})


def test_a_missing_column_is_told_after_a_row_that_has_it() -> None:
    field = Field("doc_to_text", "{{ a }}{{ b }}")
    assert field.render({"a": "x", "b": "y"}) == "xy"
    with pytest.raises(ValueError, match="'b' is undefined"):
        field.render({"a": "x"})


def test_rows_with_a_text_in_a_column() -> None:
    """Tasks take their parts of the same rows, by one column or by several; a part of a part has rows of its own."""
    values = [("x", 1), ("y", 1), ("x", 2), ("x", 1)]
    rows = Rows([{"a": a, "b": b} for a, b in values], "file", lines=[1, 3, 4, 5])
    named = replace(rows, source="other")
    assert rows.where({"a": "x"}).lines == named.where({"a": "x"}).lines == [1, 4, 5]
    assert rows.where({"a": "y"}).rows == [{"a": "y", "b": 1}]
    part = rows.where({"a": "x", "b": "1"})
    assert part.lines == [1, 5] and part.where({"a": "y"}).rows == [] and part.where({"b": "1"}).lines == [1, 5]
    assert rows.where({"a": "z"}).rows == rows.where({"c": "x"}).rows == []
    assert rows.where({"c": "None"}).lines == [1, 3, 4, 5]
