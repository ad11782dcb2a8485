"""What the length limit does to a score: how many documents have an answer that it cut, and what these score."""

from __future__ import annotations

from dataclasses import dataclass

from evalengine.report.numbers import exact_sum
from evalengine.report.read.groups import members
from evalengine.report.read.run import Run, ScoreKey


@dataclass(frozen=True)
class Cut:
    """A metric of the documents whose answers were cut, and of the finished ones."""

    count: int  # documents that were cut
    total: int
    cut: float  # the mean of those that were cut
    finished: float | None  # the mean of the others; None where there are none

    @property
    def words(self) -> str:
        """`12.5 % cut at the limit: 0.0312 on these, 0.7750 on the finished ones`."""
        rest = "" if self.finished is None else f", {self.finished:.4f} on the finished ones"
        return f"{100 * self.count / self.total:.1f} % cut at the limit: {self.cut:.4f} on these{rest}"


def cut_of(run: Run, key: ScoreKey) -> Cut | None:
    """None where no answer behind the metric was cut, or it has no score by document. A document with several samples
    counts as cut if one of them was; a group's documents are those of all its tasks."""
    parts = [part for part, _ in members(run, key)] or [key]
    scores = [(part[0], doc, value) for part in parts for doc, value in run.scores.get(part, {}).items()]
    short = [value for task, doc, value in scores if doc in run.cut.get(task, ())]
    whole = [value for task, doc, value in scores if doc not in run.cut.get(task, ())]
    if not short:
        return None
    finished = exact_sum(whole) / len(whole) if whole else None
    return Cut(len(short), len(scores), exact_sum(short) / len(short), finished)
