"""A comparison on the terminal: plain sentences, tables in lm-eval's style, and the verdict as the last line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from evalengine.report.compare import Comparison
from evalengine.report.divergence import NEAR_TIE, LogprobChange
from evalengine.report.metric_deltas import MetricDelta
from evalengine.report.runs import Key

ROWS = 10  # of a table: the rest is in --json
CAUSES = {
    "configuration": "settings that change numbers differ between the runs, or one was interrupted under fast numerics",
    "data": "documents, targets or prompts differ between the runs",
    "scorer": "the same outputs were scored in another way",
    "numerics": "the same inputs and settings gave other bits",
    "unknown": "a run holds no outputs, so that nothing says whether they changed or how they were scored",
}


def report(comparison: Comparison) -> Iterator[Table | str]:
    """Everything to print, in order; a string is one line."""
    c = comparison
    for label, run in (("A", c.a), ("B", c.b)):
        yield f"{label}: {run.source}" + (f" (digest {run.digest})" if run.digest else " (no digest)")
    yield from bullets("Compared although they are unlike", c.unlike)
    yield from bullets("Settings that may change bits", c.settings)
    if c.verdict != "IDENTICAL":
        yield from bullets("Also different around the runs", c.surroundings)
    yield from bullets("Not known", c.unchecked)
    yield ""
    yield from _summary(c)
    if c.logprobs is not None and c.logprobs.differing:
        yield logprobs_table(c.logprobs)
    if c.divergences:
        yield divergence_table(c)
        yield from _rest(len(c.divergences), "diverging outputs")
        yield from near_ties(c)
    if c.flips:
        yield flips_table(c)
        yield from _rest(len(c.flips), "changed answers")
    if c.verdict != "IDENTICAL" and c.metrics:
        yield metrics_table(c)
        yield (
            f"W/L/T: {units(c.metrics)} on which B is better, worse and equal. "
            "MDE: the smallest true difference that a test at 5 % finds 4 times in 5."
        )
        yield from pairing_notes(c.metrics)
    yield f"verdict: {verdict(c)}"


def verdict(c: Comparison) -> str:
    """The verdict with the numbers behind it, on one line."""
    return f"{c.verdict}{scope(c)} ({evidence(c)})"


def scope(c: Comparison) -> str:
    """What the verdict is on, where it is not on everything that was run."""
    return f" on the {c.common} requests of both" if c.partial else ""


def evidence(c: Comparison) -> str:
    """The numbers behind the verdict."""
    if c.verdict == "IDENTICAL":
        return f"every bit of {c.common} outputs and their logprobs"
    if c.verdict == "SAME TOKENS":
        if c.logprobs is not None:
            return f"{c.logprobs.differing} of {_total(c)} logprobs differ"
        if not c.differences:
            return "texts, log-likelihoods and scores; lm-eval's files hold no bits to compare"
        return f"{len(c.differences)} of {c.common} requests differ in logprobs"
    outputs = sum(d.what == "output" for d in c.differences)
    documents = len({(flip.task, flip.doc_id) for flip in c.flips})
    answers = f"{documents} answer{'' if documents == 1 else 's'}"
    also = "; results were aggregated in another way" if c.rescored and not c.flips else ""
    return f"{outputs} of {c.common} outputs and {answers} differ{also}"


def logprobs_table(change: LogprobChange) -> Table:
    """How far apart the logprobs of equal tokens are."""
    table = house_table(("Logprobs that differ", "Of", "|delta|", "p50", "p90", "p99", "max"), left=(2,))
    counts = [str(change.differing), str(change.compared)]
    nats = [f"{value:.3g}" for value in (*change.percentiles.values(), change.max_abs)]
    steps = [f"{value:.0f}" for value in (*change.percentile_ulps.values(), change.max_ulps)]
    add(table, [*counts, "nat", *nats])
    add(table, ["", "", "float32 ulps", *steps])
    return table


def divergence_table(c: Comparison) -> Table:
    """Where outputs part: both continuations, and how close the choice was."""
    headings = ("Item", "Token", "", "Goes on with", "Token ids", "Logprob", "Gap", "Near-tie")
    table = house_table(headings, left=(0, 2, 3, 4, 7))
    for d in c.divergences[:ROWS]:
        gap = "" if d.gap is None else f"{d.gap:+.4f}"
        tie = {True: "yes", False: "no", None: ""}[d.near_tie]
        for label, ids, logprob, text in (
            ("A", d.tokens_a, d.logprob_a, d.text_a),
            ("B", d.tokens_b, d.logprob_b, d.text_b),
        ):
            first = [item_name(d.key), str(d.position)] if label == "A" else ["", ""]
            said = f"{d.before}|{text}" if text or d.before else ""
            number = "" if logprob is None else f"{logprob:.4f}"
            last = [gap, tie] if label == "A" else ["", ""]
            add(table, [*first, label, said, " ".join(map(str, ids[:4])) or "(ends)", number, *last])
    return table


def flips_table(c: Comparison) -> Table:
    """Documents whose answer or score changed."""
    headings = ("Task", "Filter", "Doc", "Answer A", "Answer B", "Metric", "A", "B", "Cause")
    table = house_table(headings, left=(0, 1, 3, 4, 5, 8))
    for flip in c.flips[:ROWS]:
        answers = ["" if text is None else printable(text)[:40] for text in (flip.answer_a, flip.answer_b)]
        values = ["" if value is None else f"{value:g}" for value in (flip.value_a, flip.value_b)]
        add(table, [flip.task, flip.filter, str(flip.doc_id), *answers, flip.metric or "", *values, flip.cause])
    return table


def metrics_table(c: Comparison) -> Table:
    """Each metric of both runs with the statistics of its pairs."""
    headings = ("Task", "Filter", "Metric", "", "A", "B", "B - A", "95% interval", "W/L/T", "p", "Test", "MDE")
    table = house_table(headings, left=(0, 1, 2, 3, 10))
    for metric in c.metrics:
        task, name, filter_name = metric.key
        arrow = {True: "↑", False: "↓", None: ""}[metric.higher_is_better]
        both = [metric.value_a, metric.value_b]
        if metric.paired is not None and c.partial:  # what is reported covers other documents
            both = [metric.paired.mean_a, metric.paired.mean_b]
        values = ["" if value is None else f"{value:.4f}" for value in both]
        cells = [f"{both[1] - both[0]:+.4f}" if both[0] is not None and both[1] is not None else "", *[""] * 5]
        if (p := metric.paired) is not None:
            interval = f"[{p.ci_low:+.4f}, {p.ci_high:+.4f}]"
            counts = f"{p.wins}/{p.losses}/{p.ties}"
            cells = [f"{p.difference:+.4f}", interval, counts, f"{p.p_value:.3g}", p.test]
            cells.append(f"{p.minimum_detectable_effect:.4f}")
        add(table, [task, filter_name, name, arrow, *values, *cells])
    return table


def house_table(headings: Sequence[str], left: Sequence[int] = ()) -> Table:
    """A table in the style of the run's own; columns in `left` hold words, the others numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right", no_wrap=True)
    return table


