"""Cohen's kappa beside exact fractions and scikit-learn's values, and how often its interval holds the truth."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from evalengine.records.manifest_data import Manifest
from evalengine.report.stats.kappa import Table, judge_lines, kappa

# sklearn.metrics.cohen_kappa_score of these documents: (table, kappa, kappa with weights="quadratic").
KNOWN = (
    ([[20, 5], [10, 15]], 0.4, 0.4),
    ([[9, 3, 0], [2, 11, 4], [1, 2, 8]], 0.5437262357414447, 0.6808510638297872),
    ([[1, 0, 0], [0, 0, 5], [0, 7, 0]], -0.5918367346938775, -0.16417910447761197),
)


def by_fractions(table: Table, quadratic: bool) -> float:
    """1 less the share of the disagreement that chance alone would give, counted document pair by document pair."""
    size, count = len(table), sum(map(sum, table))
    cost = [[Fraction((i - j) ** 2) if quadratic else Fraction(i != j) for j in range(size)] for i in range(size)]
    seen = sum(cost[i][j] * table[i][j] for i in range(size) for j in range(size)) / Fraction(count)
    given = [i for i in range(size) for j in range(size) for _ in range(table[i][j])]
    said = [j for i in range(size) for j in range(size) for _ in range(table[i][j])]
    chance = sum(cost[i][j] for i in given for j in said) / Fraction(count * count)
    return float(1 - seen / chance)


@pytest.mark.parametrize(("table", "plain", "weighted"), KNOWN)
def test_kappa_is_scikit_learns(table: Table, plain: float, weighted: float) -> None:
    for quadratic, known in ((False, plain), (True, weighted)):
        found = kappa(table, quadratic)
        assert found is not None and found[0] == pytest.approx(known, abs=1e-12)
        assert found[0] == pytest.approx(by_fractions(table, quadratic), abs=1e-14)
        assert found[1] < found[0] < found[2]


def test_perfect_agreement_is_one_with_a_width() -> None:
    value, low, high = kappa([[5, 0, 0], [0, 7, 0], [0, 0, 3]]) or (0, 0, 0)
    assert (value, high) == (1.0, 1.0) and 0.6 < low < 0.8


@pytest.mark.parametrize("table", [[[0, 0], [0, 0]], [[9, 0], [0, 0]]])
def test_it_is_not_defined_without_documents_or_with_one_label(table: Table) -> None:
    assert kappa(table) is None


@pytest.mark.parametrize("truth", [0.0, 0.4, 0.8, 0.95])
@pytest.mark.parametrize(("count", "least"), [(20, 0.88), (50, 0.92), (200, 0.93)])
def test_the_interval_holds_the_truth_as_often_as_it_says(truth: float, count: int, least: float) -> None:
    """Two raters who agree on a share `truth` of the documents and are independent on the rest: kappa is `truth`."""
    rng = np.random.default_rng([count, int(100 * truth)])
    for margins in ([0.5, 0.5], [0.85, 0.15], [0.5, 0.3, 0.2]):
        shares = np.array(margins)
        cells = truth * np.diag(shares) + (1 - truth) * np.outer(shares, shares)
        tables = rng.multinomial(count, cells.ravel(), size=800).reshape(-1, len(shares), len(shares))
        found = [kappa(table.tolist()) for table in tables]
        held = [one is None or one[1] <= truth <= one[2] for one in found]
        assert np.mean(held) >= least, (margins, np.mean(held))


def test_an_interval_that_is_too_narrow_would_be_found() -> None:
    """Cohen's own error without Wilson's correction misses nearly half of the time where raters mostly agree."""
    rng, truth, count = np.random.default_rng(0), 0.95, 20
    tables = rng.multinomial(count, (truth * np.eye(2) / 2 + (1 - truth) / 4).ravel(), size=800).reshape(-1, 2, 2)
    held = []
    for table in tables:
        observed = np.trace(table) / count
        chance = float(table.sum(0) @ table.sum(1)) / count**2
        error = 1.96 * (observed * (1 - observed) / count) ** 0.5
        held.append(abs(observed - (truth + (1 - truth) * chance)) <= error)
    assert np.mean(held) < 0.7


def manifest(**said: object) -> Manifest:
    return Manifest({"judge": {"run": "judge/x", "digest": "ab" * 32, "model": "m", "tasks": {"t": said}}})


def test_what_a_reader_must_know_of_the_verdicts_is_said() -> None:
    agreement = {"labels": ["1", "2", "3"], "ordered": True, "table": KNOWN[1][0]}
    lines = [*judge_lines(manifest(verdicts=40, flipped=10, unread=2, agreement=agreement))]
    assert lines[0] == "judged by m: judge/x (digest abababababababab...)"
    assert "10 of 40 pairs (25.0 %)" in lines[1] and "count as ties" in lines[1]
    assert "2 of 40 verdicts hold no label" in lines[2]
    assert "with 40 given labels 0.544 (95 %: " in lines[3] and "quadratic weights 0.681" in lines[3]


def test_a_table_that_no_run_wrote_is_left_out() -> None:
    torn = {"labels": ["a", "b"], "ordered": False, "table": [[1], [2, 3]]}
    assert len([*judge_lines(manifest(verdicts=3, agreement=torn))]) == 1
    assert [*judge_lines(Manifest({}))] == []
