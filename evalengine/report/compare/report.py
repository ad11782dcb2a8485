"""A comparison on the terminal: plain sentences and tables in lm-eval's style, the answers that went from right to
wrong with all that a person needs to judge them, and the verdict as the last line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from evalengine.plain_text import printable
from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.headline import NO_BITS, changed_words, headline, parts_of_groups, scope
from evalengine.report.compare.item_differences import (
    CHANGES,
    KINDS,
    NEAR_TIE,
    TIE_CEILING,
    Divergence,
    Flip,
    LogprobChange,
    tally,
)
from evalengine.report.compare.metric_deltas import MetricDelta
from evalengine.report.numbers import arrow, p_value, shown
from evalengine.report.read.documents import Question
from evalengine.report.read.names import item_name
from evalengine.report.read.run import Run, key_name
from evalengine.report.stats.metric_interval import cut_words
from evalengine.report.stats.paired import PairedResult
from evalengine.util.sheet import Interval, Line, Sheet
from evalengine.util.tables import bullets

ROWS = 10  # most rows of a table; --json holds the rest
TIES = {True: "possible", False: "no", None: ""}
LARGE = 1e6  # from this value on, digits after the point say nothing
MDE = "MDE: the smallest true difference that a test at 5 % finds 4 times in 5."
AGGREGATED = "No document's score changed, yet the reported results did: they were aggregated in another way."


def verdict(c: Comparison) -> str:
    """The verdict with the numbers behind it, on one line."""
    return f"{c.verdict}{scope(c)} ({evidence(c)})"


def evidence(c: Comparison) -> str:
    """The numbers behind the verdict."""
    if c.verdict == "IDENTICAL":
        return f"every bit of {c.common} outputs and their logprobs{f', by {c.contracts}' if c.contracts else ''}"
    if c.verdict == "SAME TOKENS":
        if not c.differences:
            return f"texts, log-likelihoods and scores; {NO_BITS}"
        texts = f"{c.kinds['text']} texts of the same tokens" if c.kinds["text"] else ""
        logprobs = f"{c.kinds['logprobs']} of {c.common} requests differ in logprobs" if c.kinds["logprobs"] else ""
        if c.logprobs is not None and c.logprobs.differing:
            logprobs = f"{c.logprobs.differing} of {c.logprob_counts[1]} logprobs differ"
        return "; ".join(part for part in (logprobs, f"{texts} differ" if texts else "") if part)
    inputs = [f"{c.kinds[kind]} of {c.common} {kind}s" for kind in ("document", "prompt") if c.kinds[kind]]
    also = "; results were aggregated in another way" if c.rescored and not c.flips else ""
    return f"{' and '.join([*inputs, f'{c.outputs} of {c.common} outputs'])} differ; {changed_words(c)}{also}"


def answers_sheet(c: Comparison) -> Sheet:
    """How many answers changed under each metric, and in which way."""
    tallies = tally(c.flips)
    changes = [change for change in CHANGES if any(change in counts for counts in tallies.values())]
    rows = [
        [task, name, metric, *(f"{counts.get(change, 0):,}" for change in changes)]
        for (task, metric, name), counts in sorted(tallies.items())
    ]
    return Sheet("Changed answers", ("Changed answers", "Filter", "Metric", *changes), rows, (0, 1, 2))


def logprob_lines(change: LogprobChange, ulps: bool = False) -> Iterator[Line]:
    """How many logprobs differ, and how far apart those of equal tokens after equal tokens are. ulps: in float32 values
    between the two, too."""
    counts = f"{change.differing:,} of {change.compared:,} logprobs differ, in requests that differ"
    yield f"{counts}. Largest |Δ logprob|: {change.largest}."
    if change.not_finite:
        yield (
            f"{change.not_finite} of the {change.differing} logprobs that differ have no distance: a run has NaN or "
            "infinity there."
        )
    if change.measured:
        rows = [["nat", *(f"{value:.3g}" for value in (*change.percentiles.values(), change.max_abs))]]
        if ulps:
            steps = (*change.percentile_ulps.values(), change.max_ulps)
            rows.append(["float32 ulps", *(f"{value:,.0f}" for value in steps)])
        yield "How far apart logprobs of equal tokens after equal tokens are, where they differ:"
        yield Sheet("Logprobs", ("|Δ logprob|", *change.percentiles, "max"), rows, (0,))


def divergence_table(c: Comparison) -> Sheet:
    """Where outputs diverge: both continuations, and how close the choice was."""
    headings = ("Item", "Token", "", "Continuation", "Token ids", "Logprob", "Gap", "Near-tie")
    rows = []
    for d in c.divergences[:ROWS]:
        gap = "" if d.gap is None else shown(d.gap, "+.4f")
        for label, ids, logprob, text in (
            ("A", d.tokens_a, d.logprob_a, d.text_a),
            ("B", d.tokens_b, d.logprob_b, d.text_b),
        ):
            first = [item_name(d.key), str(d.position)] if label == "A" else ["", ""]
            continuation = f"{d.before}|{text}" if text or d.before else ""
            number = "" if logprob is None else shown(logprob, ".4f")
            last = [gap, TIES[d.near_tie]] if label == "A" else ["", ""]
            rows.append([*first, label, continuation, " ".join(map(str, ids[:4])) or "(ends)", number, *last])
    return Sheet("Diverging outputs", headings, rows, (0, 2, 3, 4, 7))


def flips_table(c: Comparison) -> Sheet:
    """Documents whose answer or score changed."""
    headings = ("Task", "Filter", "Doc", "Answer A", "Answer B", "Metric", "A", "B", "Change", "Cause")
    rows = []
    for flip in c.flips[:ROWS]:
        answers = ["" if text is None else printable(text)[:40] for text in (flip.answer_a, flip.answer_b)]
        values = ["" if value is None else shown(value, "g") for value in (flip.value_a, flip.value_b)]
        last = [flip.metric or "", *values, flip.change, flip.cause]
        rows.append([flip.task, flip.filter, str(flip.doc_id), *answers, *last])
    return Sheet("Changed answers", headings, rows, (0, 1, 3, 4, 5, 8, 9))


def near_ties(c: Comparison) -> Iterator[str]:
    """How many outputs can have diverged at a near-tie, if any can be judged."""
    judged = [d.near_tie for d in c.divergences if d.near_tie is not None]
    if judged:
        others = "" if all(judged) else " The others cannot have."
        yield (
            f"{sum(judged)} of {len(judged)} diverging outputs may have diverged at a near-tie (two candidates within "
            f"{NEAR_TIE} nat): both logprobs are at most {TIE_CEILING:.3f} and no further apart than that.{others} "
            "Gap: A's confidence in its token minus B's in its own (logprobs); the runner-up's is not recorded."
        )


def report(comparison: Comparison) -> Iterator[Line]:
    """Everything to print, in order; a string is one line."""
    c = comparison
    yield f"{headline(c)}."
    if c.verdict == "DIFFERENT":
        yield f"{changed_words(c)[0].upper()}{changed_words(c)[1:]}."
    for label, run in (("A", c.a), ("B", c.b)):
        yield f"{label}: {run.source} ({f'digest {run.digest[:12]}...' if run.digest else 'no digest'})"
    yield from bullets("Compared although they are unlike", c.unlike)
    yield from bullets("Settings that may change bits", c.settings)
    if c.verdict != "IDENTICAL":
        yield from bullets("Also different around the runs", c.surroundings)
    yield from bullets("Not known", c.unchecked)
    yield from bullets("Weights that differ", c.tensors)
    yield ""
    yield from regression_lines(c)
    parts = differing_in(c.kinds)
    yield f"{len(c.differences)} of {c.common} requests differ{f': {parts}' if parts else ''}."
    if c.partial:
        yield f"{c.only_a} requests are only in A and {c.only_b} only in B; they were left out."
    for cause, number in c.causes.items():
        yield f"Cause: {cause} ({number}): {'; '.join(c.why.get(cause, []))}."
    if c.rescored and not c.flips:
        yield AGGREGATED
    if c.logprobs is not None and c.logprobs.differing:
        yield from logprob_lines(c.logprobs)
    if c.divergences:
        yield divergence_table(c)
        yield from _rest(len(c.divergences), "diverging outputs")
        yield from near_ties(c)
    if c.flips:
        yield answers_sheet(c)
        yield flips_table(c)
        yield from _rest(len(c.flips), "changed answers")
    if c.verdict != "IDENTICAL" and c.metrics:
        inside = parts_of_groups(c)
        moved = [m for m in inside if m.paired is not None and m.paired.wins + m.paired.losses]
        sheet = metrics_table(c, [m for m in c.metrics if m not in inside or m in moved])
        yield sheet
        if len(moved) < len(inside):
            same = len(inside) - len(moved)
            yield f"{same} metrics of tasks in groups, whose documents score the same, are left out."
        yield sheet.notes
        yield from pairing_notes(c.metrics)
        yield from cut_notes(c.metrics, c.a, c.b)
    yield f"verdict: {verdict(c)}"


def differing_in(kinds: Mapping[str, int]) -> str:
    """How often each kind of difference between requests occurs: `16 in prompt, 11 in output`."""
    return ", ".join(f"{kinds[kind]} in {kind}" for kind in KINDS if kinds[kind])


def _rest(number: int, what: str) -> Iterator[str]:
    if number > ROWS:
        yield f"The first {ROWS} of {number} {what}; --json FILE holds them all."


FEW = 5  # shown on the terminal
LONGEST = 300  # characters of a question that the terminal shows: its end


@dataclass(frozen=True)
class Regression:
    """One document: right in A, wrong in B."""

    flip: Flip
    question: Question | None  # None where no run holds texts
    parts_at: Divergence | None  # of its first diverging output; None for scored choices, or without tokens

    @property
    def name(self) -> str:
        return item_name((self.flip.task, self.flip.doc_id, 0, 0))


def regressions(c: Comparison) -> list[Regression]:
    """Every document that got worse under some metric, in the order of tasks and documents."""
    lost: dict[tuple[str, int], Flip] = {}
    for flip in c.flips:
        if flip.change == "right to wrong":
            lost.setdefault((flip.task, flip.doc_id), flip)
    diverging: dict[tuple[str, int], Divergence] = {}
    for d in c.divergences:
        diverging.setdefault(d.key[:2], d)
    return [Regression(flip, c.questions.get(place), diverging.get(place)) for place, flip in lost.items()]


def regression_lines(c: Comparison, names: tuple[str, str] | None = None) -> Iterator[str]:
    """The first of them for the terminal, a block of lines each; nothing if there are none. names: of A and B."""
    found = regressions(c)
    if not found:
        return
    better = c.answers.get("wrong to right", 0)
    who = "" if names is None else f", from {names[0]} (A) to {names[1]} (B)"
    yield f"Right to wrong{who}: {len(found):,}{f' (and {better:,} from wrong to right)' if better else ''}"
    for one in found[:FEW]:
        yield f"  {one.name}"
        for label, text in facts(one, LONGEST):
            yield f"    {label:<9}{text}"
    if len(found) > FEW:
        yield f"  ... and {len(found) - FEW:,} more: --html FILE shows them all"


def facts(one: Regression, longest: int) -> Iterator[tuple[str, str]]:
    """(name, text on one line) of what is known of a regression."""
    if one.question is not None:
        yield "question", printable(_end(" ".join(one.question.question.split()), longest))
        yield "target", printable(one.question.target[:longest])
    for side, answer in (("A", one.flip.answer_a), ("B", one.flip.answer_b)):
        yield side, "no answer" if answer is None else printable(answer[:longest])
    if (d := one.parts_at) is not None:
        gap = "" if d.gap is None else f", gap {shown(d.gap, '+.3f')} nat"
        texts = f"{d.before!r}, then {d.text_a!r} or {d.text_b!r}" if d.before or d.text_a or d.text_b else ""
        yield "diverges", printable(f"at token {d.position}{gap}{f': {texts}' if texts else ''}")


def _end(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"... {text[-longest:]}"


PAIRED = ("B - A", "95 % interval", "Won / lost / equal", "p", "p (Holm)")  # the columns of `paired_cells`
TESTS = {"mcnemar-exact": "on the pairs that differ", "permutation": "of the differences' signs",
         "bound": "the p at which the interval excludes 0"}  # fmt: skip


def metrics_table(c: Comparison, metrics: Sequence[MetricDelta]) -> Sheet:
    """Each of these metrics in both runs, with the statistics of its pairs."""
    rows = []
    for metric in metrics:
        name = f"{key_name(metric.key)} {arrow(metric.higher_is_better)}".rstrip()
        values = ["" if v is None else value_text(v) for v in metric.shown]
        cells = [delta(metric), *[""] * 6]
        if (p := metric.paired) is not None:
            unit = "nats" if metric.nats else ""
            cells = [*paired_cells(p, metric.p_holm, lambda value: value_text(value, "+"), unit), p.test, effect(p)]
        rows.append([name, *values, *cells])
    tests = sorted({metric.paired.test for metric in metrics if metric.paired is not None})
    about = {
        PAIRED[2]: f"{PAIRED[2]}: {units(c.metrics)} on which B is better, worse and equal.",
        **dict.fromkeys(PAIRED[3:], p_words(c.metrics)),
        "Test": f"Test: {', '.join(f'{name} ({TESTS[name]})' for name in tests) or 'none'}.",
        "MDE": MDE,
    }
    return Sheet("Metrics", ("Metric", "A", "B", *PAIRED, "Test", "MDE"), rows, (0, 8), about=about)


def paired_cells(p: PairedResult, p_holm: float | None, text: Callable[[float], str], unit: str = "") -> list[str]:
    """The cells of `PAIRED`. p_holm: None for what is no separate test. text: shows a difference, its sign with it;
    unit: what it is of, where a table holds several."""
    ends = (p.difference, p.ci_low, p.ci_high)
    between = "none"  # one document leaves it without an end
    if all(map(math.isfinite, ends[1:])):
        between = Interval(f"[{text(p.ci_low)}, {text(p.ci_high)}]", ends, 0.0, unit)
    counts = f"{p.wins:,} / {p.losses:,} / {p.ties:,}"
    return [text(p.difference), between, counts, p_value(p.p_value), "" if p_holm is None else p_value(p_holm)]


def value_text(number: float, sign: str = "") -> str:
    """A metric's value: four places after the point, six digits of a large one (the perplexity of a weak model)."""
    return shown(number, f"{sign}.4f" if not abs(number) >= LARGE else f"{sign}.6g")


