"""A run of ours as inspect_ai's log: its own reader takes it, and ours gives the run's scores back."""

from __future__ import annotations

import pytest

pytest.importorskip("inspect_ai", reason="needs inspect_ai: pip install 'evalengine[inspect]'")

from pathlib import Path

from inspect_ai.log import read_eval_log

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
    for (of, metric, name), values in ours.scores.items():
        scorer = metric if name == "none" else f"{metric} ({name})"
        assert back.scores[of, scorer, "none"] == values
        assert log.results is not None
        (score,) = [one for one in log.results.scores if one.name == scorer]
        assert score.metrics["mean"].value == pytest.approx(ours.results[of, metric, name][0])
    if task == "arithmetic":
        assert [item.text for item in back.items.values()] == [item.text for item in ours.items.values()]


def test_bad_names_are_said(tmp_path: Path) -> None:
    done = call("report", str(tmp_path), "--inspect-log", str(tmp_path / "log.txt"))
    assert done.code == 2 and "name a file that ends in .json" in done.err
