"""`evalengine.compare` and `evalengine.gate`: the commands' comparisons and verdicts, for Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalengine.errors import ConfigError
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.comparability import are_models
from evalengine.report.compare.compare import LEVELS, Comparison, compared
from evalengine.report.compare.item_differences import KINDS
from evalengine.report.compare.report import report as comparison_lines
from evalengine.report.gate.gate import gate as judge
from evalengine.report.gate.report import Report, report_lines
from evalengine.report.leaderboard.compose import Board, board
from evalengine.report.leaderboard.formats import board_json, board_lines
from evalengine.report.leaderboard.sheets import verdict as board_verdict
from evalengine.report.python.results import Results, Shown, cut_values
from evalengine.report.read.load import load_run
from evalengine.report.read.run import Run
from evalengine.report.stats.paired import PairedResult
from evalengine.util.sheet import Line

if TYPE_CHECKING:
    from pandas import DataFrame

Named = str | Path | Results  # what stands for a run
DIFFERENCE = ("task", "doc_id", "request_index", "repeat", "what", "cause")  # columns of a request that differs


class Compared(Shown):
    """Two runs compared: `verdict` is IDENTICAL, SAME TOKENS or DIFFERENT, or for different models which is better."""

    def __init__(self, comparison: Comparison | Board, same: bool) -> None:
        self.comparison = comparison
        self.same = same  # whether the runs agree at the level that was asked for; False for different models

    @property
    def verdict(self) -> str:
        """One word for runs; a sentence for models."""
        return self.comparison.verdict if isinstance(self.comparison, Comparison) else board_verdict(self.comparison)

    def to_json(self) -> dict[str, Any]:
        """What `compare --json` writes, as plain values."""
        comparison = self.comparison
        return comparison_json(comparison) if isinstance(comparison, Comparison) else board_json(comparison)

    @cached_property
    def metrics(self) -> DataFrame:
        """A row per metric, or for models per metric and model; the values are in the metric's own units.

        `ci_low` and `ci_high`: 95 % interval, of the difference of two runs, or of a model's value. `cut` and
        `value_finished` as in a run's `metrics`, for two runs one of each (`cut_a`, `cut_b`).
        """
        rows = self.to_json()["metrics"]
        if isinstance(self.comparison, Comparison):
            return _frame(_of_pair(row, self.comparison) for row in rows)
        runs = self.comparison.runs
        scores = ((row, score, run) for row in rows for score, run in zip(row["scores"], runs, strict=True) if score)
        return _frame(_of_model(*one) for one in scores)

    @cached_property
    def differences(self) -> DataFrame:
        """A row per request that differs, with its cause and a boolean column for each kind of difference. Raises
        `ConfigError` for different models: they have none."""
        if not isinstance(self.comparison, Comparison):
            raise ConfigError("differences: these are different models, whose requests are not held side by side; "
                              "compare(a, b, allow=True) does that")  # fmt: skip
        rows = comparison_json(self.comparison)["differences"]
        told = ({**row, **{kind: kind in row["in"] for kind in KINDS}} for row in rows)
        frame = _frame(told, [*DIFFERENCE, *KINDS])
        return frame.astype({**dict.fromkeys(DIFFERENCE[1:4], "int64"), **dict.fromkeys(KINDS, "bool")})

    def _lines(self) -> Iterator[Line]:
        comparison = self.comparison
        yield from comparison_lines(comparison) if isinstance(comparison, Comparison) else board_lines(comparison)


class Gated(Shown):
    """A gate's judgement: `passed`, the `verdict` (pass, fail or inconclusive), and its `checks`.

    Of a folder of several runs the verdict is the worst of theirs, and `runs` has the judgement of each.
    """

    def __init__(self, report: Report) -> None:
        self.report = report

    @property
    def verdict(self) -> str:
        """pass, fail or inconclusive: some check could not see the loss that the policy names."""
        return self.report.verdict

    @property
    def passed(self) -> bool:
        """Whether the command's exit code would be 0."""
        return self.report.exit_code == 0

    @property
    def runs(self) -> list[Gated]:
        """The judgement of each run of a folder of several; [] where one run was judged."""
        return [Gated(report) for report in self.report.reports]

    @cached_property
    def checks(self) -> DataFrame:
        """A row per check: rule, task, name, status, message, details and cautions (one text each, a line for each),
        detects, ...; of several runs also `run`."""
        of_run = [{"run": one.run} if self.report.reports else {} for one in self.report.each]
        return _frame({**own, **vars(check), "details": "\n".join(check.details), "cautions": "\n".join(check.cautions)}
                      for own, one in zip(of_run, self.report.each, strict=True) for check in one.checks)  # fmt: skip

    def _lines(self) -> Iterator[Line]:
        yield from (line.plain for line in report_lines(self.report))


