"""Many runs at once: the verdict of every pair, which runs are the same bits, and the words of a matrix's cells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from evalengine.records.manifest_data import resumed_fast
from evalengine.records.sealed import differing
from evalengine.report.compare.as_json import FORMAT, VERSION, comparison_json, run_json
from evalengine.report.compare.comparability import resumed_words
from evalengine.report.compare.compare import Comparison, Level, compare_alike
from evalengine.report.compare.headline import p_of
from evalengine.report.numbers import shown
from evalengine.report.read.run import UNBOUND, Run, ScoreKey
from evalengine.report.stats.significance import ALPHA
from evalengine.util.sheet import Line, Sheet
from evalengine.util.tables import bullets

Settings = tuple[list[str], list[list[str]]]  # names of settings, and each run's values
Pair = tuple[int, int]  # numbers of runs, from 1, the smaller first
WORST = ("DIFFERENT", "SAME TOKENS", "IDENTICAL")
IDENTITY_SETTINGS = ("numerics", "dtype", "attention_backend", "seed", "limit")  # shown next to the engine's
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
    results = {(i, j): compare_alike(a, b, allow) for (i, a), (j, b) in combinations(enumerate(runs, 1), 2)}
    pairs = {pair: result for pair, result in results.items() if isinstance(result, Comparison)}
    return Matrix(list(runs), pairs, {pair: why for pair, why in results.items() if isinstance(why, list)})


def matrix_json(matrix: Matrix) -> dict[str, Any]:
    """Many runs: every pair in full, and the groups of equal digests (numbers of runs, from 1)."""
    return {
        "format": f"{FORMAT}.matrix",
        "version": VERSION,
        "verdict": matrix.verdict,
        "runs": [run_json(run) for run in matrix.runs],
        "groups": [{"digest": digest, "runs": members} for digest, members in matrix.groups()],
        "pairs": [{"pair": list(pair), **comparison_json(c)} for pair, c in sorted(matrix.pairs.items())],
        "refused": [{"pair": list(pair), "why": why} for pair, why in sorted(matrix.refused.items())],
    }


def matrix_report(m: Matrix) -> Iterator[Line]:
    """Everything to print, in order; a string is one line."""
    yield from matrix_lines(m, distinguishing_settings(m.runs))
    yield f"verdict: {m.verdict} ({evidence(m)})"


def matrix_lines(m: Matrix, settings: Settings) -> Iterator[Line]:
    """The runs with these settings, every pair, and what a reader must know of them."""
    yield runs_table(m.runs, settings)
    yield matrix_table(m)
    if any(c.differences for c in m.pairs.values()):
        yield "n/m after a verdict: n of m requests differ; for SAME TOKENS, only their logprobs or texts do."
    for digest, members in m.groups():
        yield f"{'Runs' if len(members) > 1 else 'Run'} {', '.join(map(str, members))}: digest {digest[:12]}"
    yield from bullets("Runs that no command repeats, or whose files may have been edited", run_notes(m.runs))
    for (i, j), why in m.unlike.items():
        yield from bullets(f"Runs {i} (A) and {j} (B) were compared although they are unlike", why)
    for (i, j), why in sorted(m.refused.items()):
        yield from bullets(f"Runs {i} (A) and {j} (B) are not comparable", why)


def run_notes(runs: Sequence[Run]) -> list[str]:
    """Caveats about single runs, one sentence each."""
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


def runs_table(runs: Sequence[Run], settings: Settings | None = None) -> Sheet:
    """Numbers, folders, the values of these settings (default: those that differ), scores and digests."""
    names, values_of = distinguishing_settings(runs) if settings is None else settings
    metrics = leading_metrics(runs)
    head = ("Run", "Folder", *names, *(metric_name(key, len(metrics) > 1) for key in metrics), "Digest")
    rows = [
        [str(number), run.source.name, *values, *(score_text(run, key) for key in metrics), (run.digest or "none")[:12]]
        for number, (run, values) in enumerate(zip(runs, values_of, strict=True), 1)
    ]
    return Sheet("Runs", head, rows, (1, len(head) - 1))


def distinguishing_settings(runs: Sequence[Run]) -> Settings:
    """(names of the settings in which the runs are not all alike, each run's values; "" where one is not set)."""
    settings = []
    for run in runs:
        ran = run.manifest.engine_settings
        ran |= {name: run.identity[name] for name in IDENTITY_SETTINGS if name in run.identity}
        settings.append({n: value for n, value in ran.items() if n not in RESOLVED and not isinstance(value, Mapping)})
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


def leading_metrics(runs: Sequence[Run]) -> list[ScoreKey]:
    """The first metric of each task that all runs report, in the first run's order."""
    first: dict[str, ScoreKey] = {}
    for key in runs[0].results:
        if all(key in run.results for run in runs):
            first.setdefault(key[0], key)
    return list(first.values())


def metric_name(key: ScoreKey, several_tasks: bool) -> str:
    """A metric's name for people: `exact_match`, or `gsm8k exact_match` where there are several tasks."""
    return f"{key[0]} {key[1]}" if several_tasks else key[1]


def score_text(run: Run, key: ScoreKey) -> str:
    """A run's score for people: `77.0 %` for 0/1 scores, else four digits after the point."""
    value = run.results[key][0]
    return f"{shown(100 * value, '.1f')} %" if is_share(run, key) else shown(value, ".4f")


def change_text(a: Run, b: Run, key: ScoreKey) -> str:
    """The change from `a` to `b`: `-6.5 points`, `+0.0312`; "" where nothing changed, or the change is not finite."""
    change = b.results[key][0] - a.results[key][0]
    if not math.isfinite(change) or change == 0:
        return ""
    return f"{100 * change:+.1f} points" if is_share(a, key) and is_share(b, key) else f"{change:+.4f}"


def is_share(run: Run, key: ScoreKey) -> bool:
    """Whether every document scored 0 or 1."""
    return bool(run.scores.get(key)) and set(run.scores[key].values()) <= {0.0, 1.0}


def setting_words(names: Sequence[str], values: Sequence[str]) -> str:
    """The settings that set a run apart from the others: `exact, max_num_seqs 8`."""
    words = (
        value if name == "numerics" else f"{name} {value}" for name, value in zip(names, values, strict=True) if value
    )
    return ", ".join(sorted(words, key=lambda text: " " in text))


def setting_changes(names: Sequence[str], a: Sequence[str], b: Sequence[str]) -> str:
    """The settings in which two runs differ: `max_num_seqs 8 → 64`."""
    rows = zip(names, a, b, strict=True)
    return ", ".join(f"{name} {x or 'none'} → {y or 'none'}" for name, x, y in rows if x != y)


def look(c: Comparison) -> str:
    """How two runs relate, which sets a cell's colour on pages and pictures: `same` (equal bits),
    `tokens` (the same tokens, or equal bits where compared), `some` (results differ, but no metric by more than chance
    explains) or `other` (a metric does, or no test can tell)."""
    if c.verdict == "IDENTICAL":
        return "tokens" if c.partial else "same"
    if c.verdict == "SAME TOKENS":
        return "tokens"
    tested = any(metric.paired is not None for metric in c.metrics)
    return "some" if tested and all(p_of(metric) >= ALPHA for metric in c.metrics) else "other"


def what_differs(c: Comparison) -> tuple[str, str]:
    """A cell's words: (`same tokens`, `logprobs differ in 16 of 16`)."""
    counts = f"{len(c.differences):,} of {c.common:,}"
    if c.verdict == "IDENTICAL":
        return "identical", f"by {c.contracts}" if c.contracts else ""
    if c.verdict == "SAME TOKENS":
        kind = "logprobs" if c.kinds["logprobs"] or not c.kinds["text"] else "texts"
        return "same tokens", f"{kind} differ in {counts}" if c.differences else ""
    return "different", f"outputs differ in {c.outputs:,} of {c.common:,}" if c.outputs else f"{counts} differ"