def add(table: Table, cells: Sequence[str]) -> None:
    """A row of plain text: nothing in it is markup, nor moves the cursor."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


def item_name(key: Key) -> str:
    """`gsm8k doc 3`, with request and repeat where they are not the first."""
    task, doc, request, repeat = key
    return f"{task} doc {doc}" + (f" request {request}" if request else "") + (f" repeat {repeat}" if repeat else "")


def printable(text: str) -> str:
    """Model output on one line of a terminal: what is no printable character is written as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def bullets(title: str, lines: Sequence[str]) -> Iterator[str]:
    """A title and its lines; nothing if there are none."""
    if lines:
        yield f"{title}:"
        yield from (f"  - {line}" for line in lines)


def _summary(c: Comparison) -> Iterator[str]:
    whats = Counter(difference.what for difference in c.differences)
    parts = [f"{whats[what]} in {what}" for what in ("prompt", "output", "logprobs") if whats[what]]
    counts = f"{len(c.differences)} of {c.common} requests differ" + (f": {', '.join(parts)}" if parts else "")
    yield f"{counts}."
    if c.partial:
        yield f"{c.only_a} requests are only in A and {c.only_b} only in B; they were left out."
    for cause, number in c.causes.items():
        yield f"Cause: {cause} ({number}): {CAUSES[cause]}."
    if c.rescored and not c.flips:
        yield "No document's score changed, yet the reported results did: they were aggregated in another way."


def units(metrics: Sequence[MetricDelta]) -> str:
    """What the statistics pair: `documents`, or `documents (of log-likelihoods per window: windows)`."""
    windows = any(metric.unit == "window" for metric in metrics)
    return "documents (of log-likelihoods per window: windows)" if windows else "documents"


def pairing_notes(metrics: Sequence[MetricDelta]) -> Iterator[str]:
    """What a metric's statistics rest on, where that is not all of its documents, each by itself."""
    for metric in metrics:
        name = ", ".join(metric.key)
        if metric.unit == "window" and metric.paired is not None:
            of = f"{metric.paired.n} windows of {metric.paired.clusters} documents"
            yield f"{name}: {of}; interval, p and MDE take each document as one (clustered)."
        elif metric.paired is not None and metric.paired.clusters < metric.paired.n:
            of = f"{metric.paired.n} documents in {metric.paired.clusters} clusters of related ones"
            yield f"{name}: {of}; interval, p and MDE take each cluster as one."
        if metric.left_out:
            what = "score" if metric.unit == "document" else "log-likelihood of the same tokens in both"
            yield f"{name}: {metric.left_out} {metric.unit}s without a finite {what} are left out of the statistics."


def near_ties(c: Comparison) -> Iterator[str]:
    """How many outputs parted at a near-tie, if any can be judged."""
    judged = [d.near_tie for d in c.divergences if d.near_tie is not None]
    if judged:
        yield (
            f"{sum(judged)} of {len(judged)} diverging outputs parted at a near-tie (|gap| < {NEAR_TIE} nat). "
            "Gap: the logprob of A's token in A less that of B's token in B."
        )


def _rest(number: int, what: str) -> Iterator[str]:
    if number > ROWS:
        yield f"The first {ROWS} of {number} {what}; --json FILE holds them all."


def _total(c: Comparison) -> int:
    """Logprobs of the requests that both runs hold, whose tokens are equal."""
    items = [item for key, item in c.a.items.items() if key in c.b.items]
    return sum(0 if item.logprobs is None else len(item.logprobs) for item in items)
