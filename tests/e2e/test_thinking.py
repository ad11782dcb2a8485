"""Runs of a model that thinks: what is scored, what is kept, and what is said of thoughts that were cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from evalengine.report.read.load import load_run_data
from tests.e2e.command import SHORT, call, finished, with_more_template

COLUMNS = {"thinking", "thinking_tokens", "thinking_truncated"}
ONCE = ("progress=false", "limit=2")


def test_thinking_is_kept_and_not_scored(tmp_path: Path) -> None:
    run = finished(tmp_path, *ONCE, "model.think_end_token=' and'")
    assert run.manifest["identity"]["think_end_token"] == " and"
    samples = run.samples("arithmetic")
    for record, sample in zip(run.records, samples, strict=True):
        assert record.thinking is not None and record.thinking_tokens is not None
        assert sample["thinking"] == [record.thinking] and sample["resps"] == [[record.text]]
        assert " and" not in record.text and not record.thinking_truncated
    assert any(record.thinking for record in run.records) and run.results["arithmetic"]["thinking_truncated"] == 0
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "Thinking, ${said} tokens" in page, "the page folds it"
    data = load_run_data(run.folder)
    assert {key: counts[0] for key, counts in data.thinking.items()} == {r.key: r.thinking_tokens for r in run.records}


def test_thoughts_cut_short_are_counted(tmp_path: Path) -> None:
    settings = ("model.think_end_token='</think>'", "task.generation.max_gen_toks=5")
    done = call(f"output_dir={tmp_path}", *ONCE, *settings)
    assert done.code == 0, done.err
    (row,) = [line for line in done.out.splitlines() if " thinking_truncated " in line]
    assert row.split()[-1] == "2"
    assert "2 generations reached max_gen_toks while they thought, so they contain no answer (no credit)" in done.out
    run = finished(tmp_path / "again", *ONCE, *settings)
    assert [sample["thinking_truncated"] for sample in run.samples("arithmetic")] == [1] * 2
    assert all(record.thinking_tokens == 5 and record.thinking_truncated for record in run.records)
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "reached the length limit while thinking, so they contain no answer (no credit)" in page


def test_an_unfinished_thinking_gets_no_credit_unless_set(tmp_path: Path) -> None:
    """Some texts would be right, and none holds an end of thinking."""
    settings = ("model.think_end_token='</think>'", "progress=false", "limit=4", "task.generation.max_gen_toks=60")
    runs = [finished(tmp_path / "no", *settings),
            finished(tmp_path / "yes", *settings, "score_unfinished_thinking=true")]  # fmt: skip
    assert [run.manifest["identity"]["score_unfinished_thinking"] for run in runs] == [False, True]
    values = [run.results["arithmetic"]["exact_match,strict-match"] for run in runs]
    assert values[0] == 0.0 and values[1] > 0.3
    assert runs[0].digest == runs[1].digest


def test_a_run_without_it_has_none_of_it(tmp_path: Path) -> None:
    """Without `think_end_token`, records, identity, samples and results hold nothing about thinking."""
    run = finished(tmp_path, *ONCE, SHORT)
    assert not COLUMNS & {*pq.read_schema(run.folder / "records.parquet").names}
    assert not {"think_end_token", "enable_thinking"} & {*run.manifest["identity"]}
    assert "thinking" not in json.dumps([*run.samples("arithmetic"), run.results])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["enable_thinking=true"], ["set apply_chat_template=true", "'model.think_end_token=\"</think>\"'"]),
        (["enable_thinking=false", "apply_chat_template=true"], ["enable_thinking=false: the model's chat template"]),
        (["model.think_end_token=99999"], ["model.think_end_token=99999: token ids must be in 0 ... "]),
        (["model.think_end_token=[1]"], ["model.think_end_token=", "must be the text or the id"]),
        (["task.generation.max_gen_toks=32768"], ["max_gen_toks=32768 leaves no room", "the model's own limit"]),
    ],
)
def test_what_cannot_be_is_said_at_the_start(settings: list[str], words: list[str], tmp_path: Path) -> None:
    """Settings of thinking that cannot work are refused before anything is written."""
    done = call(*settings, f"output_dir={tmp_path}")
    assert done.code == 2 and all(word in done.err for word in words), done.err
    assert not any(tmp_path.iterdir())


def test_the_template_is_told(tmp_path: Path) -> None:
    """`enable_thinking` reaches the template and the identity, and is refused for a task that scores given texts."""
    unthinking = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    model = with_more_template(tmp_path / "model", unthinking)
    settings = (f"model.path={model}", "apply_chat_template=true", "limit=1", "progress=false")
    by_default = finished(tmp_path / "a", *settings, SHORT)
    no_thinking = finished(tmp_path / "b", *settings, SHORT, "enable_thinking=false")
    prompts = [run.samples("arithmetic")[0]["arguments"]["gen_args_0"]["arg_0"] for run in (by_default, no_thinking)]
    assert prompts[1] == prompts[0] + "<think></think>"
    assert no_thinking.manifest["identity"]["enable_thinking"] is False
    (tmp_path / "rows.jsonl").write_text('{"q": "1 + 1", "options": ["2", "3"], "gold": 0}\n')
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: options\ndoc_to_target: gold\n"
    )
    scored = call(*settings, "enable_thinking=true", "model.think_end_token='</think>'", f"task={tmp_path}/mine.yaml")
    assert scored.code == 2 and "tasks.mine: it scores given texts, and enable_thinking=true" in scored.err
