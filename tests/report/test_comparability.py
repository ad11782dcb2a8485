"""Which runs may be compared, and the sentence for every reason why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.records.manifest_data import Manifest
from evalengine.report.compare.comparability import findings, incomparable, unchecked
from evalengine.report.read.baseline import write_baseline
from evalengine.report.read.load import load_run
from tests.report.compared_runs import BASE, IDENTITY, TASK, run
from tests.run_double import generated, write_run


def with_task(**settings: Any) -> dict[str, Any]:
    """An identity whose task has these settings."""
    return {"tasks": {TASK: {**IDENTITY["tasks"][TASK], **settings}}}


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"weights": "e" * 64}, "The model weights differ (weights is aaaaaaaaaaaa... in A and eeeeeeeeeeee... in B)"),
        ({"tokenizer": {"sha256": "e" * 64}}, "The tokenizers differ (tokenizer.sha256 is bbbbbbbbbbbb... in A and"),
        ({"model_spec": {"rope": {"theta": 2e4}}}, "(model_spec.rope.theta is 10000.0 in A and 20000.0 in B)"),
        ({"contract_version": 2}, "The numerics contracts differ (contract_version is 1 in A and 2 in B)"),
        (with_task(generation={"max_gen_toks": 9, "temperature": 0.0}), "tasks.sums.generation.max_gen_toks is 8 in A"),
        (with_task(version=2.0), "tasks.sums.version is 1.0 in A and 2.0 in B"),
        ({**with_task(generation={"max_gen_toks": 8, "temperature": 0.7}), "seed": 1}, "The seeds differ"),
        ({"invented_later": True}, "The settings differ (invented_later is none in A and true in B)"),
    ],
)
def test_unlike_runs_are_refused_by_name(identity: dict[str, Any], message: str) -> None:
    assert any(message in line for line in incomparable(run(BASE), run(BASE, **identity)))


@pytest.mark.parametrize(
    "identity",
    [
        {"numerics": "fast", "attention_backend": "sdpa"},
        {"numerics": "native", "gpu_architecture": "sm_90"},
        {"dtype": "float32"},
        {"engine": {"max_model_len": 64}},
        {"seed": 1},  # decoding is greedy: nothing is drawn
        {"apply_chat_template": True},  # the prompts are equal all the same
        with_task(num_fewshot=5),
        {"prompts": "e" * 64, "limit": 3},
    ],
)
def test_numerics_and_settings_without_effect_are_comparable(identity: dict[str, Any]) -> None:
    assert incomparable(run(BASE), run(BASE, **identity)) == []


def test_other_numerics_are_findings_not_refusals() -> None:
    assert [f.text for f in findings(run(BASE), run(BASE, dtype="float32"))] == [
        'dtype is "bfloat16" in A and "float32" in B'
    ]


def test_many_differing_settings_of_a_model_are_a_different_model() -> None:
    sizes = {f"size_{n}": 64 for n in range(15)}
    a, b = (run(BASE, model_spec=spec) for spec in (sizes, dict.fromkeys(sizes, 128)))
    (finding,) = findings(a, b)
    assert finding.text.startswith(
        "The models differ in more than their weights (15 settings: model_spec.size_0 is 64 in A"
    )
    assert finding.refused and finding.text.endswith("; model_spec.size_10 is 64 in A and 128 in B and 12 more)")
    names = {name for f in findings(a, run(BASE, weights="e" * 64, model_spec={})) for name in f.names}
    assert names == {"different model"}


def test_other_prompts_documents_and_task_sets_are_refused() -> None:
    a, shots = run(BASE), run(BASE, asks={1: [7]}, **with_task(num_fewshot=5))
    assert incomparable(a, shots) == [
        "sums: 1 of 3 prompts differ (the first is of doc 1): tasks.sums.num_fewshot is 0 in A and 5 in B"
    ]
    fewer = run({0: BASE[0]}, limit=1)
    assert incomparable(a, fewer) == ["sums: A has 3 requests, B 1, and they share 1 (limit is none in A and 1 in B)"]
    rows = replace(a, hashes={TASK: {**a.hashes[TASK], 2: ("other", *a.hashes[TASK][2][1:])}})
    assert incomparable(a, rows) == ["sums: 1 of 3 documents differ in content (first: doc 2)"]
    assert "Only A ran sums" in incomparable(a, replace(a, items={}, scores={}))


def test_a_different_limit_is_the_only_reason() -> None:
    """Without hashes of documents, as in a baseline, only the hash of all evaluated rows is known."""
    datasets = {"datasets": {TASK: {"sha256": "e" * 64, "fewshot_sha256": None}}}
    a, b = (replace(r, hashes={}) for r in (run(BASE), run({0: BASE[0]}, limit=1, **datasets)))
    assert incomparable(a, b) == ["sums: A has 3 requests, B 1, and they share 1 (limit is none in A and 1 in B)"]
    rows = "sums: the dataset's rows differ (sha256 is dddddddddddd... in A and eeeeeeeeeeee... in B)"
    same_requests = replace(run(BASE, limit=3, **datasets), hashes={})
    assert incomparable(a, same_requests) == [rows], "the limit cut nothing, so it cannot be why"
    same_limit = replace(run({0: BASE[0]}, **datasets), hashes={})
    assert rows in incomparable(a, same_limit)


def test_a_baseline_of_lm_evals_folder_is_still_lm_evals(tmp_path: Path) -> None:
    ours = run(BASE)
    settings = {"model_sha": "e" * 40, "tasks": {TASK: {"version": 1.0, "cls": None}}}
    folder = replace(ours, kind="lm-eval", digest=None, identity=settings, manifest=Manifest({}))
    kept = replace(folder, kind="baseline")
    assert incomparable(kept, ours) == incomparable(folder, ours) == []
    assert [f.text for f in findings(kept, ours)] == ["A was run by lm-eval and B by evalengine"]
    assert findings(kept, folder) == []
    notes = unchecked(kept, folder)
    assert notes[0].startswith("A is a baseline of an lm-eval folder") and not any("weights" in n for n in notes)
    file = tmp_path / "ours.json"
    write_baseline(load_run(write_run(tmp_path / "run", [generated(0)])), file)
    assert not load_run(file).by_lm_eval


def test_requests_that_no_hash_covers_are_named() -> None:
    """A baseline of evalengine's holds hashes of prompt ids, an lm-eval folder those of documents and texts."""
    ours = replace(run(BASE), kind="baseline", hashes={})
    foreign = replace(run(BASE), kind="lm-eval", digest=None)
    foreign = replace(foreign, items={key: replace(i, prompt_sha256="") for key, i in foreign.items.items()})
    note = "sums: no hashes of documents or prompts that both hold: equality was not checked"
    assert note in unchecked(ours, foreign) and note not in unchecked(run(BASE), foreign)
