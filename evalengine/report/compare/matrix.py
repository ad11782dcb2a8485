"""Many runs at once: the verdict of every pair, and which runs are the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from evalengine.records.differences import differing
from evalengine.records.manifest import resumed_fast
from evalengine.report.compare.comparability import incomparable, resumed_words
from evalengine.report.compare.compare import Comparison, Level, compare
from evalengine.report.compare.metric_tables import leading_metrics, metric_name, score_text
from evalengine.report.read.run import UNBOUND, Run
from evalengine.report.terminal.tables import bullets
from evalengine.util.sheet import Line, Sheet

Pair = tuple[int, int]  # numbers of runs, from 1, the smaller first
WORST = ("DIFFERENT", "SAME TOKENS", "IDENTICAL")
RESOLVED = ("stats", "num_kv_blocks", "num_threads")  # engine settings that the user does not choose


@dataclass(frozen=True, eq=False)
class Matrix:
    """Every pair of several runs: compared, or refused with the reasons."""

    runs: list[Run]
    pairs: dict[Pair, Comparison]
    refused: dict[Pair, list[str]]

    @property
    def verdict(self) -> str:
        """The worst verdict of a compared pair; qualified unless every pair was compared on all its requests."""
        verdicts = {comparison.verdict for comparison in self.pairs.values()}
        worst = next((verdict for verdict in WORST if verdict in verdicts), None)
        if worst is None:
            return "NOT COMPARABLE"
        return worst if self.whole or worst == "DIFFERENT" else f"{worst} where compared"

    @property
    def whole(self) -> bool:
        """Whether every pair was compared, and on every request of both."""
        return not self.refused and not any(comparison.partial for comparison in self.pairs.values())

    @property
    def identical(self) -> tuple[int, int]:
        """(identical pairs, pairs that are identical on the requests that they share but do not share all)."""
        partial = [comparison.partial for comparison in self.pairs.values() if comparison.verdict == "IDENTICAL"]
        return partial.count(False), partial.count(True)

    @property
    def unlike(self) -> dict[Pair, list[str]]:
        """The pairs that were compared although they are unlike, each with what is unlike."""
        return {pair: comparison.unlike for pair, comparison in sorted(self.pairs.items()) if comparison.unlike}

    def within(self, level: Level) -> bool:
        """Whether every pair agrees at this level."""
        return not self.refused and all(comparison.within(level) for comparison in self.pairs.values())

    def groups(self) -> list[tuple[str, list[int]]]:
        """(digest, numbers of the runs that have it), largest group first; runs without a digest are in none."""
        members: dict[str, list[int]] = {}
        for number, run in enumerate(self.runs, 1):
            if run.digest:
                members.setdefault(run.digest, []).append(number)
        return sorted(members.items(), key=lambda group: (-len(group[1]), group[1]))


def matrix(runs: Sequence[Run], allow: bool = False) -> Matrix:
    """Compares every pair; unlike runs are refused, or with `allow` compared on what they share."""
    pairs, refused = {}, {}
    for (i, a), (j, b) in combinations(enumerate(runs, 1), 2):
        why = incomparable(a, b)
        if not a.items.keys() & b.items.keys():
            refused[i, j] = why or ["They have no request in common"]
        elif why and not allow:
            refused[i, j] = why
        else:
            pairs[i, j] = compare(a, b)
    return Matrix(list(runs), pairs, refused)


def matrix_report(m: Matrix) -> Iterator[Line]:
    """Everything to print, in order; a string is one line."""
    yield runs_table(m.runs)
    yield matrix_table(m)
    yield from counts_note(m)
    for digest, members in m.groups():
        runs = ", ".join(map(str, members))
        yield f"{'Runs' if len(members) > 1 else 'Run'} {runs}: digest {digest[:12]}"
    yield from bullets("Runs that no command repeats, or whose files may have been edited", run_notes(m.runs))
    for (i, j), why in m.unlike.items():
        yield from bullets(f"Runs {i} (A) and {j} (B) were compared although they are unlike", why)
    for (i, j), why in sorted(m.refused.items()):
        yield from bullets(f"Runs {i} (A) and {j} (B) are not comparable", why)
    yield f"verdict: {m.verdict} ({evidence(m)})"


def counts_note(m: Matrix) -> Iterator[str]:
    """What the numbers in the matrix count, where there are any."""
    verdicts = {comparison.verdict for comparison in m.pairs.values()}
    if "SAME TOKENS" in verdicts:
        yield "SAME TOKENS n/m: every output is the same, logprobs differ in n of m requests."
    if "DIFFERENT" in verdicts:
        yield "DIFFERENT n/m: n of m requests differ, in outputs or logprobs."


def run_notes(runs: Sequence[Run]) -> list[str]:
    """What a reader must know of single runs, a sentence each."""
    notes = []
    for number, run in enumerate(runs, 1):
        if resumed := resumed_fast(run.manifest):
            notes.append(f"Run {number} {resumed_words(run, resumed)}")
        if run.unbound:
            notes.append(f"Run {number}: {UNBOUND}")
    return notes


def evidence(m: Matrix) -> str:
    """The numbers behind the verdict."""
    identical, shared = m.identical
    partly = f", {shared} identical on the requests that they share" if shared else ""
    refused = f", {len(m.refused)} not comparable" if m.refused else ""
    total = len(m.pairs) + len(m.refused)
    return f"{identical} of {total} pairs identical{partly}, {len(m.groups())} digests{refused}"


def matrix_table(m: Matrix) -> Sheet:
    """Verdicts of all pairs, with the number of differing requests. `on 12/80`: they share 12, the larger has 80."""
    numbers = range(1, len(m.runs) + 1)
    rows = [[str(i), *(_cell(m, i, j) for j in numbers)] for i in numbers]
    return Sheet("Run by run", ("", *map(str, numbers)), rows, numbers)


def runs_table(runs: Sequence[Run]) -> Sheet:
    """Numbers, folders, the settings in which the runs are not all alike, and their scores."""
    names, settings = told_apart(runs)
    metrics = leading_metrics(runs)
    titles = [metric_name(key, len(metrics) > 1) for key in metrics]
    head = ("Run", "Folder", *names, *titles, "Digest")
    rows = [
        [str(number), run.source.name, *values, *(score_text(run, key) for key in metrics), (run.digest or "none")[:12]]
        for number, (run, values) in enumerate(zip(runs, settings, strict=True), 1)
    ]
    return Sheet("Runs", head, rows, (1, len(head) - 1))


def told_apart(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """(names of the settings in which the runs are not all alike, each run's values; "" where one is not set)."""
    settings = [_chosen(run) for run in runs]
    names = sorted({".".join(path) for other in settings[1:] for path, _, _ in differing(settings[0], other)})
    values = [[chosen.get(name) for name in names] for chosen in settings]
    return names, [["" if value is None else str(value) for value in row] for row in values]


def _cell(m: Matrix, i: int, j: int) -> str:
    if i == j:
        return "-"
    comparison = m.pairs.get((min(i, j), max(i, j)))
    if comparison is None:
        return "not comparable"
    differing = f" {len(comparison.differences)}/{comparison.common}" if comparison.verdict != "IDENTICAL" else ""
    scope = f" on {comparison.common}/{comparison.larger}" if comparison.partial else ""
    return f"{comparison.verdict}{differing}{scope}"


def _chosen(run: Run) -> dict[str, Any]:
    """A run's engine settings and its numerics, by name."""
    settings = run.manifest.engine_settings
    for name in ("numerics", "dtype", "attention_backend", "seed", "limit"):
        if name in run.identity:
            settings[name] = run.identity[name]
    return {name: value for name, value in settings.items() if name not in RESOLVED and not isinstance(value, Mapping)}
