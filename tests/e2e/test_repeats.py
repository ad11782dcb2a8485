"""Runs that sample every document several times: what a sample is must hang on nothing but which one it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.harness.journal import Journal
from evalengine.harness.requests import HarnessRequest, RequestBuilder
from evalengine.records.schema import RecordKey
from evalengine.report.read.run_data import load_run_data
from tests.e2e.command import Run, call, finished, runs

HOT = ("progress=false", "task.generation.temperature=3", "task.generation.max_gen_toks=24", "seed=3")


def sampled(folder: Path, *settings: str) -> Run:
    return finished(folder, *HOT, *settings)


def common(a: Run, b: Run) -> tuple[dict[RecordKey, bytes], dict[RecordKey, bytes]]:
    """The leaves that both runs have."""
    keys = a.leaves.keys() & b.leaves.keys()
    return {key: a.leaves[key] for key in keys}, {key: b.leaves[key] for key in keys}


def other_ways(folder: Path) -> list[Run]:
    """More samples, more documents, and another schedule."""
    return [
        sampled(folder / "more", "limit=2", "task.repeats=3", "engine.max_num_seqs=2"),
        sampled(folder / "longer", "limit=3", "task.repeats=2", "engine.enable_prefix_caching=false"),
    ]


def test_a_sample_is_the_same_however_many_there_are(tmp_path: Path) -> None:
    one = sampled(tmp_path / "one", "limit=2", "task.repeats=2", "engine.max_num_seqs=1")
    assert {record.key[1:] for record in one.records} == {(doc, 0, repeat) for doc in (0, 1) for repeat in (0, 1)}
    assert len({record.text for record in one.records if record.doc_id == 0}) == 2, "noise of their own"
    for other in other_ways(tmp_path):
        mine, theirs = common(one, other)
        assert len(mine) == 4 and mine == theirs


def test_noise_by_place_in_the_run_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comparison, over a builder that keys the noise by the request's number: it must fail."""
    built = RequestBuilder.build

    def by_place(self: RequestBuilder, instances: Any) -> list[HarnessRequest]:
        return [
            replace(item, request=replace(item.request, params=replace(item.request.params, noise_key=f"{number}")))  # type: ignore[union-attr, call-arg]
            for number, item in enumerate(built(self, instances))
        ]

    monkeypatch.setattr(RequestBuilder, "build", by_place)
    one = sampled(tmp_path / "one", "limit=2", "task.repeats=2", "engine.max_num_seqs=1")
    more, _ = other_ways(tmp_path)
    mine, theirs = common(one, more)
    assert mine != theirs


def test_metrics_samples_and_page(tmp_path: Path) -> None:
    run = sampled(tmp_path, "limit=2", "task.repeats=4", "task.pass_at=[1,2]")
    values = run.results["arithmetic"]
    names = [key.split(",")[0] for key in values if "," in key and "_stderr" not in key]
    assert names == ["exact_match", "pass@1", "pass@2", "pass@4", "maj@4", "avg@4"]
    assert values["pass@1,strict-match"] == values["avg@4,strict-match"] <= values["pass@4,strict-match"]
    (first, _) = run.samples("arithmetic")
    assert len(first["arguments"]) == 1 and len(first["resps"][0]) == 4 == len(first["filtered_resps"])
    asked = load_run_data(run.folder).documents["arithmetic", 0]
    assert [item.repeat for item in asked] == [0, 1, 2, 3], "the page's panel shows each"
    assert first["resps"][0] == [record.text for record in run.records if record.doc_id == 0]
    compared = call("compare", str(run.folder), str(run.folder))
    assert compared.code == 0 and "IDENTICAL" in compared.out, compared.err
    again = sampled(tmp_path / "other", "limit=2", "task.repeats=2")
    both = call("compare", str(run.folder), str(again.folder), "--allow", "all")
    assert both.code in (1, 2) and "Traceback" not in both.err


def test_an_interrupted_run_keeps_the_samples_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("limit=2", "task.repeats=3", "engine.max_num_seqs=2")
    whole = sampled(tmp_path / "whole", *settings)
    append, written = Journal.append, 0

    def stop_after_four(self: Journal, entry: Any) -> None:
        nonlocal written
        append(self, entry)
        written += 1
        if written == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", stop_after_four)
    assert call(f"output_dir={tmp_path}/cut", "engine.device=cpu", *HOT, *settings).code != 0
    (cut,) = runs(tmp_path / "cut")
    kept = [json.loads(line)["key"] for line in (cut.folder / "journal.jsonl").read_text().splitlines()]
    assert len(kept) == 4 and len({key[3] for key in kept}) > 1
    monkeypatch.setattr(Journal, "append", append)
    done = call(f"output_dir={tmp_path}/cut", "engine.device=cpu", *HOT, *settings)
    assert done.code == 0 and "4 of them kept from the interrupted run" in done.out, done.err
    assert cut.digest == whole.digest
