"""What a task's prompts probably do not mean is a warning, which names the setting; the prompts stay lm-eval's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.__main__ import main
from evalengine.config.compose import compose_jobs
from evalengine.config.schema import Config
from evalengine.tasks.base import Task
from evalengine.tasks.registry import load_task
from tests.e2e.command import call, runs

COLOURS = [{"q": f"Colour of {thing}", "a": colour} for thing, colour in
           {"grass": "green", "snow": "white", "coal": "black"}.items()]  # fmt: skip
LEAK = """task: leak
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}?"
doc_to_target: "{{a}}"
num_fewshot: 2
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
"""
CHOICE = """task: odd
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
"""
NUMBERS = [{"n": 0, "digit": "0", "a": "even", "b": "odd"}, {"n": 1, "digit": "1", "a": "even", "b": "odd"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, content: str, rows: list[dict[str, Any]], *settings: str) -> Config:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text(content)
    return compose_jobs(["task=./mine.yaml", *settings])[0].config


def made(folder: Path, content: str, rows: list[dict[str, Any]], *settings: str) -> Task:
    ((name, task),) = written(folder, content, rows, *settings).tasks.items()
    made = load_task(name, task)
    made.load()
    return made


def warnings(task: Task) -> list[str]:
    return [*task.warnings(len(task.instances()))]


def own(task: Task) -> int:
    """How many prompts show the answer of their own question."""
    return sum(request.context.count(task.question(doc)) > 1
               for doc, (request,) in zip(task.docs, task.instances(), strict=True))  # fmt: skip


def test_prompts_that_contain_their_own_document_are_counted(folder: Path) -> None:
    task = made(folder, LEAK, COLOURS)
    (line,) = warnings(task)
    assert 0 < own(task) < 3
    assert line.startswith(f"tasks.leak.num_fewshot=2: {own(task)} of 3 prompts contain their own document")
    assert "set tasks.leak.template.spare_exemplar=true to exclude it" in line


def test_the_option_that_the_warning_names_excludes_them(folder: Path) -> None:
    settings = "task.template.spare_exemplar=true"
    task = made(folder, LEAK, COLOURS, settings)
    assert warnings(task) == [] and own(task) == 0
    assert all(request.context.count("?") == 3 for (request,) in task.instances())


@pytest.mark.parametrize("split", ["fewshot_split: test\n", "num_fewshot: 0\n"])
def test_a_named_split_or_no_exemplars_give_no_warning(folder: Path, split: str) -> None:
    content = LEAK.replace("num_fewshot: 2\n", split) if "num" in split else LEAK + split
    assert warnings(made(folder, content, COLOURS)) == []


def test_a_file_of_exemplars_that_holds_evaluated_rows_is_reported(folder: Path) -> None:
    (folder / "shots.jsonl").write_text("".join(json.dumps(row) + "\n" for row in COLOURS[:2]))
    (line,) = warnings(made(folder, LEAK, COLOURS, f"task.fewshot_file={folder}/shots.jsonl"))
    assert "2 of 3 prompts" in line and line.endswith(f"remove the evaluated rows from {folder}/shots.jsonl")


def test_a_run_reports_and_counts_them(folder: Path) -> None:
    written(folder, LEAK, COLOURS)
    done = call("task=./mine.yaml", f"output_dir={folder}/runs", "progress=false")
    assert done.code == 0 and "of 3 prompts contain their own document" in done.err
    (run,) = runs(folder / "runs")
    count = run.manifest["counts"]["own_exemplar_prompts"]
    assert f"{count} prompts contain their own document" in done.out and 0 < count < 3
    excluded = call("task=./mine.yaml", f"output_dir={folder}/without", "task.template.spare_exemplar=true")
    (other,) = runs(folder / "without")
    assert "their own document" not in excluded.err + excluded.out
    assert other.manifest["identity"]["tasks"] != run.manifest["identity"]["tasks"]


@pytest.mark.parametrize(
    ("text", "warns"), [("{{n}}", True), ("{{n % 2}}", True), ("n", False), ("Number: {{n}}", False), ("digit", False)]
)
def test_digits_that_are_read_as_an_index_are_reported(folder: Path, text: str, warns: bool) -> None:
    """A column of numbers is lm-eval's own form for such an index (WinoGrande), and a column of digits stays a text."""
    content = CHOICE + f'doc_to_text: "{text}"\ndoc_to_choice: ["even", "odd"]\ndoc_to_target: "{{{{n % 2}}}}"\n'
    said = warnings(made(folder, content, NUMBERS))
    assert [line.partition(" (")[0] for line in said] == ["tasks.odd.template: doc_to_text writes digits alone"] * warns


@pytest.mark.parametrize(
    ("choices", "warns"),
    [('["{{a}}", "{{b}}"]', True), ('{x: "{{a}}", y: odd}', True), ('"{{[a, b]}}"', False), ('["even", "odd"]', False)],
)
def test_choices_with_literal_templates_are_reported(folder: Path, choices: str, warns: bool) -> None:
    content = CHOICE + f'doc_to_text: "Number: {{{{n}}}}"\ndoc_to_choice: {choices}\ndoc_to_target: "{{{{n % 2}}}}"\n'
    said = warnings(made(folder, content, NUMBERS))
    assert [line.partition(",")[0] for line in said] == ["tasks.odd.template: doc_to_choice contains '{{a}}'"] * warns


def test_documents_are_shown_with_the_warnings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(folder, CHOICE + 'doc_to_text: "{{n}}"\ndoc_to_choice: [even, odd]\ndoc_to_target: "{{n}}"\n', NUMBERS)
    assert main(["tasks", "./mine.yaml", "--show", "2"]) == 0
    assert "doc_to_text writes digits alone (0 for the first document)" in capsys.readouterr().err


def test_lm_evals_own_tasks_are_counted_too(folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install evalengine[lm-eval])")
    (folder / "code.py").write_text("def scores(doc, results):\n    return {'acc': float(results[0] == doc['a'])}\n")
    content = LEAK + "process_results: !function code.scores\nmetric_list: [{metric: acc, aggregation: mean}]\n"
    config = written(folder, content, COLOURS)
    ((name, settings),) = config.tasks.items()
    assert settings.lm_eval.name
    task = load_task(name, settings)
    task.load()
    (line,) = warnings(task)
    assert f"{own(task)} of 3 prompts" in line and "set tasks.leak.fewshot_split=test to exclude it" in line
    excluded = load_task(name, replace(settings, fewshot_split="test"))
    excluded.load()
    assert warnings(excluded) == [] and own(excluded) == 0
