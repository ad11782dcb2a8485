"""The gate judges what this code computed and how it scores it: no cached answers, no other scores of equal ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalengine.errors import ConfigError
from evalengine.records.manifest_data import Manifest
from evalengine.report.compare.comparability import unchecked
from evalengine.report.gate.gate import made_run
from evalengine.report.gate.policies import parse_policy
from evalengine.report.gate.report import Check
from evalengine.report.gate.rules import evaluate
from evalengine.report.read.run import Run
from tests.report.gate_runs import METRIC, RIGHT, judge, make_run


def checks(rule: dict[str, Any], a: Run, b: Run) -> list[Check]:
    return evaluate(parse_policy(rule, "test").rule, a, b)


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


@pytest.mark.parametrize("word", ["cache=kept", "cache.path=kept", "output_dir=x", "sequential.seed=1", "-m"])
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


def right(count: int, total: float = -1.5, **tasks: list[float]) -> Run:
    """A run with so many right answers of 200."""
    return make_run({"sums": [1.0] * count + [0.0] * (200 - count), **tasks}, total=total)


def test_equal_bits_pass_a_margin_that_as_many_documents_could_not_show() -> None:
    """200 documents with equal scores exclude a loss of 1.6 points at best; equal bits are the stronger evidence."""
    margin = {"accuracy": {"margin": 1.0}}
    a, moved = right(150), right(150, total=-1.6)
    assert [checks(margin, a, b)[0].status for b in (a, moved)] == ["pass", "undecided"]
    check = checks(margin, a, a)[0]
    assert check.message.startswith("equal bits, so nothing changed on these documents: 0.7500 -> 0.7500")
    (rescored,) = checks(margin, a, right(149))
    assert rescored.status == "undecided", "equal answers with another score are no equal bits"
    one_of_two = checks(margin, right(150, other=RIGHT), right(150, other=[0.0] * 9 + RIGHT[9:]))
    assert [check.status for check in one_of_two] == ["fail", "pass"]
    assert "after Holm over 2 metrics" in one_of_two[0].message


def test_answers_that_changed_without_a_score_are_counted() -> None:
    a, b = (make_run({"sums": RIGHT}, total=total) for total in (-1.5, -1.6))
    others = replace(b, answers={("sums", METRIC[1]): dict.fromkeys(range(100), "other")})
    margin = {"accuracy": {"margin": 9.0}}
    assert "0 better, 0 worse of 100 documents, 100 answers changed" in checks(margin, a, others)[0].message
    assert "documents, 0 answers changed" in checks(margin, a, b)[0].message
