"""`load_run`, `compare` and `gate` for Python: frames, texts, refusals; runs from the double, no model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import evalengine
from evalengine.records.schema import read_records
from evalengine.report.python.results import samples_frame
from tests.run_double import generated, write_run

EVIL = "<b>[red]evil[/red]</b>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", [generated(doc) for doc in range(6)])


def test_metrics_have_a_row_a_filter(folder: Path) -> None:
    frame = evalengine.load_run(folder).metrics
    assert frame[["task", "metric", "filter", "value"]].values.tolist() == [
        ["sums", "exact_match", "strict", pytest.approx(1 / 3)],
        ["sums", "exact_match", "flexible", pytest.approx(1 / 3)],
    ]
    assert frame.stderr.isna().all() and frame.documents.tolist() == [6, 6] and frame.higher_is_better.all()


def test_samples_have_a_row_a_document_and_filter(folder: Path) -> None:
    frame = evalengine.load_run(folder).samples
    assert frame.shape[0] == 12 and frame.doc_id.tolist() == [doc for doc in range(6) for _ in range(2)]
    assert frame.exact_match.tolist() == [float(doc % 3 == 0) for doc in range(6) for _ in range(2)]
    first = frame.iloc[0]
    assert (first.prompts, first.answers, first.target, first.doc) == (["q"], ["0"], "t", {"q": 0})


def scored(metrics: dict[str, Any], doc: int) -> dict[str, Any]:
    """A sample's row as lm-eval's files have it."""
    return {"doc_id": doc, "filter": "none", "metrics": list(metrics), **metrics}


def test_a_metric_that_another_task_lacks_keeps_its_type() -> None:
    """In a frame of several tasks no score is NaN, and booleans are no objects; a task's own frame has nothing else."""
    samples = {
        "rules": [scored({"strict": True, "both": True, "passed": 3, "each": [True, False]}, doc) for doc in range(2)],
        "sums": [scored({"exact": 0.5, "both": 0.25, "score": math.inf}, doc) for doc in range(2)],
    }
    frame = samples_frame(samples)
    kinds = {"strict": "boolean", "passed": "Int64", "exact": "Float64", "both": "float64", "each": "object"}
    assert frame.dtypes[list(kinds)].astype(str).to_dict() == kinds
    assert frame.strict.tolist() == [True, True, pd.NA, pd.NA] and frame.exact.tolist() == [pd.NA, pd.NA, 0.5, 0.5]
    assert frame.both.tolist() == [1.0, 1.0, 0.25, 0.25] and frame.score.tolist()[2:] == [math.inf] * 2
    assert frame.query("strict").task.tolist() == ["rules"] * 2 and frame.passed.mean() == 3
    alone = samples_frame({"rules": samples["rules"]})
    assert alone.dtypes[["strict", "both", "passed"]].astype(str).tolist() == ["bool", "bool", "int64"]
    far = samples_frame({"far": [scored({"passed": 10**400}, 0), scored({"passed": 0.5}, 1)]})
    assert far.passed.tolist() == [10**400, 0.5]


def test_one_tasks_samples_have_its_own_metrics(tmp_path: Path) -> None:
    run = evalengine.load_run(write_run(tmp_path / "two", [generated(d, task=t) for t in ("a", "b") for d in range(3)]))
    assert run.samples_of("b").equals(run.samples.query("task == 'b'").reset_index(drop=True))
    with pytest.raises(evalengine.ConfigError, match=r"samples_of\('c'\): no task is called so; there are a, b"):
        run.samples_of("c")


def test_records_are_the_files_own_bits(folder: Path) -> None:
    frame, records = evalengine.load_run(folder).records, read_records(folder / "records.parquet")
    assert frame.output_ids.tolist() == [record.output_ids for record in records]
    for got, record in zip(frame.logprobs, records, strict=True):
        assert got.dtype == np.float32 and got.tobytes() == record.logprobs.tobytes()
    assert frame.sum_logprob[0] == pytest.approx(float(records[0].logprobs.sum()), rel=1e-6)


def test_a_value_must_be_named(folder: Path) -> None:
    run = evalengine.load_run(folder)
    assert run.value("exact_match", filter="strict") == pytest.approx(1 / 3)
    with pytest.raises(evalengine.ConfigError, match="2 results are called so"):
        run.value("exact_match")
    with pytest.raises(evalengine.ConfigError, match="no result is called so; there are"):
        run.value("acc")


