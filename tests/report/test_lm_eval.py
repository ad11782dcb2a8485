"""lm-eval's own output folders, read as evidence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.cli.commands import baseline as main
from evalengine.errors import ConfigError
from evalengine.records.manifest_data import Manifest
from evalengine.report.compare.item_differences import differing_leaves
from evalengine.report.read.lm_eval import answer, number
from evalengine.report.read.load import load_run
from tests.run_double import sha


def lm_eval_samples() -> dict[str, list[dict[str, Any]]]:
    """What lm-eval's evaluator hands its tracker: a generated, a multiple-choice and a rolling task."""

    def row(doc: int, name: str, arguments: list[Any], resps: list[Any], values: dict[str, Any]) -> dict[str, Any]:
        hashes = {f"{kind}_hash": sha(kind, doc) for kind in ("doc", "prompt", "target")}
        filtered = [repeats[0] for repeats in resps]
        base = {"doc_id": doc, "doc": {}, "target": 1, "arguments": arguments, "resps": resps, "filter": name}
        return {**base, "filtered_resps": filtered, "metrics": list(values), **hashes, **values}

    choices = [("q", " cat"), ("q", " dog")]
    return {
        "gen_task": [
            row(
                doc,
                name,
                [("q", {"until": []})],
                [[f"text {doc}"]],
                {"exact_match": np.float64(doc), "ok": np.bool_(1)},
            )
            for name in ("strict", "flexible")
            for doc in (0, 1)
        ],
        "choice": [
            row(doc, "none", choices, [[(-2.5, False)], [(-1.5 - 2 * doc, True)]], {"acc": 1.0 - doc}) for doc in (0, 1)
        ],
        "pages": [row(0, "none", [("page",)], [[-123.5]], {"word_perplexity": (-123.5, 7)})],
    }


@pytest.fixture
def lm_eval_folder(tmp_path: Path) -> Path:
    """A folder written by lm-eval's own tracker."""
    trackers = pytest.importorskip("lm_eval.loggers.evaluation_tracker")
    samples = lm_eval_samples()
    outputs = {"gen_task": "generate_until", "choice": "multiple_choice", "pages": "loglikelihood_rolling"}
    results = {
        "results": {
            "gen_task": {"alias": "gen_task", "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A"},
            "choice": {"alias": "choice", "acc,none": 0.5, "acc_stderr,none": 0.25},
            "pages": {"alias": "pages", "word_perplexity,none": 9.0, "word_perplexity_stderr,none": "N/A"},
        },
        "configs": {task: {"output_type": kind, "dataset_path": task} for task, kind in outputs.items()},
        "versions": dict.fromkeys(outputs, 1),
        "higher_is_better": {"gen_task": {"exact_match": True, "ok": None}, "pages": {"word_perplexity": False}},
        "n-samples": {task: {"original": 2, "effective": 2} for task in outputs},
        "config": {"model": "hf", "model_args": {"pretrained": "m"}, "random_seed": 0},
    }
    tracker = trackers.EvaluationTracker(output_path=str(tmp_path / "out"))
    tracker.general_config_tracker.log_experiment_args("hf", "pretrained=m", "", "", False)
    tracker.save_results_aggregated(results=results, samples=samples)
    for task, rows in samples.items():
        tracker.save_results_samples(task_name=task, samples=rows)
    return tmp_path / "out"


