"""Statistics of a judge's verdicts; with given labels, Cohen's kappa: the agreement beyond what chance would give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from evalengine.records.manifest_data import Agreement, Manifest
from evalengine.report.stats.metric_interval import wilson

Table = Sequence[Sequence[int]]  # documents with the row's label by the one rating and the column's by the other


def kappa(table: Table, quadratic: bool = False) -> tuple[float, float, float] | None:
    """(kappa, low, high) at 95 %; None where it is not defined: no document, or both ratings know one label only.

    kappa = (p_o - p_e) / (1 - p_e), with p_o the observed agreement and p_e that of independent ratings with the same
    margins (Cohen 1960, "A coefficient of agreement for nominal scales", Educational and Psychological Measurement
    20(1)). quadratic: labels i and j of k agree by 1 - (i - j)^2 / (k - 1)^2, in place of wholly or not at all (Cohen
    1968, Psychological Bulletin 70(4)).

    The interval is Wilson's of p_o, with p_e as fixed as in Cohen's own standard error. It has a width where all agree,
    and covers no less than 90 % with 20 documents, where the asymptotic error of Fleiss, Cohen & Everitt (1969) covers
    26 to 94 %. With quadratic weights it is wider than it need be.
    """
    count, size = sum(map(sum, table)), len(table)
    rows = [math.fsum(row) / count if count else 0.0 for row in table]
    columns = [math.fsum(row[j] for row in table) / count if count else 0.0 for j in range(size)]
    pairs = [(i, j, 1 - ((i - j) / (size - 1)) ** 2 if quadratic else float(i == j))
             for i in range(size) for j in range(size)]  # fmt: skip
    chance = math.fsum(weight * rows[i] * columns[j] for i, j, weight in pairs)
    if not count or math.isclose(chance, 1.0):
        return None
    agreed = math.fsum(weight * table[i][j] for i, j, weight in pairs)
    shares = (agreed / count, *wilson(agreed, count))
    value, low, high = ((share - chance) / (1 - chance) for share in shares)
    return value, max(-1.0, low), high


def judge_lines(manifest: Manifest) -> Iterator[str]:
    """A sentence for everything that a reader must know of the verdicts behind a run's scores."""
    if (judge := manifest.judge) is None:
        return
    proof = f"digest {judge.digest[:16]}..." if judge.digest else f"behind {judge.api}: no one can check its verdicts"
    yield f"judged by {judge.model}: {judge.run} ({proof})"
    for task, said in judge.tasks.items():
        if said.flipped:
            share = f"{said.flipped} of {said.verdicts} pairs ({100 * said.flipped / max(1, said.verdicts):.1f} %)"
            yield f"{task}: {share} were judged otherwise once the two answers were exchanged: they count as ties"
        if said.rejected:
            yield f"{task}: documents without a verdict: {said.rejected} (the judge's endpoint rejected the request)"
        if said.empty:
            yield f"{task}: {said.empty} of {said.verdicts} answers are empty: the lowest value, or the loser of a pair"
        if said.unread:
            yield f"{task}: {said.unread} of {said.verdicts} verdicts hold no label: the lowest value, or a tie"
        if said.agreement is not None:
            yield from (f"{task}: {words}" for words in _agreement_words(said.agreement))


def _agreement_words(said: Agreement) -> Iterator[str]:
    size = len(said.labels)
    if len(said.table) != size or any(len(row) != size for row in said.table) or size < 2:
        return  # no table that a run wrote
    count = sum(map(sum, said.table))
    plain = kappa(said.table)
    if plain is None:
        yield f"kappa of the verdicts with {count} given labels is not defined: both know one label only"
        return
    words = "kappa of the verdicts with {} given labels {:.3f} (95 %: {:.3f} to {:.3f})".format(count, *plain)
    if said.ordered and (weighted := kappa(said.table, quadratic=True)) is not None:
        words += ", with quadratic weights {:.3f} ({:.3f} to {:.3f})".format(*weighted)
    yield words
