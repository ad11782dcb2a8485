"""`python -m evalengine plan task=gsm8k margin=1`: how many documents a gate needs, before a run is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from rich.console import Console

from evalengine.cli.paces import Pace, pace
from evalengine.config.shipped import available, outline
from evalengine.errors import ConfigError
from evalengine.report.read.load import RunData, load_run_data
from evalengine.report.read.names import RESULTS, named_runs
from evalengine.report.stats.loss_bound import documents_for
from evalengine.report.stats.measured import Flips, flips, sampled, spreads
from evalengine.report.terminal.tables import print_lines
from evalengine.util.command import Namespace
from evalengine.util.sheet import Line, Sheet

FLIPS = (0.0, 0.005, 0.02, 0.05, 0.1)  # shares of changed answers for which the need is said
SAMPLES = (1, 2, 4, 8, 16)  # samples a document for which it is said, where runs tell of any
LEVELS = {"margin": None, "flips": None, "alpha": 0.05, "power": 0.8}


@dataclass(frozen=True)
class Target:
    """What a gate is to show. Shares of 1."""

    margin: float
    flips: tuple[float, ...]  # empty: those that runs show, or else `FLIPS`
    alpha: float
    power: float

    def documents(self, variance: float) -> int:
        """The documents that it needs, if a document's difference without a loss has this variance: of right or wrong,
        the share that flips."""
        return documents_for(self.margin, variance, self.alpha, self.power)


@dataclass(frozen=True)
class Planned:
    """One of the chosen tasks or groups."""

    name: str
    tasks: tuple[str, ...]
    rows: int | None  # documents

    @property
    def label(self) -> str:
        return self.name if len(self.tasks) == 1 else f"{self.name} ({len(self.tasks)} tasks)"


def main(arguments: Namespace) -> int:
    """Runs `plan` with its words; returns the exit code. Raises ConfigError for bad usage, and for bad runs."""
    names, runs, required = _parsed(arguments.words)
    loaded = [load_run_data(run) for run in named_runs(runs)]
    console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    lines: list[Line] = [f"A margin of {100 * required.margin:g} points: documents for a pass with probability "
                         f"{required.power:g}, if nothing is lost (alpha {required.alpha:g})"]  # fmt: skip
    planned = [_planned(name) for name in names]
    seen = {one.name: flips([run.run for run in loaded], one.tasks) for one in planned}
    paces = {one.name: pace(one.name, RESULTS) for one in planned}
    lines.append(_table(planned, required, seen, paces))
    lines += [line for one in planned for line in _said(one, required, seen[one.name], paces[one.name], loaded)]
    lines.append("Flips: the share of answers that change for better or worse, as many of each. Exact and native runs "
                 "of equal weights have none; two checkpoints often 2 to 10 %.")  # fmt: skip
    print_lines(lines, console)
    return 0


def _said(
    one: Planned, required: Target, seen: Flips | None, took: Pace | None, runs: Sequence[RunData]
) -> Iterator[str]:
    """What is known of a task besides the table: where its figures are from, and what would need fewer documents."""
    if took is not None:
        yield f"{one.name}: time by {took.source}: {took.seconds:.3g} s a document, without loading"
    if seen is not None:
        pairs = "a pair" if seen.pairs == 1 else f"{seen.pairs} pairs"
        between = "fast runs of one configuration, by the schedule alone" if seen.schedule else "the runs"
        yield (
            f"{one.name}: flips measured: {seen.flipped} of {seen.documents} scores over {pairs} of {between} "
            f"(at most {100 * seen.most:.2g} % at 95 %)"
        )
    for data in runs:
        for (task, metric, _), (count, parts) in sampled(data.run, one.tasks).items():
            needs = ", ".join(f"{required.documents(2 * parts.within / k):,} ({k})" for k in SAMPLES)
            yield (
                f"{task} {metric}, {data.run.name}: a variance of {parts.between:.3g} between documents and of "
                f"{parts.within:.3g} within ({count} samples each). Runs of one model differ by that alone, which "
                f"k samples divide by k: documents needed (samples each): {needs}"
            )
    for task in one.tasks:
        apart = [found for a, b in combinations(runs, 2) if (found := spreads(a, b, task)) is not None]
        if any(right for right, _ in apart):
            right, likely = (sum(pair[which] for pair in apart) / len(apart) for which in (0, 1))
            yield (
                f"{task}: these runs differ by {right:.3g} in right or wrong (mean square), by {likely:.3g} in the "
                f"right choice's probability: scored by that, {required.documents(likely):,} documents do in place of "
                f"{required.documents(right):,}, for a margin in points of probability"
            )


def _parsed(words: Sequence[str]) -> tuple[list[str], list[str], Target]:
    """The tasks, earlier runs, and what is required. Raises ConfigError with all problems."""
    values: dict[str, str] = {}
    problems = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in ("task", "runs", *LEVELS):
            words_known = "task=NAME, margin=POINTS, flips=2%, runs=RUN,RUN, alpha=0.05, power=0.8"
            problems.append(f"{word!r} is none of {words_known}")
        elif name in values:
            problems.append(f"{name} is given twice")
        values[name] = value
    numbers: dict[str, float | None] = {}
    for name, default in LEVELS.items():
        text = values.get(name)
        numbers[name] = default
        try:
            numbers[name] = default if text is None else float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            problems.append(f"{name}={text}: must be a number")
    tasks = [name for name in values.get("task", "").strip("[]").split(",") if name]
    problems += [f"task={name}: no task or group that is shipped; `python -m evalengine tasks` lists them"
                 for name in tasks if name not in available("task")]  # fmt: skip
    problems += [] if tasks else ["task=NAME is needed"]
    margin, share, alpha, power = (numbers[name] for name in ("margin", "flips", "alpha", "power"))
    if margin is None:
        problems.append("margin=POINTS is needed: margin=1 is one point, 0.75 to 0.74")
    elif not 0 < margin <= 100:
        problems.append(f"margin={margin:g}: must lie in (0, 100] points")
    if share is not None and not 0 <= share <= 1:
        problems.append(f"flips={share:g}: a share, 0.02 or 2%, of at most 1")
    assert alpha is not None and power is not None
    if not 0 < alpha <= 0.5 or not alpha < power < 1:
        problems.append(f"alpha={alpha:g} power={power:g}: alpha must lie in (0, 0.5], and power between it and 1")
    if problems:
        raise ConfigError([f"plan: {problem}" for problem in problems])
    assert margin is not None
    runs = [name for name in values.get("runs", "").strip("[]").split(",") if name]
    return tasks, runs, Target(margin / 100, () if share is None else (share,), alpha, power)


def _planned(name: str) -> Planned:
    """What `task=NAME` chooses; a group has the documents of its tasks together."""
    rows = {task: settings.dataset.rows for task, settings in outline(name).tasks.items()}
    whole = [count for count in rows.values() if count is not None]
    return Planned(name, tuple(rows), sum(whole) if len(whole) == len(rows) else None)


def _table(
    planned: Sequence[Planned],
    required: Target,
    seen: Mapping[str, Flips | None],
    paces: Mapping[str, Pace | None],
) -> Sheet:
    rows = []
    for one in planned:
        measured, took = seen[one.name], paces[one.name]
        shares = required.flips or (FLIPS if measured is None else (measured.share,))
        for number, share in enumerate(shares):
            need = required.documents(share)
            first = [one.label, "?" if one.rows is None else f"{one.rows:,}"] if number == 0 else ["", ""]
            enough = "" if one.rows is None else "yes" if one.rows >= need else "no"
            time = "" if took is None or enough == "no" else _duration(took.seconds * need)
            rows.append([*first, f"{100 * share:.3g} %", f"{need:,}", enough, time])
    return Sheet("Documents", ("Task", "Has", "Flips", "Needs", "Enough", "Time"), rows, (0, 4))


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "< 1 s"
    return f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