def test_an_edited_run_is_refused(folder: Path) -> None:
    (folder / "records.parquet").write_bytes(b"x")
    with pytest.raises(evalengine.ConfigError, match=r"records\.parquet"):
        evalengine.load_run(folder)


def test_a_run_shows_itself_as_text_and_as_html(folder: Path) -> None:
    run = evalengine.load_run(folder)
    assert repr(run).splitlines()[-1] == f"digest: {run.digest}" and "exact_match" in repr(run)
    assert run._repr_html_().startswith("<div><table>") and run.digest is not None and run.digest in run._repr_html_()


def test_html_escapes_what_came_from_outside(tmp_path: Path) -> None:
    run = evalengine.load_run(write_run(tmp_path / EVIL.replace("/", ""), [generated(0)]))
    assert "<b>" not in run._repr_html_() and "&lt;b&gt;" in run._repr_html_()


def test_compare_takes_paths_and_runs(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "b", [generated(doc, seed=doc == 2) for doc in range(6)])
    same = evalengine.compare(folder, evalengine.load_run(folder))
    differs = evalengine.compare(folder, other, allow=True)
    assert same.same and same.verdict == "IDENTICAL" and same.differences.empty
    assert not differs.same and differs.differences.doc_id.tolist() == [2]
    assert [*same.differences] == [*differs.differences], "it had no columns"
    assert same.differences[same.differences.output].empty and same.differences.doc_id.dtype == "int64"
    assert repr(differs).splitlines()[-1].startswith("verdict: DIFFERENT")
    assert differs.metrics.task.tolist() == ["sums", "sums"] and differs.to_json()["format"] == "evalengine.compare"
    assert differs.differences[["what", "prompt", "output", "text"]].values.tolist() == [["prompt", True, True, False]]


def structured(frame: pd.DataFrame) -> set[str]:
    """The columns with a cell that is no scalar."""
    return {name for name in frame for cell in frame[name] if not pd.api.types.is_scalar(cell)}


def test_a_cell_is_a_scalar_but_for_what_is_a_list_by_nature(folder: Path, tmp_path: Path) -> None:
    run, other = evalengine.load_run(folder), write_run(tmp_path / "b", [generated(d, seed=d == 2) for d in range(6)])
    assert structured(run.samples) == {"prompts", "responses", "answers", "doc"} and not structured(run.metrics)
    assert structured(run.records) == {"prompt_ids", "output_ids", "logprobs"}
    found = evalengine.compare(run, other, allow=True)
    assert not structured(found.metrics) | structured(found.differences)
    assert found.metrics.loc[0, ["wins", "losses", "cut_a", "cut_b"]].tolist() == [0, 0, 0, 0]
    assert found.metrics.value_finished_b[0] == pytest.approx(1 / 3) and found.metrics.ci_low[0] < 0
    moved = [replace(generated(doc), logprobs=generated(doc, seed=doc == 2).logprobs) for doc in range(6)]
    failed = evalengine.gate(run, write_run(tmp_path / "c", moved))
    assert not structured(failed.checks) and failed.checks.details[0] == "document 2, request 0, repeat 0"


def test_compare_says_everything_that_is_wrong() -> None:
    with pytest.raises(evalengine.ConfigError) as refused:
        evalengine.compare("no", "nor", level="roughly")
    assert [problem.split(":")[0] for problem in refused.value.problems] == ["level=roughly", "no", "nor"]


def test_gate_judges_or_raises(folder: Path, tmp_path: Path) -> None:
    judged = evalengine.gate(evalengine.load_run(folder), folder)
    assert judged.passed and judged.verdict == "pass" and judged.checks.status.tolist() == ["pass"]
    assert repr(judged).startswith("gate bitwise: PASS (1 of 1 checks)")
    other = write_run(tmp_path / "b", [generated(doc, seed=doc == 2) for doc in range(6)])
    with pytest.raises(evalengine.ConfigError, match=r"the noise cannot be judged: --noise .* is the baseline itself"):
        evalengine.gate(folder, folder, "accuracy", noise=folder)
    with pytest.raises(evalengine.ConfigError, match="gate: not comparable: "):
        evalengine.gate(folder, other)
    with pytest.raises(evalengine.ConfigError, match="there is no such baseline"):
        evalengine.gate(tmp_path / "none.json", folder)
    with pytest.raises(evalengine.ConfigError, match="bad policy"):
        evalengine.gate(folder, folder, policy="lenient")
