"""Flips of the schedule alone, beside those of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.report.gate import gate as gate_module
from evalengine.report.gate.gate import gate
from evalengine.report.gate.report import Report
from evalengine.report.read.run import Run
from tests.report.gate_runs import METRIC, make_run


def flipped(*documents: int, numerics: str = "fast", total: float = -1.6) -> Run:
    return make_run({"t": [float(doc not in documents) for doc in range(400)]}, total=total, numerics=numerics)


def judged(monkeypatch: pytest.MonkeyPatch, b: Run, noise: Run, a: Run | None = None) -> Report:
    runs = {"a": a or flipped(total=-1.5), "b": b, "noise": noise}
    monkeypatch.setattr(gate_module, "load_run", runs.__getitem__)
    return gate("a", "b", "accuracy", noise="noise")


def elsewhere(run: Run) -> Run:
    return replace(run, source=Path("noise.json"))


def test_flips_are_held_to_those_of_another_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = elsewhere(flipped(*range(6)))
    (same,) = judged(monkeypatch, flipped(*range(3, 9)), noise).checks
    assert (
        "; 6 scores flip, 6 with another schedule of the baseline (one-sided p of no more flips than that: 0.66)"
        in (same.message)
    )
    assert same.brief.endswith("(one-sided p of no more flips than that: 0.66)"), "a line of the terminal has it, too"
    (more,) = judged(monkeypatch, flipped(*range(14)), noise).checks
    assert "14 scores flip, 6 with another" in more.message and "p of no more flips than that: 0.0039)" in more.message


def test_another_configuration_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for noise in (flipped(numerics="exact"), make_run({"t": [1.0] * 400}, numerics="fast", seed=7)):
        report = judged(monkeypatch, flipped(1), elsewhere(noise))
        assert report.exit_code == 2 and "must be a run of the baseline's configuration" in report.problems[0]


def test_the_baseline_is_no_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged(monkeypatch, flipped(1), flipped(total=-1.5))
    assert report.exit_code == 2 and "is the baseline itself" in report.problems[0]


def test_the_flips_of_a_group_are_those_of_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_group(run: Run) -> Run:
        ((_, scores),) = run.scores.items()
        value = sum(scores.values()) / len(scores), None
        return replace(run, groups={"g": ["t"]}, results={**run.results, ("g", *METRIC): value},
                       higher_is_better={**run.higher_is_better, ("g", *METRIC): True})  # fmt: skip

    runs = [of_group(run) for run in (flipped(*range(3, 9)), elsewhere(flipped(*range(6))), flipped(total=-1.5))]
    report = judged(monkeypatch, *runs)
    (group,) = (check for check in report.checks if check.task == "g")
    assert "6 scores flip, 6 with another schedule" in group.brief


def test_log_likelihoods_do_not_flip(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_perplexity(run: Run, shift: float) -> Run:
        key = ("lambada", "perplexity", "none")
        scores = {doc: -1 - doc / 100 - shift for doc in range(50)}
        value = math.exp(-sum(scores.values()) / 50), None
        return replace(run, scores={**run.scores, key: scores}, results={**run.results, key: value},
                       higher_is_better={**run.higher_is_better, key: False})  # fmt: skip

    a, b, noise = flipped(total=-1.5), flipped(*range(6)), elsewhere(flipped(*range(3)))
    runs = [with_perplexity(run, shift) for run, shift in ((b, 1e-4), (noise, 2e-4), (a, 0.0))]
    lambada, answers = judged(monkeypatch, *runs).checks
    assert lambada.task == "lambada" and "flip" not in lambada.message
    assert "6 scores flip, 3 with another schedule" in answers.message
