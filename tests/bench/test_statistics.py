"""The simulations behind the statistics' claims: short and seeded here, whole in results/reference/statistics.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import statistics, statistics_cli
from benchmarks.__main__ import main
from benchmarks.figures import Figure
from benchmarks.statistics import figures
from benchmarks.statistics_cases import bonett_price_bound, gate_bound, passing
from evalengine.report.stats import significance as permutation
from evalengine.report.stats.loss_bound import loss_bound, stratum

REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "statistics.json"
ABOUT = {"command": "c", "code": {"commit": "abc", "dirty": False}, "python": "3", "scipy": "1", "numpy": "2",
         "draws": 60, "seed": 1, "seconds": 1.0}  # fmt: skip


@cache
def short() -> list[Figure]:
    """Every figure from few draws, with the fewest flips that a test makes (999, a tenth of the usual)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "FLIPS", 0)
        return list(figures(60, seed=1))


def test_every_claim_holds_in_a_short_run() -> None:
    assert [(f.what, f.case, f.share) for f in short() if f.holds is False] == []
    assert sum(f.holds is not None for f in short()) > 30


def test_a_seed_fixes_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "FLIPS", 0)
    figures_of_seed_1 = [next(figures(60, seed)) for seed in (1, 1)]
    assert figures_of_seed_1[0] == figures_of_seed_1[1] == short()[0]


def test_what_was_not_chosen_is_wrong_more_often() -> None:
    """A figure can fail: the tests without clusters, raw p-values and uncorrected bounds exceed their rate of error."""
    shown = [f for f in short() if f.holds is None]
    wrong = [f.share for f in shown if "clusters not known" in f.what and "McNemar" in f.what]
    assert len(wrong) == 3 and wrong[-1] > 0.3
    assert max(f.share for f in shown if f.what.startswith("Bonett")) > 0.08
    assert max(f.share for f in shown if "raw p" in f.what) > 0.3


def test_the_committed_figures_are_those_of_this_code_and_hold() -> None:
    content = json.loads(REFERENCE.read_text(encoding="utf-8"))
    lines: list[dict[str, Any]] = content["figures"]
    assert [(line["group"], line["what"], line["case"]) for line in lines] == [
        (f.group, f.what, f.case) for f in short()
    ]
    assert all(line["holds"] is not False for line in lines)
    counted = {(f.what, f.case): f.share for f in short() if f.draws is None}
    committed = {(line["what"], line["case"]): line["share"] for line in lines if line["draws"] is None}
    assert committed == pytest.approx(counted), "what is counted depends on no draw"


def test_a_claim_fails_beyond_chance() -> None:
    for share, draws, holds in ((0.05, 1000, True), (0.07, 1000, True), (0.08, 1000, False), (0.051, None, False)):
        assert Figure("g", "w", "c", share, draws, at_most=0.05).holds is holds, (share, draws)
    assert Figure("g", "w", "c", 0.9, 1000, 0.94).holds is False and Figure("g", "w", "c", 0.9, 1000).holds is None


def test_counting_agrees_with_enumeration() -> None:
    """The sum goes over every outcome of 12 documents, each lost with probability 0.3 and won with 0.1."""
    from math import comb

    expected = sum(
        comb(12, w) * comb(12 - w, x) * 0.1**w * 0.3**x * 0.6 ** (12 - w - x)
        for w in range(13)
        for x in range(13 - w)
        if bonett_price_bound(x, w, 12) <= 0.4
    )
    assert passing(bonett_price_bound, 12, 0.4, 0.3, 0.1) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("losses", "wins", "count"), [(0, 0, 50), (3, 1, 50), (20, 22, 400), (1, 0, 2)])
def test_the_counted_bound_is_the_gates(losses: int, wins: int, count: int) -> None:
    differences = np.array([1.0] * losses + [-1.0] * wins + [0.0] * (count - losses - wins))
    assert gate_bound(losses, wins, count) == pytest.approx(
        loss_bound([stratum(differences, np.arange(count))], 1.0, 0.05, 1.0).bound, rel=1e-12
    )


def test_the_command_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = Figure("g", "w", "c", 0.04, 100, at_most=0.05), Figure("g", "v", "c", 0.4, 100, at_most=0.05)
    for drawn, code in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr(statistics_cli, "figures", lambda draws, seed, drawn=drawn: iter(drawn))
        assert main(["statistics", "--draws", "100", "--output", str(tmp_path / "new")]) == code
    text = (tmp_path / "new" / "statistics.md").read_text(encoding="utf-8")
    assert "| w | c | 0.0400 ± 0.0588 | ≤ 0.05: holds |" in text and "≤ 0.05: DOES NOT HOLD" in text
    lines = json.loads((tmp_path / "new" / "statistics.json").read_text(encoding="utf-8"))["figures"]
    assert [line["holds"] for line in lines] == [True, False]
    assert "1 of 2 claims hold" in capsys.readouterr().out


def test_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Too few draws and unknown words exit with 2."""
    assert main(["statistics", "--draws", "0"]) == 2 and "--draws 0" in capsys.readouterr().err
    assert main(["statistics", "more"]) == 2


def test_the_table_groups_its_lines() -> None:
    text = statistics_cli.markdown(short()[:12], ABOUT)
    assert text.count("\n## ") == len({f.group for f in short()[:12]}) and statistics.ALPHA == 0.05
