"""Runs that sample every document several times: a sample depends only on its document and its number."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.harness.requests import HarnessRequest, RequestBuilder
from evalengine.records.schema import RecordKey
from evalengine.report.read.load import load_run_data
from tests.e2e.command import Run, after_entries, call, finished, interrupt, over, runs

HOT = ("progress=false", "task.generation.temperature=3", "task.generation.max_gen_toks=5", "seed=3")


def sampled(folder: Path, *settings: str) -> Run:
    """A run at a temperature at which samples of one prompt differ."""
    return finished(folder, *HOT, *settings)


def common(a: Run, b: Run) -> tuple[dict[RecordKey, bytes], dict[RecordKey, bytes]]:
    """The leaves of the requests that both runs have: those of `a`, and those of `b`."""
    keys = a.leaves.keys() & b.leaves.keys()
    return {key: a.leaves[key] for key in keys}, {key: b.leaves[key] for key in keys}


def other_ways(folder: Path) -> list[Run]:
    """Two runs with more samples or more documents, each under another schedule."""
    return [
        sampled(folder / "more", "limit=2", "task.repeats=3", "engine.max_num_seqs=2"),
        sampled(folder / "longer", "limit=3", "task.repeats=2", "engine.enable_prefix_caching=false"),
    ]


def test_a_sample_is_the_same_however_many_there_are(tmp_path: Path) -> None:
    run = sampled(tmp_path / "one", "limit=2", "task.repeats=2", "engine.max_num_seqs=1")
    assert {record.key[1:] for record in run.records} == {(doc, 0, repeat) for doc in (0, 1) for repeat in (0, 1)}
    assert len({record.text for record in run.records if record.doc_id == 0}) == 2, "noise of their own"
    for other_run in other_ways(tmp_path):
        leaves, other_leaves = common(run, other_run)
        assert len(leaves) == 4 and leaves == other_leaves


def test_noise_by_place_in_the_run_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails if the noise is keyed by a request's place in the run."""
    build = RequestBuilder.build

    def by_place(self: RequestBuilder, *given: Any) -> list[HarnessRequest]:
        return [
            replace(item, request=replace(item.request, params=replace(item.request.params, noise_key=f"{number}")))  # type: ignore[union-attr, call-arg]
            for number, item in enumerate(build(self, *given))
        ]

    monkeypatch.setattr(RequestBuilder, "build", by_place)
    run = sampled(tmp_path / "one", "limit=2", "task.repeats=2", "engine.max_num_seqs=1")
    other_run, _ = other_ways(tmp_path)
    leaves, other_leaves = common(run, other_run)
    assert leaves != other_leaves


def test_metrics_samples_and_page(tmp_path: Path) -> None:
    """Repeats give pass@k, maj@k and avg@k, one sample row with all answers, and a place for each on the page."""
    run = sampled(tmp_path, "limit=2", "task.repeats=4", "task.pass_at=[1,2]")
    values = run.results["arithmetic"]
    names = [key.split(",")[0] for key in values if "," in key and "_stderr" not in key]
    assert names == ["exact_match", "pass@1", "pass@2", "pass@4", "maj@4", "avg@4"]
    assert values["pass@1,strict-match"] == values["avg@4,strict-match"] <= values["pass@4,strict-match"]
    (sample, _) = run.samples("arithmetic")
    assert len(sample["arguments"]) == 1 and len(sample["resps"][0]) == 4 == len(sample["filtered_resps"])
    items = load_run_data(run.folder).documents["arithmetic", 0]
    assert [item.repeat for item in items] == [0, 1, 2, 3], "the page's panel shows each"
    assert sample["resps"][0] == [record.text for record in run.records if record.doc_id == 0]
    compared = call("compare", str(run.folder), str(run.folder))
    assert compared.code == 0 and "IDENTICAL" in compared.out, compared.err
    fewer_samples = sampled(tmp_path / "other", "limit=2", "task.repeats=2")
    mixed = call("compare", str(run.folder), str(fewer_samples.folder), "--allow", "all")
    assert mixed.code in (1, 2) and "Traceback" not in mixed.err


def test_an_interrupted_run_keeps_the_samples_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("limit=2", "task.repeats=3", "engine.max_num_seqs=2")
    whole = sampled(tmp_path / "whole", *settings)
    with monkeypatch.context() as patch:
        after_entries(patch, 4, interrupt)
        assert call(f"output_dir={tmp_path}/cut", "engine.device=cpu", *HOT, *settings).code != 0
    (cut,) = runs(tmp_path / "cut")
    kept_keys = [json.loads(line)["key"] for line in (cut.folder / "journal.jsonl").read_text().splitlines()]
    assert len(kept_keys) == 4 and len({key[3] for key in kept_keys}) > 1
    done = call(f"output_dir={tmp_path}/cut", "engine.device=cpu", *over(HOT, *settings, "progress=true"))
    assert done.code == 0 and "4 of them answered by the interrupted run" in done.out, done.err
    kept_words = f"4 of {len(whole.records)} requests were answered by the interrupted run"
    assert f"resuming {cut.folder}: {kept_words}" in done.err
    assert cut.digest == whole.digest