def test_lm_evals_own_files_are_read_as_evidence(lm_eval_folder: Path) -> None:
    run = load_run(lm_eval_folder)  # the results lie in out/m/
    assert (run.kind, run.name, run.digest, run.manifest) == ("lm-eval", "m", None, Manifest({}))
    assert run.scores == {
        ("gen_task", "exact_match", "strict"): {0: 0.0, 1: 1.0},
        ("gen_task", "exact_match", "flexible"): {0: 0.0, 1: 1.0},
        ("gen_task", "ok", "strict"): {0: 1.0, 1: 1.0},
        ("gen_task", "ok", "flexible"): {0: 1.0, 1: 1.0},
        ("choice", "acc", "none"): {0: 1.0, 1: 0.0},
    }
    assert run.results["choice", "acc", "none"] == (0.5, 0.25)
    assert run.results["gen_task", "exact_match", "strict"] == (0.5, None)
    assert run.higher_is_better["pages", "word_perplexity", "none"] is False
    assert ("choice", "acc", "none") not in run.higher_is_better
    assert run.answers["choice", "none"] == {0: "1: dog", 1: "0: cat"}
    assert run.answers["gen_task", "strict"] == {0: "text 0", 1: "text 1"}
    assert ("pages", "none") not in run.answers
    assert run.hashes["choice"][1] == (sha("doc", 1), sha("prompt", 1), sha("target", 1))
    assert run.identity["model_args"] == {"pretrained": "m"}
    assert run.identity["tasks"]["choice"]["dataset_path"] == "choice"
    assert run.identity["task_hashes"].keys() == {"gen_task", "choice", "pages"}
    items = {key: (item.kind, item.sum_logprob, item.text, item.leaf) for key, item in run.items.items()}
    assert items == {
        ("choice", 0, 0, 0): ("loglikelihood", -2.5, None, ""),
        ("choice", 0, 1, 0): ("loglikelihood", -1.5, None, ""),
        ("choice", 1, 0, 0): ("loglikelihood", -2.5, None, ""),
        ("choice", 1, 1, 0): ("loglikelihood", -3.5, None, ""),
        ("gen_task", 0, 0, 0): ("generate_until", None, "text 0", ""),
        ("gen_task", 1, 0, 0): ("generate_until", None, "text 1", ""),
        ("pages", 0, 0, 0): ("loglikelihood_rolling", -123.5, None, ""),
    }
    with pytest.raises(ConfigError, match="holds no digests"):
        differing_leaves(run, run)


def test_the_newest_of_lm_evals_runs_is_read(lm_eval_folder: Path) -> None:
    (old,) = lm_eval_folder.rglob("results_*.json")
    new = old.with_name("results_2999-01-01T00-00-00.json")
    content = json.loads(old.read_text())
    content["results"]["choice"]["acc,none"] = 0.75
    new.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"samples_choice_2999.*missing; run lm_eval with --log_samples"):
        load_run(lm_eval_folder)  # older samples are another run's
    for file in list(old.parent.glob("samples_*.jsonl")):
        shutil.copy(file, file.with_name(re.sub(r"_2\d{3}-.*", "_2999-01-01T00-00-00.jsonl", file.name)))
    assert load_run(lm_eval_folder).results["choice", "acc", "none"][0] == 0.75
    assert load_run(new).results["choice", "acc", "none"][0] == 0.75
    assert load_run(old).results["choice", "acc", "none"][0] == 0.5


def test_an_lm_eval_baseline_keeps_its_scores(lm_eval_folder: Path, tmp_path: Path) -> None:
    assert main([str(lm_eval_folder), "-o", str(tmp_path / "x.json")]) == 0
    a, b = load_run(lm_eval_folder), load_run(tmp_path / "x.json")
    assert (a.by_lm_eval, b.kind, b.by_lm_eval) == (True, "baseline", True)
    assert (b.scores, b.answers, b.hashes, b.results, b.digest) == (a.scores, a.answers, a.hashes, a.results, None)
    assert [i.sum_logprob for i in b.items.values()] == [i.sum_logprob for i in a.items.values()]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), ("True", 1.0), ("0.5", 0.5), ("N/A", None), (None, None), ([-3.0, 2], None)],
)
def test_numbers_are_read_from_lm_evals_values(value: Any, expected: float | None) -> None:
    assert number(value) == expected


@pytest.mark.parametrize(
    ("filtered", "expected"),
    [
        (["[invalid]"], "[invalid]"),
        ([["a", "b"]], '["a", "b"]'),
        (["a", "b"], '["a", "b"]'),
        ([["-1.5", "True"]], "True"),
        ([["-2.0", "False"], ["-1.0", "True"], ["-1.0", "True"]], "1: y"),
        ([], None),
    ],
)
def test_answers_are_read_from_filtered_responses(filtered: list[Any], expected: str | None) -> None:
    arguments = {f"gen_args_{i}": {"arg_0": "q", "arg_1": f" {word}"} for i, word in enumerate("xyz")}
    row = {"filtered_resps": filtered, "arguments": arguments, "metrics": ["acc"]}
    assert answer(row, None) == expected
    assert answer(row, "loglikelihood_rolling") is None
