"""A run of ours as inspect_ai's log: its own reader takes it, and ours gives the run's scores back."""

from __future__ import annotations

import pytest

pytest.importorskip("inspect_ai", reason="needs inspect_ai: pip install 'evalengine[inspect]'")

from pathlib import Path

from inspect_ai.log import read_eval_log, write_eval_log

from evalengine.report.read.load import load_run
from tests.e2e.command import call, finished


@pytest.mark.parametrize("task", ["arithmetic", "arc_easy"])
def test_a_log_of_a_run_is_read_and_comes_back(task: str, tmp_path: Path, data_dir: Path) -> None:
    run = finished(tmp_path / "runs", f"task={task}", f"data_dir={data_dir}", "limit=5", *(
        ["task.num_fewshot=0"] if task == "arc_easy" else []))  # fmt: skip
    file = tmp_path / "log.json"
    done = call("report", str(run.folder), "--inspect-log", str(file))
    assert done.code == 0 and "5 samples" in done.out, done.err
    log = read_eval_log(str(file))
    assert log.status == "success" and log.eval.metadata is not None and log.eval.metadata["digest"] == run.digest
    assert log.samples is not None and len(log.samples) == 5 and log.samples[0].output.completion
    ours, back = load_run(run.folder), load_run(file)
    assert back.scores == ours.scores and back.hashes == ours.hashes
    for of, metric, name in ours.scores:
        scorer = metric if name == "none" else f"{metric} ({name})"
        assert log.results is not None
        (score,) = [one for one in log.results.scores if one.name == scorer]
        assert score.metrics["mean"].value == pytest.approx(ours.results[of, metric, name][0])
    if task == "arithmetic":
        assert [item.text for item in back.items.values()] == [item.text for item in ours.items.values()]


def test_repeats_thinkings_cut_answers_and_tokens_come_back(tmp_path: Path) -> None:
    """By inspect_ai's reader and its writer of .eval files, and `compare` finds nothing that differs."""
    settings = ("limit=4", "task.generation.max_gen_toks=40", "task.repeats=2", "task.generation.temperature=0.7")
    run = finished(tmp_path / "runs", *settings, "model.think_end_token=' has'")
    files = [tmp_path / "log.json", tmp_path / "log.eval"]
    assert call("report", str(run.folder), "--inspect-log", str(files[0])).code == 0
    log = read_eval_log(str(files[0]))
    assert log.samples is not None and [(one.id, one.epoch) for one in log.samples][:3] == [(0, 1), (0, 2), (1, 1)]
    for sample, record in zip(log.samples, run.records, strict=True):
        message, usage = sample.output.choices[0].message, sample.output.usage
        assert message.text == record.text and sample.output.completion == record.text
        parts = [] if isinstance(message.content, str) else message.content
        thought = [part.reasoning for part in parts if part.type == "reasoning"]
        assert thought == ([record.thinking] if record.thinking else [])
        assert sample.output.stop_reason == ("max_tokens" if record.finish_reason == "length" else "stop")
        assert usage is not None and usage.reasoning_tokens == record.thinking_tokens
        assert (usage.input_tokens, usage.output_tokens) == (len(record.prompt_ids), len(record.output_ids))
    write_eval_log(log, str(files[1]))
    ours = load_run(run.folder)
    for file in files:
        back = load_run(file)
        assert back.scores == ours.scores and back.cut == ours.cut and back.cut
        compared = call("compare", str(run.folder), str(file), "--level", "answers")
        assert compared.code == 0 and "Every output and every answer is the same" in compared.out, compared.err
        assert "B is a log of inspect_ai" in compared.out


def test_bad_names_are_said(tmp_path: Path) -> None:
    done = call("report", str(tmp_path), "--inspect-log", str(tmp_path / "log.txt"))
    assert done.code == 2 and "name a file that ends in .json" in done.err