def delta(metric: MetricDelta) -> str:
    """B - A over the same documents; "" where there is no difference."""
    return "" if metric.difference is None else value_text(metric.difference, "+")


def effect(p: PairedResult) -> str:
    """The minimum detectable effect; `none` where no difference could be found."""
    return shown(p.minimum_detectable_effect, ".4f") if math.isfinite(p.minimum_detectable_effect) else "none"


def p_words(metrics: Sequence[MetricDelta]) -> str:
    """A sentence on what the two p-values are."""
    tests = sum(metric.p_holm is not None for metric in metrics)
    family = f"adjusted for the {tests} tests of this comparison" if tests > 1 else "the same, as there is one test"
    parts = any(metric.paired is not None and metric.p_holm is None for metric in metrics)
    of_groups = "; none for tasks of a group, whose mean is the test" if parts else ""
    return f"p: two-sided, of each metric alone; p (Holm): {family}{of_groups}."


def cut_notes(metrics: Sequence[MetricDelta], a: Run, b: Run) -> Iterator[str]:
    """How many answers the length limit truncated in either run, for each metric that they affect."""
    for metric in metrics:
        if words := cut_words(metric.key, {"A": a, "B": b}):
            yield f"{', '.join(metric.key)}: {words}."


def units(metrics: Sequence[MetricDelta]) -> str:
    """The pairs of the statistics: `documents`, or `documents (of log-likelihoods per window: windows)`."""
    windows = any(metric.unit == "window" for metric in metrics)
    return "documents (of log-likelihoods per window: windows)" if windows else "documents"


