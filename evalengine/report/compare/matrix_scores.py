"""The scores and settings beside a matrix's verdicts: each run's scores, and in which settings two runs differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evalengine.report.compare.compare import Comparison
from evalengine.report.read.run import Run, ScoreKey

ALPHA = 0.05  # significance level of a change in a metric, after Holm's correction
MINUS = "\u2212"


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
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    return f"{100 * value:.1f} %" if is_share(run, key) else f"{value:.4f}"


def change_text(a: Run, b: Run, key: ScoreKey) -> str:
    """The change from `a` to `b`: `-6.5 points`, `+0.0312`; "" where nothing changed, or the change is not finite."""
    change = b.results[key][0] - a.results[key][0]
    if not math.isfinite(change) or change == 0:
        return ""
    text = f"{100 * change:+.1f} points" if is_share(a, key) and is_share(b, key) else f"{change:+.4f}"
    return text.replace("-", MINUS)


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
    """What two runs are to each other, by which a cell is coloured, on pages and pictures alike: `same` (equal bits),
    `tokens` (the same tokens, or equal bits where compared), `some` (results differ, but no metric by more than chance
    explains) or `other` (a metric does, or no test can tell)."""
    if c.verdict == "IDENTICAL":
        return "tokens" if c.partial else "same"
    if c.verdict == "SAME TOKENS":
        return "tokens"
    tested = any(metric.paired is not None for metric in c.metrics)
    return "some" if tested and not moved(c) else "other"


def what_differs(c: Comparison) -> tuple[str, str]:
    """A cell's words: (`same tokens`, `logprobs differ in 16 of 16`)."""
    counts = f"{len(c.differences):,} of {c.common:,}"
    if c.verdict == "IDENTICAL":
        return "identical", ""
    if c.verdict == "SAME TOKENS":
        kind = "logprobs" if c.kinds["logprobs"] or not c.kinds["text"] else "texts"
        return "same tokens", f"{kind} differ in {counts}" if c.differences else ""
    return "different", f"outputs differ in {c.outputs:,} of {c.common:,}" if c.outputs else f"{counts} differ"


def moved(c: Comparison) -> bool:
    """Whether a metric changed by more than chance explains, as the paired tests over all metrics together say."""
    return any(metric.p_holm is not None and metric.p_holm < ALPHA for metric in c.metrics)
