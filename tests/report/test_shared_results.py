"""The Hub's `.eval_results` and Every Eval Ever's record, made of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalengine.report.read.load import load_run
from evalengine.report.stats.metric_interval import metric_interval
from tests.e2e.command import Run, call, finished


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    return finished(folder, "task=[gsm8k,arithmetic]", "limit=4", f"data_dir={data_dir}", "task.num_fewshot=0",
                    "task.generation.max_gen_toks=8")  # fmt: skip


def written(run: Run, option: str, file: Path) -> Any:
    done = call("report", str(run.folder), option, str(file))
    assert done.code == 0, done.err
    text = file.read_text(encoding="utf-8")
    return yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)


def test_the_hubs_entries_name_dataset_and_task(run: Run, tmp_path: Path) -> None:
    (entry,) = written(run, "--eval-results", tmp_path / "gsm8k.yaml")  # the made-up rows are on no Hub
    facts = run.manifest["datasets"]["gsm8k"]
    assert entry["dataset"] == {"id": facts["dataset"], "task_id": "main"}, "local rows have no revision"
    assert "/" in entry["dataset"]["id"]
    key = next(key for key in load_run(run.folder).results if key[0] == "gsm8k")
    assert entry["value"] == load_run(run.folder).results[key][0]
    assert f"digest {run.digest}" in entry["notes"] and "0-shot; 4 rows" in entry["notes"]
    assert entry["date"] == run.manifest["started"][:10]


def test_every_eval_ever_has_each_result_with_its_interval(run: Run, tmp_path: Path) -> None:
    record = written(run, "--every-eval", tmp_path / "record.json")
    read = load_run(run.folder)
    assert {"schema_version", "evaluation_id", "retrieved_timestamp", "source_metadata", "model_info", "eval_library",
            "evaluation_results"} <= {*record}  # fmt: skip
    assert record["source_metadata"]["additional_details"]["digest"] == run.digest
    assert {"deployment_type", "model_availability"} <= {*record["model_info"]["additional_details"]}
    assert len(record["evaluation_results"]) == len(read.results)
    for result, (key, (value, stderr)) in zip(record["evaluation_results"], read.results.items(), strict=True):
        assert result["evaluation_name"] == key[0] and result["score_details"]["score"] == value
        assert result["metric_config"]["lower_is_better"] is False
        assert result["metric_config"]["score_type"] in ("binary", "continuous")
        told = result["score_details"]["uncertainty"]
        assert told["num_samples"] == 4 and told["standard_error"]["value"] == stderr
        interval = metric_interval(read, key)
        assert interval is not None
        assert (told["confidence_interval"]["lower"], told["confidence_interval"]["upper"]) == interval
    sources = {one["evaluation_name"]: one["source_data"]["source_type"] for one in record["evaluation_results"]}
    assert sources == {"gsm8k": "hf_dataset", "arithmetic": "other"}


def test_what_cannot_be_written_is_said(run: Run, tmp_path: Path) -> None:
    for option, file, said in (
        ("--eval-results", "a.json", "name a file that ends in .yaml"),
        ("--every-eval", "a.yaml", "name a file that ends in .json"),
    ):
        done = call("report", str(run.folder), option, str(tmp_path / file))
        assert done.code == 2 and said in done.err
    baseline = tmp_path / "baseline.json"
    assert call("baseline", str(run.folder), "-o", str(baseline)).code == 0
    done = call("report", str(baseline), "--eval-results", str(tmp_path / "a.yaml"))
    assert done.code == 2 and "is no run of evalengine's own" in done.err
