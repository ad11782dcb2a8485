"""The comparison of models as numbers for other programs: CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from typing import Any

from evalengine.report.compare.as_json import run_json
from evalengine.report.leaderboard.board import Contest, PairTest
from evalengine.report.leaderboard.compose import Board
from evalengine.report.leaderboard.sheets import verdict

FORMAT, VERSION = "evalengine.models", 1  # the version rises when a name below changes its meaning or goes
COLUMNS = (
    *("row", "group", "task", "metric", "filter", "mean", "model", "against", "value", "ci_low", "ci_high", "rank"),
    *("rank_best", "rank_worst", "documents", "wins", "losses", "ties", "p", "p_holm"),
)


def comma_separated(found: Board) -> str:
    """One table of numbers as they are, shares of 1 and p-values unrounded. `row` says what a line is: `score` (a
    model's value), `part` (of a group, untested) or `test` (`model` against `against`, value = their difference)."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for one in found.tested:
        writer.writerows(_scores(found, one, "score"))
        writer.writerows(_csv_test(found, one, test) for test in one.tests)
    for group in found.groups:
        for part in (*group.parts, *group.whole):
            writer.writerows({**row, "group": _plain(group.name)} for row in _scores(found, part, "part"))
    return out.getvalue()


def board_json(found: Board) -> dict[str, Any]:
    """Everything, with names that stay. What is not finite is null."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "verdict": verdict(found),
        "models": [
            {"model": name, "step": found.steps[n] if found.steps else None, **run_json(run)}
            for n, (run, name) in enumerate(zip(found.runs, found.names, strict=True))
        ],
        "metrics": [_contest_json(found, one) for one in found.contests],
        "groups": [
            {
                "name": one.name,
                "parts": [_contest_json(found, part) for part in one.parts],
                "means": [_contest_json(found, mean) for mean in (*one.means, *one.whole)],
            }
            for one in found.groups
        ],
        "tests": found.family,
        "significant": found.significant,
        "notes": found.notes,
    }


def _plain(text: str) -> str:
    """A name for a spreadsheet, which takes what begins like a formula for one."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _scores(found: Board, one: Contest, row: str) -> Iterator[dict[str, Any]]:
    for name, score in zip(found.names, one.scores, strict=True):
        if score is None:
            continue
        low, high = score.interval or ("", "")
        best, worst = score.ranks or ("", "")
        yield {
            **_key(one),
            "row": row,
            "model": _plain(name),
            "value": score.value,
            "ci_low": low,
            "ci_high": high,
            "rank": score.rank or "",
            "rank_best": best,
            "rank_worst": worst,
            "documents": one.documents,
        }


def _csv_test(found: Board, one: Contest, test: PairTest) -> dict[str, Any]:
    p = test.result
    return {
        **_key(one),
        "row": "test",
        "model": _plain(found.names[test.b - 1]),
        "against": _plain(found.names[test.a - 1]),
        "value": p.difference,
        "ci_low": p.ci_low,
        "ci_high": p.ci_high,
        "documents": p.n,
        "wins": p.wins,
        "losses": p.losses,
        "ties": p.ties,
        "p": p.p_value,
        "p_holm": test.p_adjusted,
        **({"metric": f"{one.key[1]} (nats a document)"} if test.nats else {}),
    }


def _key(one: Contest) -> dict[str, str]:
    return {**dict(zip(("task", "metric", "filter"), map(_plain, one.key), strict=True)), "mean": one.mean}


def _contest_json(found: Board, one: Contest) -> dict[str, Any]:
    return {
        **dict(zip(("task", "metric", "filter"), one.key, strict=True)),
        "mean": one.mean or None,
        "higher_is_better": one.higher_is_better,
        "documents": one.documents,
        "scores": [
            None
            if score is None
            else {
                "model": name,
                "value": score.value if math.isfinite(score.value) else None,
                "interval": None if score.interval is None else list(score.interval),
                "rank": score.rank,
                "ranks": None if score.ranks is None else list(score.ranks),
            }
            for name, score in zip(found.names, one.scores, strict=True)
        ],
        "tests": [
            {
                "a": found.names[test.a - 1],
                "b": found.names[test.b - 1],
                "p_holm": test.p_adjusted,
                "significant": test.significant,
                "nats": test.nats,
                **test.result.to_json(),
            }
            for test in one.tests
        ],
    }
