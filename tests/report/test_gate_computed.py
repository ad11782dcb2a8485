"""The gate judges what this code computed and how it scores it: no cached answers, no other scores of equal ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.errors import ConfigError
from evalengine.records.manifest_data import Manifest
from evalengine.report.compare.unchecked import unchecked
from evalengine.report.gate.made_run import made_run
from tests.report.gate_runs import RIGHT, judge, make_run


@pytest.mark.parametrize("policy", ["bitwise", "tokens"])
def test_equal_answers_that_are_scored_otherwise_fail(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest tells of a broken scorer: the same answers must have the same scores and totals."""
    a, broken = make_run({"sums": RIGHT, "tales": RIGHT}), make_run({"sums": [0.0] * 100, "tales": RIGHT})
    report = judge(monkeypatch, a, broken, policy)
    failed = [check for check in report.checks if check.status == "fail"]
    assert report.verdict == "fail" and {check.task for check in failed} == {"sums"}
    assert "documents with equal answers have another score: the scorer changed" in failed[0].message
    assert failed[0].details[0].startswith("document ")
    totals = {key: (value / 2, stderr) for key, (value, stderr) in a.results.items()}
    report = judge(monkeypatch, replace(a, scores={}), replace(a, scores={}, results=totals), policy)
    assert report.verdict == "fail" and "the aggregation changed" in report.checks[-1].message


@pytest.mark.parametrize("word", ["cache=kept", "cache.path=kept", "output_dir=x"])
def test_a_gate_that_makes_its_run_takes_no_cache(word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word), made_run([word], tmp_path):
        pass


@pytest.mark.parametrize("policy", ["bitwise", "tokens", "accuracy"])
def test_answers_of_a_cache_are_not_judged(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier code computed them, so that they would hide what this code computes."""
    a = make_run({"sums": RIGHT})
    use = {"hits": 100, "audited": 0, "corrupt": 0, "failed": None}
    report = judge(monkeypatch, a, replace(a, manifest=Manifest({"cache": use})), policy)
    assert report.exit_code == 2 and "100 of its answers were read from a cache" in report.problems[0]
    audited = replace(a, manifest=Manifest({"cache": {**use, "audited": 100}}))
    assert judge(monkeypatch, a, audited, policy).exit_code != 2, "all of them were computed again"
    assert any("100 of its 100 answers" in note for note in unchecked(a, replace(a, manifest=Manifest({"cache": use}))))