def compare(a: Named, b: Named, *, level: str | None = None, allow: bool = False) -> Compared:
    """Are two runs the same; if not, where, and why? Of different models: which is better?

    a, b: what `load_run` takes, or what it and `evaluate` return. level: what must be the same for `.same`: bitwise
    (default), tokens or answers. allow: unlike runs, different models too, on the requests that they share.

    Raises `ConfigError` for runs that cannot be read, are not comparable, or share no request.
    """
    problems = [] if level in (None, *LEVELS) else [f"level={level}: must be one of {', '.join(LEVELS)}"]
    runs = [run for run in (_collect(problems, named) for named in (a, b)) if run is not None]
    if problems:
        raise ConfigError(problems)
    if level is None and not allow and are_models(runs):
        return Compared(board(runs), same=False)
    comparison = compared(runs[0], runs[1], allow)
    return Compared(comparison, comparison.within(level or LEVELS[0]))  # type: ignore[arg-type]  # checked above


def gate(
    baseline: Named, run: Named, policy: str | Path = "bitwise", *, base: str | None = None, noise: Named | None = None
) -> Gated:
    """May this change be merged: is `run` as good as `baseline`, by a policy's name or file?

    run: also an experiment's folder, or one of several runs, of which each is judged on its own.
    base: a git revision that the baseline file is taken from. noise: a run of the baseline's configuration in fast mode
    under another schedule, with which the run's flips are compared.

    Raises `ConfigError` with all reasons where the gate cannot judge: a bad policy, runs that cannot be read or are
    not comparable.
    """
    report = judge(_place(baseline), _place(run), str(policy), base, None if noise is None else _place(noise))
    if report.verdict == "error":
        raise ConfigError([f"gate: {f'{one.run}: ' if report.reports else ''}{one.trouble}: {problem}"
                           for one in report.each for problem in one.problems])  # fmt: skip
    return Gated(report)


def _of_pair(row: dict[str, Any], c: Comparison) -> dict[str, Any]:
    """A metric's columns, of its JSON."""
    paired = row.pop("paired") or dict.fromkeys(field.name for field in fields(PairedResult))
    del row["cut"]
    paired["cautions"] = "; ".join(paired["cautions"] or ())
    return {**row, **paired, **_cut(row, c.a, "_a"), **_cut(row, c.b, "_b")}


def _of_model(row: dict[str, Any], score: dict[str, Any], run: Run) -> dict[str, Any]:
    """The columns of a model's value of a metric, of its JSON."""
    about = {name: row[name] for name in ("task", "metric", "filter", "documents")}
    for names, name in ((("ci_low", "ci_high"), "interval"), (("rank_best", "rank_worst"), "ranks")):
        score |= dict(zip(names, score.pop(name) or (None, None), strict=True))
    return {**about, **score, "cautions": "; ".join(score["cautions"]), **_cut(row, run)}


def _cut(row: dict[str, Any], run: Run, end: str = "") -> dict[str, float | None]:
    share, finished = cut_values(run, (row["task"], row["metric"], row["filter"]))
    return {f"cut{end}": share, f"value_finished{end}": finished}


def _place(named: Named) -> str | Path:
    return named.path if isinstance(named, Results) else named


def _collect(problems: list[str], named: Named) -> Any:
    """The run; None if it cannot be read, which is added to `problems`."""
    try:
        return named.run if isinstance(named, Results) else load_run(named)
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def _frame(rows: Iterator[Any] | Sequence[Any], columns: list[str] | None = None) -> DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows), columns=columns)
