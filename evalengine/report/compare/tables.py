"""The sentences and tables of a comparison on the terminal, in lm-eval's style."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from evalengine.plain_text import printable
from evalengine.report.compare.compare import Comparison
from evalengine.report.compare.divergence import NEAR_TIE, TIE_CEILING, LogprobChange
from evalengine.report.compare.flips import CHANGES, tally
from evalengine.report.compare.headline import changed_words
from evalengine.report.numbers import shown
from evalengine.report.read.items import item_name
from evalengine.report.terminal.tables import add, house_table

ROWS = 10  # most rows of a table; --json holds the rest
TIES = {True: "possible", False: "no", None: ""}


def verdict(c: Comparison) -> str:
    """The verdict with the numbers behind it, on one line."""
    return f"{c.verdict}{scope(c)} ({evidence(c)})"


def scope(c: Comparison) -> str:
    """What the verdict covers, where that is not everything that was run; else ""."""
    return f" on the {c.common} requests of both" if c.partial else ""


def evidence(c: Comparison) -> str:
    """The numbers behind the verdict."""
    if c.verdict == "IDENTICAL":
        return f"every bit of {c.common} outputs and their logprobs"
    if c.verdict == "SAME TOKENS":
        if not c.differences:
            return "texts, log-likelihoods and scores; lm-eval's files hold no bits to compare"
        texts = f"{c.kinds['text']} texts of the same tokens" if c.kinds["text"] else ""
        logprobs = f"{c.kinds['logprobs']} of {c.common} requests differ in logprobs" if c.kinds["logprobs"] else ""
        if c.logprobs is not None and c.logprobs.differing:
            logprobs = f"{c.logprobs.differing} of {_total(c)} logprobs differ"
        return "; ".join(part for part in (logprobs, f"{texts} differ" if texts else "") if part)
    asked = [f"{c.kinds[kind]} of {c.common} {kind}s" for kind in ("document", "prompt") if c.kinds[kind]]
    also = "; results were aggregated in another way" if c.rescored and not c.flips else ""
    return f"{' and '.join([*asked, f'{c.outputs} of {c.common} outputs'])} differ; {changed_words(c)}{also}"


def answers_table(c: Comparison) -> Table:
    """How many answers changed under each metric, and in which way."""
    tallies = tally(c.flips)
    changes = [change for change in CHANGES if any(change in counts for counts in tallies.values())]
    table = house_table(("Changed answers", "Filter", "Metric", *changes), left=(0, 1, 2))
    for (task, metric, name), counts in sorted(tallies.items()):
        add(table, [task, name, metric, *(str(counts.get(change, 0)) for change in changes)])
    return table


def logprobs_table(change: LogprobChange) -> Table:
    """How far apart the logprobs of equal tokens are."""
    table = house_table(("Logprobs that differ", "Of", "|delta|", "p50", "p90", "p99", "max"), left=(2,))
    counts = [str(change.differing), str(change.compared)]
    nats = [f"{value:.3g}" if change.measured else "" for value in (*change.percentiles.values(), change.max_abs)]
    add(table, [*counts, "nat", *nats])
    return table


def no_distance(change: LogprobChange) -> Iterator[str]:
    """How many logprobs differ without a distance, if any do."""
    if change.not_finite:
        yield (
            f"{change.not_finite} of the {change.differing} logprobs that differ have no distance: a run has NaN or "
            "infinity there."
        )


def divergence_table(c: Comparison) -> Table:
    """Where outputs part: both continuations, and how close the choice was."""
    headings = ("Item", "Token", "", "Goes on with", "Token ids", "Logprob", "Gap", "Near-tie")
    table = house_table(headings, left=(0, 2, 3, 4, 7))
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
            add(table, [*first, label, continuation, " ".join(map(str, ids[:4])) or "(ends)", number, *last])
    return table


def flips_table(c: Comparison) -> Table:
    """Documents whose answer or score changed."""
    headings = ("Task", "Filter", "Doc", "Answer A", "Answer B", "Metric", "A", "B", "Change", "Cause")
    table = house_table(headings, left=(0, 1, 3, 4, 5, 8, 9))
    for flip in c.flips[:ROWS]:
        answers = ["" if text is None else printable(text)[:40] for text in (flip.answer_a, flip.answer_b)]
        values = ["" if value is None else shown(value, "g") for value in (flip.value_a, flip.value_b)]
        last = [flip.metric or "", *values, flip.change, flip.cause]
        add(table, [flip.task, flip.filter, str(flip.doc_id), *answers, *last])
    return table


def near_ties(c: Comparison) -> Iterator[str]:
    """How many outputs can have parted at a near-tie, if any can be judged."""
    judged = [d.near_tie for d in c.divergences if d.near_tie is not None]
    if judged:
        others = "" if all(judged) else " The others cannot have."
        yield (
            f"{sum(judged)} of {len(judged)} diverging outputs may have parted at a near-tie (two candidates within "
            f"{NEAR_TIE} nat): both logprobs are at most {TIE_CEILING:.3f} and no further apart than that.{others} "
            "Gap: A's confidence in its token minus B's in its own (logprobs); the runner-up's is not recorded."
        )


def _total(c: Comparison) -> int:
    """How many logprobs the requests that both runs hold have."""
    items = [item for key, item in c.a.items.items() if key in c.b.items]
    return sum(0 if item.logprobs is None else len(item.logprobs) for item in items)
