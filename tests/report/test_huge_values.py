"""Metrics whose sums or squares are beyond float64: every view ends in a number or none, never in an exception."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.compare import compare, compared
from evalengine.report.compare.matrix import matrix, matrix_report
from evalengine.report.compare.report import report as lines_of
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.html.index_page import write_index
from evalengine.report.html.matrix_page import matrix_page
from evalengine.report.html.parts import sheet_table
from evalengine.report.html.run_page import run_page
from evalengine.report.leaderboard.compose import board
from evalengine.report.leaderboard.formats import board_json, board_lines
from evalengine.report.leaderboard.history import history_picture
from evalengine.report.leaderboard.page import leaderboard_page
from evalengine.report.numbers import exact_sum, mean
from evalengine.report.read.baseline import load_baseline, write_baseline
from evalengine.report.read.load import load_run, load_run_data
from evalengine.report.stats.metric_interval import metric_interval, reported_interval
from evalengine.util.sheet import Interval, Sheet
from tests.report.gate_runs import judge, make_run
from tests.report.grouped_run import write_grouped
from tests.report.model_runs import model, rolling
from tests.report.written_run import Doc, write_generations

HUGE = (
    [1e308, 1e308, 1.0, 0.0],
    [1e308, -1e308, 1e308, 1e308],
    [-1e308] * 4,
    [1e200, 0.0, 1.0, 1.0],
    [1e120, 0.0, 1.0, 1.0],
    [math.inf, 1e308, 1e308, -math.inf],
)
each_huge = pytest.mark.parametrize("scores", HUGE)


def test_sums_and_means_that_overflow() -> None:
    assert exact_sum([1e308, 1e308]) == math.inf and exact_sum([1e308, 1e308, -1e308]) == 1e308
    assert mean([1e308, 1e308]) == 1e308 and mean([-1e308] * 3) == -1e308
    assert math.isnan(mean([1e308, 1e308, math.inf, -math.inf]))


@each_huge
@pytest.mark.parametrize("other", [[1.0, 0.0, 1.0, 0.0], [1e308, 1.0, -1e308, 0.0]])
def test_comparisons(scores: Sequence[float], other: Sequence[float]) -> None:
    a, b = model("a", {"t": scores, "u": other}), model("b", {"t": other, "u": scores})
    a, b = (replace(run, groups={"g": ["t", "u"]}) for run in (a, b))
    for run in (a, b):
        run.results["g", "acc", "none"] = (mean([x for own in run.scores.values() for x in own.values()]), None)
    comparison = compared(a, b, True)
    assert [*lines_of(comparison)] and comparison_json(comparison) and comparison_page(comparison).render()
    models = board([a, b])
    assert [*board_lines(models)] and board_json(models) and leaderboard_page(models).render()
    usual = [model(name, {"t": [1.0, 0.0, 1.0, 2.0], "u": [0.0, 1.0, 3.0, 1.0]}) for name in "cd"]
    assert history_picture(board([a, *usual, b]))
    of_three = matrix([a, b, a], True)
    assert [*matrix_report(of_three)] and matrix_page(of_three).render()


@each_huge
def test_log_likelihoods(scores: Sequence[float]) -> None:
    a, b = rolling("a", [scores, [-1.0], [-2.0]], 3.0), rolling("b", [[-1.0] * 4, scores[:1], scores[:1]], 3.0)
    assert [*lines_of(compare(a, b))] and [*board_lines(board([a, b]))]
    weighted = {key: {doc: (value, 1e308) for doc, value in enumerate(scores)} for key in a.results}
    assert [*lines_of(compare(replace(a, weighted=weighted), replace(b, weighted=weighted)))]


@each_huge
@pytest.mark.parametrize("policy", ["accuracy", "bitwise"])
def test_gates(monkeypatch: pytest.MonkeyPatch, scores: Sequence[float], policy: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("accuracy: {max_regression_percent: 1}\n" if policy == "accuracy" else "bitwise: true\n")
    for a, b in (([1.0, 0.0, 1.0, 0.0], scores), (scores, scores), (scores, [1.0, 0.0, 1.0, 0.0])):
        assert (
            judge(monkeypatch, make_run({"t": a}), make_run({"t": b}, total=-2.0), str(file)).verdict != "pass"
            or a == b
        )


@each_huge
def test_folders_and_their_pages(tmp_path: Path, scores: Sequence[float]) -> None:
    docs = [Doc(f"is {n}", score=value, finish="length" if n % 2 else "stop") for n, value in enumerate(scores)]
    folder = write_generations(tmp_path / "results" / "run", docs)
    assert run_page(load_run_data(folder)).render()
    write_baseline(load_run(folder), tmp_path / "base.json")
    assert load_baseline(tmp_path / "base.json").scores
    assert write_index(tmp_path / "results")[1] == 1
    grouped = load_run(write_grouped(tmp_path / "g" / "run", {"t": scores, "u": [1.0, 0.0]}, {"g": ["t", "u"]}))
    for key in grouped.results:
        metric_interval(grouped, key)


def test_intervals_are_drawn_within_bounds() -> None:
    cells = [Interval("a", (1e308, -1.7e308, 1.7e308)), Interval("b", (0.5, 0.25, 0.75)), "none"]
    drawn = [row[0] for row in sheet_table(Sheet("", ("95 % interval",), [[cell] for cell in cells]))["rows"]]
    assert drawn[0] is drawn[2] is None and isinstance(drawn[1], dict) and max(map(abs, drawn[1]["bounds"])) < 1


def test_reported_intervals() -> None:
    for value, stderr in ((1e308, 1e308), (0.5, 1e308), (1e308, 0.1), (0.5, 1e200)):
        bounds = reported_interval(value, stderr, 10)
        assert bounds is None or all(map(math.isfinite, bounds))