def cautions(metric: MetricDelta) -> Iterator[str]:
    """Why the interval of a metric's difference may be too narrow."""
    for why in () if metric.paired is None else metric.paired.cautions:
        yield f"{', '.join(metric.key)}: {why}."


def pairing_notes(metrics: Sequence[MetricDelta]) -> Iterator[str]:
    """Notes on metrics whose numbers are not computed from all documents, each taken alone."""
    for metric in metrics:
        name = ", ".join(metric.key)
        if metric.apart:
            yield f"{name}: no difference is given: {metric.apart}."
        elif metric.shown != (metric.value_a, metric.value_b) and metric.unit == "document":
            reported = " and ".join("none" if v is None else value_text(v) for v in (metric.value_a, metric.value_b))
            yield f"{name}: over the documents of both runs; as reported, over all of each: {reported}."
        if metric.unit == "window" and metric.paired is not None:
            sample = f"{metric.paired.n} windows of {metric.paired.clusters} documents"
            yield f"{name}: {sample}; interval, p and MDE take each document as one (clustered)."
        elif metric.paired is not None and metric.paired.clusters < metric.paired.n:
            sample = f"{metric.paired.n} documents in {metric.paired.clusters} clusters of related ones"
            yield f"{name}: {sample}; interval, p and MDE take each cluster as one."
        yield from cautions(metric)
        if metric.left_out:
            measure = "score" if metric.unit == "document" else "log-likelihood of the same tokens in both"
            yield f"{name}: {metric.left_out} {metric.unit}s without a finite {measure} are left out of the statistics."
